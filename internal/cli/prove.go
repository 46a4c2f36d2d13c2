package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/node/cudaproof"
)

// ExitNotProved is the exit code of prove-gpu if the proof could not run, for whatever reason. command.ExitFailed is the verdict that the GPU failed.
const ExitNotProved = 2

// notProved is the error of a proof that could not run.
type notProved struct{ error }

func (e *notProved) Unwrap() error { return e.error }

// proveTimes are the limits of the flag --timeout.
const leastProveTime, mostProveTime = time.Second, 10 * time.Minute

// formUUID is the form of a flag's value that has no index.
const formUUID = "UUID"

func (p Program) proveVerb() verb {
	return verb{Name: "prove-gpu", Do: p.prove,
		Usage: "prove one idle GPU by work whose results are known: memory, copies, matrix products; exit code 0: passed, 1: the GPU failed, 2: the proof could not run",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "gpu", DefaultText: formUUID, Usage: "UUID of the GPU or MIG instance, or the beginning of it; without it the one in CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES, or the only one"},
			&cli.DurationFlag{Name: "timeout", Value: cudaproof.DefaultTimeout, Usage: "for the whole proof; less time makes the tests shorter"},
			&cli.StringFlag{Name: "memory", DefaultText: "SHARE", Value: "0.9", Usage: fmt.Sprintf("share of the free memory that is tested, at least %v", cudaproof.LeastMemory)},
			&cli.BoolFlag{Name: "json", Usage: "print the last line alone, which is JSON in any case"},
		}}
}

// prove proves a GPU. The last line of its output is JSON, also if the proof could not run.
func (p Program) prove(ctx context.Context, c *cli.Command) error {
	o, err := p.proofOptions(c)
	if command.IsUsage(err) {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer stop()
	result := cudaproof.Result{Values: map[string]float64{}}
	if err == nil {
		result, err = cudaproof.Run(ctx, o)
	} else {
		result.Summary = "could not run: " + err.Error()
	}
	line, unencoded := json.Marshal(struct {
		Summary string             `json:"summary"`
		Values  map[string]float64 `json:"values"`
	}{result.Summary, result.Values})
	_, unwritten := fmt.Fprintf(p.Stdout, "%s\n", line)
	if _, failed := errors.AsType[*cudaproof.Fault](err); failed {
		return fmt.Errorf("prove-gpu: the GPU failed: %w", err)
	}
	if err = errors.Join(err, unencoded, unwritten); err != nil {
		return &notProved{fmt.Errorf("prove-gpu: could not run: %w", err)}
	}
	return nil
}

// proofOptions are the options of a command line. An agent's configuration that is not valid has no effect on a proof.
func (p Program) proofOptions(c *cli.Command) (cudaproof.Options, error) {
	agent, err := p.Options()
	if command.IsUsage(err) {
		return cudaproof.Options{}, err
	}
	o := cudaproof.Options{Library: libcuda(agent.Core.Roots.Driver), Timeout: c.Duration("timeout")}
	if o.Timeout < leastProveTime || o.Timeout > mostProveTime {
		return o, command.Usagef("prove-gpu: --timeout = %v: want a duration from %v to %v", o.Timeout, leastProveTime, mostProveTime)
	}
	memory := c.String("memory")
	o.Memory, err = strconv.ParseFloat(memory, 64)
	if err != nil || !(o.Memory >= cudaproof.LeastMemory && o.Memory <= 1) {
		const want = "prove-gpu: --memory = %q: want a share of the free memory from %v to 1"
		return o, command.Usagef(want, memory, cudaproof.LeastMemory)
	}
	if !c.Bool("json") {
		o.Passed = func(line string) { fmt.Fprintln(p.Stdout, line) }
	}
	o.GPU, err = cudaproof.Choose(c.String("gpu"), os.Getenv)
	return o, err
}

// libcuda is the CUDA driver's library beneath a driver root. In a container that has the driver's libraries it is where the linker finds it, whatever
// the root of the node's driver is.
func libcuda(driverRoot string) string {
	if filepath.Clean(driverRoot) == "/" {
		return cudaproof.Library
	}
	for _, folder := range nvidia.LibraryFolders() {
		path := filepath.Join(driverRoot, folder, cudaproof.Library)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return cudaproof.Library
}
