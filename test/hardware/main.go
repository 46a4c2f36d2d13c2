// Hardware checks both agents on a machine with NVIDIA GPUs, and writes a report of it: what the agents show is compared with
// nvidia-smi value by value, each under a small orchestrator; reservations are made; a CUDA program runs in the environment of one;
// prove-gpu proves each device; the driver is released and used again. What the driver answers is recorded as a machine of the simulated driver.
//
// It changes nothing: it resets no GPU, changes no setting, stops no process but its own, and loads or unloads no module
// (commands.go has every command that it can run). It needs a C compiler for the CUDA program.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
)

// Exit codes.
const (
	exitBad     = 1 // something differs or failed: the report has it
	exitMissing = 2 // the checks can't run here
)

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "folder of nomad-gpu and k8s-gpu")
	flag.StringVar(&o.out, "out", "dist/hardware", "folder in which the folder of the report is made")
	flag.StringVar(&o.smi, "nvidia-smi", "nvidia-smi", "the program nvidia-smi")
	flag.StringVar(&o.cuda, "cuda", "libcuda.so.1", "the CUDA driver's library")
	flag.DurationVar(&o.prove, "prove", 45*time.Second, "timeout of prove-gpu for each device, which uses most of its memory meanwhile; at most 50s, 0 leaves it out")
	root := flag.String("root", "/", "root with the driver, sysfs, procfs and device nodes, such as that of a simulated machine")
	flag.Parse()
	o.roots = core.Roots{Driver: *root, Dev: *root, Sys: filepath.Join(*root, "sys"), Proc: filepath.Join(*root, "proc")}
	os.Exit(o.main(context.Background()))
}

// options are those of the command line.
type options struct {
	bin, out  string
	smi, cuda string
	prove     time.Duration // for the proof of a device; 0 = none
	roots     core.Roots

	whileHeld func(pid int, device string) error // called while a CUDA program holds memory of a device; nil = nothing
}

// main returns the exit code.
func (o options) main(ctx context.Context) int {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Minute)
	defer cancel()
	r, err := o.run(ctx, os.Stdout)
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "hardware:", err)
		if errors.Is(err, errMissing) || errors.Is(err, errNoGPU) {
			return exitMissing
		}
		return exitBad
	case r.Bad() > 0:
		return exitBad
	}
	return 0
}

// The errors of a machine on which the checks can't run, in front of what it lacks.
var (
	errNoGPU   = errors.New("no GPU here")
	errMissing = errors.New("missing")
)

// prerequisites returns errNoGPU or errMissing, and what is left out for lack of rights.
func (o options) prerequisites() (leftOut []string, err error) {
	var missing []string
	lacks := errMissing
	if reason := o.noGPU(); reason != "" {
		missing, lacks = append(missing, reason), errNoGPU
	}
	if _, err := find(o.smi); err != nil {
		missing = append(missing, "nvidia-smi, which is part of the driver")
	}
	if _, err := find("cc"); err != nil {
		missing = append(missing, "cc, a C compiler: apt-get install gcc libc6-dev")
	}
	for _, name := range agents {
		if _, err := os.Stat(filepath.Join(o.bin, name)); err != nil {
			missing = append(missing, filepath.Join(o.bin, name)+": make build")
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("%w: %s", lacks, strings.Join(missing, "; "))
	}
	if os.Getuid() != 0 {
		leftOut = append(leftOut, "not root: the driver reports no SRAM error threshold, the kernel log may not be readable, and open files of other users' processes are not visible")
	}
	return leftOut, nil
}

// noGPU is why no GPU can be used here; "" if one can.
func (o options) noGPU() string {
	s, err := nvidia.Open(nvidia.Options{Roots: o.roots})
	if err == nil {
		snapshot, read := s.Snapshot()
		if err = errors.Join(read, s.Close()); err == nil && len(snapshot.Devices)+len(snapshot.Excluded) > 0 {
			return ""
		}
	}
	module := filepath.Join(o.roots.Proc, "driver/nvidia/version")
	if _, missing := os.Stat(module); missing != nil {
		return fmt.Sprintf("NVIDIA's kernel module is not loaded (%s is missing)", module)
	}
	if err != nil {
		return "the driver can't be used: " + strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return "the driver has no GPU"
}
