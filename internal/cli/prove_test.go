package cli_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/cudastub"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// proof is a run of prove-gpu.
type proof struct {
	code           int
	stdout, stderr string
	summary        string
	values         map[string]float64
}

// output calls a function after the first bytes, which are the line about the GPU: the program waits for signals then.
type output struct {
	text  bytes.Buffer
	first func()
}

func (o *output) Write(text []byte) (int, error) {
	if o.text.Len() == 0 {
		o.first()
	}
	return o.text.Write(text)
}

// proveGPU runs prove-gpu on a simulated machine whose CUDA driver has a fault, with a signal if it is not 0. The last line of stdout must be JSON.
func proveGPU(t *testing.T, program, root, fault string, signal syscall.Signal, args ...string) proof {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binaries.Path(t, program), append([]string{"prove-gpu", "--driver-root=" + root}, args...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), cudastub.Fault + "=" + fault}
	var errs bytes.Buffer
	out := output{first: func() {
		if signal != 0 {
			_ = cmd.Process.Signal(signal)
		}
	}}
	cmd.Stdout, cmd.Stderr = &out, &errs
	check.NoError(t, cmd.Start())
	if exit := (*exec.ExitError)(nil); !errors.As(cmd.Wait(), &exit) && cmd.ProcessState == nil {
		t.Fatalf("%s did not run", program)
	}
	p := proof{code: cmd.ProcessState.ExitCode(), stdout: out.text.String(), stderr: errs.String()}
	lines := strings.Split(strings.TrimSuffix(p.stdout, "\n"), "\n")
	var last struct {
		Summary string
		Values  map[string]float64
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || last.Summary == "" || last.Values == nil {
		t.Errorf("%s: the last line is no JSON (%v):\n%s%s", program, err, p.stdout, p.stderr)
	}
	p.summary, p.values = last.Summary, last.Values
	return p
}

// prove-gpu on a machine: exit codes, what is printed, and for how long a driver that hangs can keep it.
func TestProveGPU(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	cudastub.Build(t, simdriver.LibraryDir(m.Root))
	none := simdriver.StartParallel(t, "none")
	gpu := "--gpu=" + m.UUID(3)
	for i, c := range []struct {
		fault           string
		signal          syscall.Signal
		args            string
		code            int
		summary, stderr string
	}{
		{"", 0, "--timeout=20s", 0, "passed: Device of a test 0, 16 MiB of memory", ""},
		{"product", 0, "--timeout=20s --json", 1, "failed: 1 of 16777216 values of matrix product 1 (product) are wrong", "$: prove-gpu: the GPU failed: 1 of 16777216 values"},
		{"cuInit=214", 0, "", 1, "failed: the driver reports an uncorrectable error", "$: prove-gpu: the GPU failed: the driver reports"},
		{"init", 0, "", 2, "could not run: cuInit: CUDA_ERROR_NO_DEVICE (100)", "$: prove-gpu: could not run: cuInit: CUDA_ERROR_NO_DEVICE (100)"},
		{"cuMemAlloc_v2=2@2", 0, "--json", 2, "could not run: 0 MiB of 16 MiB that were free: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)", "$: prove-gpu: could not run: "},
		{"cuStreamSynchronize=700", 0, "", 2, "could not run: cuStreamSynchronize: ", "$: prove-gpu: could not run: "},
		{"cuCtxCreate_v2=hang", 0, "--timeout=1s", 2, "could not run: not done within 1s: cuCtxCreate does not return", "$: prove-gpu: could not run: "},
		{"cuCtxCreate_v2=hang", syscall.SIGTERM, "", 2, "could not run: terminated signal received: cuCtxCreate does not return", "$: prove-gpu: could not run: "},
		{"", syscall.SIGTERM, "--timeout=10m", 2, "could not run: terminated signal received", "$: prove-gpu: could not run: "},
		{"", syscall.SIGINT, "--timeout=10m", 2, "could not run: interrupt signal received", "$: prove-gpu: could not run: "},
	} {
		for n, program := range programs {
			if i < 7 && i%2 != n { // these are the same for both
				continue
			}
			began := time.Now()
			p := proveGPU(t, program, m.Root, c.fault, c.signal, append(strings.Fields(c.args), gpu)...)
			want := strings.ReplaceAll(c.stderr, "$", program)
			if p.code != c.code || !strings.HasPrefix(p.summary, c.summary) || !strings.HasPrefix(p.stderr, want) || want == "" && p.stderr != "" || strings.Count(p.stderr, "\n") > 1 ||
				time.Since(began) > 30*time.Second || strings.Contains(c.args, "--json") != (strings.Count(p.stdout, "\n") == 1 && strings.Contains(c.args, "--json")) {
				t.Errorf("%s %+v after %v: %+v", program, c, time.Since(began), p)
			}
			if c.code == 0 && (len(p.values) != 6 || p.values["memory_tested_bytes"] != 16<<20 || !strings.HasPrefix(p.stdout, "GPU       "+m.UUID(3)+", ") || strings.Count(p.stdout, "\n") != 6) {
				t.Errorf("%s: %+v", program, p)
			}
		}
	}
	for _, program := range programs {
		if p := proveGPU(t, program, none.Root, "", 0); p.code != 2 || !strings.Contains(p.stderr, "the CUDA driver's library can't be loaded: libcuda.so.1: ") {
			t.Errorf("%s without a driver: %+v", program, p)
		}
		if p := proveGPU(t, program, m.Root, "", 0, "--gpu=3"); p.code != 2 || p.stderr != program+": prove-gpu: could not run: --gpu = \"3\": want one UUID, such as nvidia-smi -L lists\n" {
			t.Errorf("%s --gpu=3: %+v", program, p)
		}
		for arg, want := range map[string]string{
			"--timeout=0s": "--timeout = 0s: want a duration from 1s to 10m0s", "--memory=2": `--memory = "2": want a share of the free memory from 0.5 to 1`, "--memory=0.4": `--memory = "0.4": want`, "--memory=NaN": `--memory = "NaN": want`,
		} {
			if code, stdout, stderr := run(t, program, "prove-gpu", arg); code != 2 || stdout != "" || !strings.HasPrefix(stderr, program+": prove-gpu: "+want) {
				t.Errorf("%s %s: %d, %s%s", program, arg, code, stdout, stderr)
			}
		}
	}
}
