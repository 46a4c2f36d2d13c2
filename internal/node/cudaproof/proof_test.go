package cudaproof

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/cudastub"
)

const testGPU = "GPU-7fd648e1-a695-5024-8c66-5db903cdf8e3"

// prover proves the devices of the stub.
type prover struct {
	t       *testing.T
	library []byte
}

func newProver(t *testing.T, arguments ...string) prover {
	t.Helper()
	library, err := os.ReadFile(cudastub.Build(t, t.TempDir(), arguments...))
	check.NoError(t, err)
	for _, name := range []string{cudastub.Fault, cudastub.Devices, cudastub.Capability, cudastub.Mode, cudastub.Free, visibleToCUDA, "CUDA_MPS_PIPE_DIRECTORY", "CUDA_CACHE_DISABLE"} {
		t.Setenv(name, "")
		check.NoError(t, os.Unsetenv(name))
	}
	return prover{t, library}
}

// options are those of a proof by a library of its own, which counts its calls from 0.
func (p prover) options() Options {
	path := filepath.Join(p.t.TempDir(), Library)
	check.NoError(p.t, os.WriteFile(path, p.library, 0o755))
	return Options{GPU: testGPU, Library: path, Timeout: time.Minute, Memory: 0.9, brief: true}
}

func (p prover) prove(fault string) (Result, error) {
	check.NoError(p.t, os.Setenv(cudastub.Fault, fault))
	return Run(p.t.Context(), p.options())
}

func isFault(err error) bool {
	_, ok := errors.AsType[*Fault](err)
	return ok
}

// A GPU without a fault passes, with all values; one without such tensor cores lacks theirs.
func TestPassed(t *testing.T) {
	p := newProver(t)
	for capability, want := range map[string]string{
		"90": "d2h_gbps h2d_gbps matrix_tflops memory_gbps memory_tested_bytes tensor_tflops",
		"75": "d2h_gbps h2d_gbps matrix_tflops memory_gbps memory_tested_bytes", "61": "d2h_gbps h2d_gbps matrix_tflops memory_gbps memory_tested_bytes",
	} {
		t.Setenv(cudastub.Capability, capability)
		var lines []string
		o := p.options()
		o.Passed = func(line string) { lines = append(lines, line) }
		r, err := Run(t.Context(), o)
		if names := strings.Join(slices.Sorted(maps.Keys(r.Values)), " "); err != nil || names != want || r.Summary != "passed: Device of a test 0, 16 MiB of memory" {
			t.Errorf("%s: %v, %+v", capability, err, r)
		}
		for name, v := range r.Values {
			if !(v > 0) {
				t.Errorf("%s = %v", name, v)
			}
		}
		if text := strings.Join(lines, "\n"); !strings.HasPrefix(text, "GPU       "+testGPU+", Device of a test 0, ") || len(lines) != len(strings.Fields(want))-1 {
			t.Errorf("%s: %s", capability, text)
		}
	}
}

// A wrong value that the GPU stored or computed, and an uncorrectable error of its memory, are the only verdicts.
func TestFaults(t *testing.T) {
	p := newProver(t)
	for fault, want := range map[string]string{
		"stuck":                      "words of memory are wrong in pass 1, the first at byte 0x3e88 of the tested memory: ",
		"product":                    "1 of 65536 values of matrix product 1 (product) are wrong, the first in row 1, column 5: ",
		"tensor":                     "1 of 65536 values of matrix product 1 (tensor) are wrong, the first in row 1, column 5: ",
		"cuInit=214":                 "the driver reports an uncorrectable error of the GPU's memory: cuInit: CUDA_ERROR_ECC_UNCORRECTABLE (214)",
		"cuStreamSynchronize=214":    "cuStreamSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE (214)",
		"cuStreamSynchronize=214@12": "cuStreamSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE (214)",
		"cuMemcpyDtoH_v2=214":        "cuMemcpyDtoH: CUDA_ERROR_ECC_UNCORRECTABLE (214)",
	} {
		if r, err := p.prove(fault); !isFault(err) || !strings.Contains(err.Error(), want) || r.Summary != "failed: "+err.Error() {
			t.Errorf("%s: %v, %q", fault, err, r.Summary)
		}
	}
}

