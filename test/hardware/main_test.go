package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/cudastub"
	"github.com/tandem-gpu/tandem/test/hardware/compare"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// smiVariable has the root of a simulated machine in a process that is nvidia-smi.
const smiVariable = "TANDEM_HARDWARE_SMI"

func TestMain(m *testing.M) {
	if root := os.Getenv(smiVariable); root != "" {
		os.Exit(fakeMain(root, os.Args[1:]))
	}
	os.Exit(m.Run())
}

var must = check.NoError

// simulated are the options of a run on a simulated machine, with its nvidia-smi and a CUDA driver.
func simulated(t *testing.T, m *simdriver.Machine) options {
	t.Helper()
	dir, err := os.MkdirTemp("", "hw")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	self, err := os.Executable()
	must(t, err)
	smi := filepath.Join(dir, "nvidia-smi")
	must(t, os.WriteFile(smi, []byte(fmt.Sprintf("#!/bin/sh\n%s=%s exec %s \"$@\"\n", smiVariable, m.Root, self)), 0o755))
	return options{
		bin: filepath.Dir(binaries.Path(t, nomadGPU)), out: filepath.Join(dir, "out"), smi: smi, cuda: cudastub.Build(t, dir),
		roots: rootsOf(m),
	}
}

// slotOf finds the GPU of a device.
func slotOf(t *testing.T, m *simdriver.Machine, id string) (slot int, at []simdriver.At) {
	t.Helper()
	text, err := os.ReadFile(m.Root + "/machine.conf")
	must(t, err)
	section := 0
	for line := range strings.Lines(string(text)) {
		if _, err := fmt.Sscanf(line, "[gpu %d]", &section); err == nil || !strings.Contains(line, id) {
			continue
		}
		if words := simdriverInstance(line); isInstance(id) {
			var a simdriver.At
			_, err := fmt.Sscan(words["gi"]+" "+words["ci"], &a.GI, &a.CI)
			must(t, err)
			at = append(at, a)
		}
		return section, at
	}
	t.Fatalf("no device %s", id)
	return 0, nil
}

// useCount makes a machine show a use count of its module.
func useCount(t *testing.T, m *simdriver.Machine) {
	t.Helper()
	must(t, os.WriteFile(m.Root+"/sys/module/nvidia/refcnt", []byte("3\n"), 0o644))
}

// run runs everything on a simulated machine.
func runOn(t *testing.T, m *simdriver.Machine) (*Report, string) {
	t.Helper()
	o := simulated(t, m)
	useCount(t, m)
	o.whileHeld = func(pid int, id string) error {
		slot, at := slotOf(t, m, id)
		defer useCount(t, m) // each change of the machine removes files that are not of its
		return m.StartProcess(slot, pid, 700, at...)
	}
	var out bytes.Buffer
	r, err := o.run(t.Context(), &out)
	if err != nil {
		t.Fatal(err, out.String())
	}
	for _, name := range []string{"report.json", "section.md", "values.txt", "machine.conf", "agents.log", "nvidia-smi.xml", "metrics.txt"} {
		if text, err := os.ReadFile(filepath.Join(o.out, r.folder(), name)); err != nil || len(text) == 0 {
			t.Errorf("%s: %d bytes, %v", name, len(text), err)
		}
	}
	return r, out.String()
}

// results are the results of a check.
func results(r *Report, part, name string) (all []Result) {
	for _, c := range r.Checks {
		if c.Part == part && strings.HasPrefix(c.Name, name) {
			all = append(all, c.Result)
		}
	}
	return all
}

// Every part runs on a machine with GPUs, and nothing fails.
func TestRun(t *testing.T) {
	for _, machine := range []string{"h200", "a30"} {
		t.Run(machine, func(t *testing.T) {
			m := simdriver.Start(t, machine)
			r, out := runOn(t, m)
			if r.Bad() > 0 {
				t.Error(out)
			}
			for part, name := range map[string]string{
				"nvml": "session", "fixture": "the driver is recorded", "agents": "k8s-gpu under", "values": "nothing differs",
				"health": "source events", "reservations": "kubelet", "doctor": "nomad-gpu ran", "maintenance": "work can start again", "end": "k8s-gpu ends",
			} {
				if got := results(r, part, name); !slices.Equal(got, []Result{OK}) {
					t.Errorf("%s, %s: %v", part, name, got)
				}
			}
			if section := r.Markdown(); uuid.MatchString(section) || !strings.Contains(section, "| cuda | GPU 0 | ok |") {
				t.Error(section)
			}
			if got := results(r, "maintenance", "use count"); !slices.Equal(got, []Result{OK, OK}) {
				t.Errorf("use counts: %v", got)
			}
			if got := results(r, "cuda", ""); len(got) == 0 || slices.Contains(got, LeftOut) {
				t.Errorf("cuda: %v", got)
			}
			checkCoverage(t, r)
			if t.Failed() {
				t.Log(out, r.table())
			}
		})
	}
}