// No other error is a verdict, whatever fails and with whichever result.
func TestCouldNotRun(t *testing.T) {
	p := newProver(t)
	faults := map[string]string{
		"init":                  "cuInit: CUDA_ERROR_NO_DEVICE (100): text of the stub: the device nodes",
		"cuMemAlloc_v2=2@2":     "0 MiB of 16 MiB that were free: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2): text of the stub: another process uses the GPU",
		"cuMemAlloc_v2=2@6":     "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)",
		"cuMemHostAlloc=2":      "pinned memory of the node, 1 MiB: cuMemHostAlloc: ",
		"text":                  "cuModuleLoadData: CUDA_ERROR_OTHER (218): text of the stub: the driver is older than the program needs, or this is a fault of the program: ptxas application ptx input, line 7; error : wrong",
		"to":                    "1 words of a copy to the GPU are wrong, the first at byte 0x0: ",
		"from":                  "a copy from the GPU is wrong: what it was made of is right: the GPU, its PCIe link or the node's memory may be the cause",
		"memory":                "the GPU has found wrong memory, and its note about it is wrong, too",
		"kernel":                "a matrix product (product) is right on the GPU, and its copy on the node is wrong: ",
		"cuCtxDestroy_v2=999":   "cuCtxDestroy: ",
		"cuCtxCreate_v2=46":     "compute mode",
		"cuInit=803":            "another version than the kernel module",
		"cuInit=805":            "an MPS control daemon serves the GPU",
		"cuLaunchKernel=701":    "cuLaunchKernel fill: ",
		"cuMemFree_v2=700@2":    "cuMemFree: ",
		"cuModuleGetFunction=1": "cuModuleGetFunction: ",
	}
	for code := range 1000 {
		switch code {
		case 1, 34, 46, 100, 101, 218, 220, 226, 304, 700, 702, 710, 714, 715, 716, 717, 718, 719, 800, 802, 805, 810, 911, 999:
			faults[fmt.Sprint("cuStreamSynchronize=", code)] = fmt.Sprintf("(%d)", code)
		}
	}
	for fault, want := range faults {
		if r, err := p.prove(fault); err == nil || isFault(err) || !strings.Contains(err.Error(), want) || r.Summary != "could not run: "+err.Error() {
			t.Errorf("%s: %v, %q", fault, err, r.Summary)
		}
	}
}

// The proof is for one GPU that is there.
func TestOneGPU(t *testing.T) {
	p := newProver(t)
	for _, c := range []struct{ gpu, devices, mode, want string }{
		{"", testGPU, "", ""}, {testGPU, "", "3", ""}, {"", "", "", "shows no GPU: the device nodes"},
		{"", testGPU + "," + testGPU, "", "shows 2 GPUs: want one by --gpu"}, {testGPU, "", "2", "the compute mode of Device of a test 0 is prohibited"},
	} {
		for name, value := range map[string]string{cudastub.Devices: c.devices, cudastub.Mode: c.mode} {
			check.NoError(t, os.Setenv(name, value))
		}
		check.NoError(t, os.Unsetenv(visibleToCUDA))
		o := p.options()
		o.GPU = c.gpu
		_, err := Run(t.Context(), o)
		if c.want == "" && err != nil || c.want != "" && (err == nil || isFault(err) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// Memory that can't be allocated at once is allocated in parts.
func TestFragments(t *testing.T) {
	p := newProver(t)
	t.Setenv(cudastub.Free, "300")
	if r, err := p.prove("fragments"); err != nil || r.Values["memory_tested_bytes"] != 160*mebibyte {
		t.Errorf("%v, %+v", err, r)
	}
}

// A GPU of which only a small part can be tested has not passed, and has not failed.
func TestLittleMemory(t *testing.T) {
	for _, c := range []struct {
		free  string
		share float64
		want  string
	}{
		{"", 0.3, "0 MiB of 20 MiB that are free would be tested: want a share of at least 0.5"},
		{"150", 0.9, "150 MiB of 512 MiB are free: want a share of at least 0.5: another process uses the GPU"},
		{"400", 0.4, "160 MiB of 400 MiB that are free would be tested: want a share of at least 0.5"},
	} {
		p := newProver(t)
		if c.free != "" {
			check.NoError(t, os.Setenv(cudastub.Free, c.free))
		}
		o := p.options()
		o.Memory = c.share
		r, err := Run(t.Context(), o)
		if err == nil || isFault(err) || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(r.Summary, "could not run: ") {
			t.Errorf("%s: %v, %q", c.free, err, r.Summary)
		}
	}
}

// A library that is missing, or lacks a function, is no fault.
func TestLibrary(t *testing.T) {
	p := newProver(t, "-DcuMemsetD32Async=other")
	o := p.options()
	if _, err := Run(t.Context(), o); err == nil || isFault(err) || !strings.Contains(err.Error(), "no function cuMemsetD32Async") {
		t.Error(err)
	}
	o.Library += ".missing"
	if _, err := Run(t.Context(), o); err == nil || isFault(err) || !strings.Contains(err.Error(), "cannot open shared object file") {
		t.Error(err)
	}
}

// A call that hangs ends the proof after its time, and after a signal; one that does not hang ends it at once.
func TestEnds(t *testing.T) {
	p := newProver(t)
	for _, call := range []string{"cuInit", "cuStreamSynchronize", "cuMemFree_v2"} {
		check.NoError(t, os.Setenv(cudastub.Fault, call+"=hang"))
		name := strings.TrimSuffix(call, "_v2")
		for within := 500 * time.Millisecond; ; within *= 4 { // it may not come to the call in that time
			o := p.options()
			o.Timeout = within
			began := time.Now()
			r, err := Run(t.Context(), o)
			if err != nil && !strings.Contains(err.Error(), name) && within < 10*time.Second {
				continue
			}
			if err == nil || isFault(err) || err.Error() != fmt.Sprintf("not done within %v: %s does not return", within, name) || time.Since(began) > within+10*time.Second || r.Values == nil {
				t.Errorf("%s: %v after %v, %+v", call, err, time.Since(began), r)
			}
			break
		}
	}
	stopped := errors.New("stopped by a test")
	for _, fault := range []string{"", "cuInit=hang"} {
		check.NoError(t, os.Setenv(cudastub.Fault, fault))
		ctx, stop := context.WithCancelCause(t.Context())
		time.AfterFunc(50*time.Millisecond, func() { stop(stopped) })
		o := p.options()
		o.brief = false // without the signal, it would take half a minute
		began := time.Now()
		if r, err := Run(ctx, o); !errors.Is(err, stopped) || isFault(err) || time.Since(began) > 10*time.Second || !strings.HasPrefix(r.Summary, "could not run: stopped by a test") {
			t.Errorf("%q: %v after %v, %+v", fault, err, time.Since(began), r)
		}
	}
}

// Variables that name the GPU, and those that do not.
func TestChoose(t *testing.T) {
	const other = "GPU-8b407413-f818-57fc-bb12-a1c15d88814a"
	for _, c := range []struct{ given, cuda, runtime, gpu, problem string }{
		{"", "", "", "", ""}, {testGPU, other, other, testGPU, ""}, {"MIG-1", "", "", "MIG-1", ""}, {"", testGPU, testGPU, testGPU, ""}, {"", "", testGPU, testGPU, ""},
		{"", "1", testGPU, "1", ""}, {"", testGPU, "all", testGPU, ""}, {"", "", "void", "", ""}, {"", "", "0,1", "", ""},
		{"0", "", "", "", `--gpu = "0": want one UUID`}, {testGPU + "," + other, "", "", "", "want one UUID"},
		{"", "0,1", "", "", `CUDA_VISIBLE_DEVICES = "0,1": want one GPU`}, {"", "", testGPU + "," + other, "", "NVIDIA_VISIBLE_DEVICES = "}, {"", testGPU, other, "", "are two GPUs"},
	} {
		env := map[string]string{visibleToCUDA: c.cuda, visibleInRuntime: c.runtime}
		gpu, err := Choose(c.given, func(name string) string { return env[name] })
		if gpu != c.gpu || (err == nil) != (c.problem == "") || err != nil && !strings.Contains(err.Error(), c.problem) {
			t.Errorf("%+v: %q, %v", c, gpu, err)
		}
	}
}