// Each device is proved. What a proof finds is a failed check, and without a CUDA driver it is left out.
func TestProve(t *testing.T) {
	m := simdriver.Start(t, "h100-vm")
	id := m.UUID(0)
	o := simulated(t, m)
	o.prove = 12 * time.Second
	for _, c := range []struct {
		library bool
		fault   string
		result  Result
		detail  string
	}{
		{false, "", LeftOut, "the CUDA driver's library can't be loaded"}, {true, "", OK, "passed: Device of a test 0, 16 MiB of memory, d2h_gbps "},
		{true, "stuck", Failed, "prove-gpu: the GPU failed: "}, {true, "init", Failed, "prove-gpu: could not run: "},
	} {
		if c.library {
			cudastub.Build(t, simdriver.LibraryDir(m.Root))
		}
		t.Setenv(cudastub.Fault, c.fault)
		r := &run{options: o, Report: newReport(io.Discard), dir: t.TempDir(), before: map[string]compare.Source{}}
		r.inspect(t.Context())
		r.proveAll(t.Context())
		last := r.Checks[len(r.Checks)-1]
		if last.Part != "prove" || last.Result != c.result || !strings.Contains(last.Detail, c.detail) || c.library && last.Name != id+", nomad-gpu" {
			t.Errorf("%+v: %+v", c, last)
		}
	}
}

// What a machine does wrong is in the report, and the exit code is that of a failure: nvidia-smi has another power limit and lists
// another GPU, and the kernel of the CUDA program computes nothing.
func TestFailures(t *testing.T) {
	m := simdriver.Start(t, "t4")
	o := simulated(t, m)
	text, err := os.ReadFile(m.Root + "/machine.conf")
	must(t, err)
	other := t.TempDir()
	changed := strings.ReplaceAll(string(text), "power_limit = 70 W", "power_limit = 60 W") +
		"[gpu 1]\nuuid = GPU-00000000-0000-4000-8000-000000000001\npci = 0000:af:00.0\nname = Tesla T4\narch = turing\nbrand = nvidia\ncompute = 7.5\n"
	must(t, os.WriteFile(other+"/machine.conf", []byte(changed), 0o644))
	script, err := os.ReadFile(o.smi)
	must(t, err, os.WriteFile(o.smi, bytes.ReplaceAll(script, []byte(m.Root), []byte(other)), 0o755))
	t.Setenv("STUB_CUDA_FAULT", "kernel")
	o.whileHeld = func(pid int, _ string) error { return m.StartProcess(0, pid, 300) }
	var out bytes.Buffer
	r, err := o.run(t.Context(), &out)
	must(t, err)
	var failed []string
	for _, c := range r.Checks {
		if c.Result == Failed {
			failed = append(failed, c.Part+": "+c.Detail)
		}
	}
	for _, want := range []string{
		"cuda: kernel 0 differs",
		"values: GPU 0 power limit, W: NVML, nomad-gpu inspect, k8s-gpu inspect, Nomad, metrics has 70, nvidia-smi has 60",
		"values: GPU 1 is not listed by nomad-gpu inspect alone",
		"values: machine GPUs: NVML, nomad-gpu inspect alone",
	} {
		if !slices.ContainsFunc(failed, func(text string) bool { return strings.HasPrefix(text, want) }) {
			t.Errorf("no %q in\n%s", want, strings.Join(failed, "\n"))
		}
	}
	if section := r.Markdown(); !strings.Contains(section, fmt.Sprintf("**%d checks failed.**", len(failed))) || !strings.Contains(section, "simulated driver: no real GPU") {
		t.Error(section)
	}
}

// checkCoverage checks which values were compared: nvidia-smi and an agent have each of these.
func checkCoverage(t *testing.T, r *Report) {
	t.Helper()
	for _, name := range []compare.Value{
		compare.DriverVersion, compare.CUDAVersion, compare.GPUCount, compare.PCIAddress, compare.Name, compare.Memory, compare.BAR1, compare.PowerLimit,
		compare.MaxGraphicsClock, compare.MaxMemoryClock, compare.PCIeBandwidth, compare.PCIeGeneration, compare.PCIeWidth, compare.Persistence,
		compare.Display, compare.ECCMode, compare.ECCMemory, compare.ECCUncorrected, compare.PCIeReplays, compare.Serial, compare.Architecture,
		compare.Brand, compare.ComputeCapability, compare.Temperature, compare.Power, compare.GPUUtilization, compare.MemoryUsed, compare.Processes,
	} {
		if !slices.ContainsFunc(r.Values, func(row compare.Row) bool {
			return row.Value == name && row.Result == compare.Equal && row.Source != "NVML"
		}) {
			t.Errorf("%s of no agent is equal to that of nvidia-smi", name)
		}
	}
}
