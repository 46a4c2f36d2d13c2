package report_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// read describes the state of a node without a history.
func read(t *testing.T, m *coretest.Machine) report.Report {
	t.Helper()
	cfg := core.DefaultConfig()
	state, _ := report.Read(t.Context(), m.Open, cfg, nil, false)
	return report.DescribeState(state, cfg)
}

func TestNoDriver(t *testing.T) {
	m := coretest.NewMachine(coretest.GPUs(2))
	m.FailOpen(fmt.Errorf("%w: no libnvidia-ml.so.1", gpu.ErrNoDriver))
	r := read(t, m)
	table, _ := render(t, r)
	got, conditions, _ := strings.Cut(table, "\nCONDITIONS\n")
	if got != "driver absent: no NVIDIA driver: no libnvidia-ml.so.1\n" {
		t.Errorf("got %q", got)
	}
	if len(r.Conditions) != 1 || !strings.HasPrefix(conditions, "node  NVML_UNAVAILABLE  unknown  since ") {
		t.Errorf("conditions: %q", conditions)
	}
}

// history is the checkpoint of an earlier agent.
type history struct{ record core.Checkpoint }

func (h history) Load() (core.Checkpoint, string) { return h.record, h.record.BootID }
func (h history) Missing() bool                   { return false }
func (h history) SetAside(error)                  {}
func (h history) Save(core.Checkpoint) error      { return nil }

func TestReadAppliesTheHistory(t *testing.T) {
	m, cfg := coretest.NewMachine(coretest.GPUs(2)), core.DefaultConfig()
	state := core.NewState(cfg).Read(cfg, time.Now(), coretest.GPUs(2)).
		Observe(cfg, time.Now(), health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 95})
	state, _ = report.Read(t.Context(), m.Open, cfg, history{state.Checkpoint("b00t")}, false)
	r := report.DescribeState(state, cfg)
	if len(r.Devices) != 2 || r.Devices[1].Cause != "XID_95" || r.Devices[1].Schedulable || r.Driver.State != "ready" {
		t.Errorf("%+v", r)
	}
}

func TestHungDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		release := m.Hang("Open", gpu.Node)
		start := time.Now()
		r := read(t, m)
		if d := time.Since(start); d > 63*time.Second {
			t.Errorf("took %v", d)
		}
		if r.Driver.State != "failed" || !strings.Contains(r.Driver.Reason, "does not answer") {
			t.Errorf("driver: %+v", r.Driver)
		}
		release()
	})
}

// The report of a healthy node has only its devices.
func TestHealthyHost(t *testing.T) {
	cfg := core.DefaultConfig()
	s := core.NewState(cfg).Read(cfg, time.Now(), coretest.GPUs(1), health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Checked})
	r := report.DescribeState(s, cfg)
	table, _ := render(t, r)
	if n := strings.Count(table, "\n"); n != 3 || len(r.Conditions)+len(r.Counts)+len(r.Warnings) > 0 {
		t.Errorf("%d lines:\n%s", n, table)
	}
	// DescribeState does not change the state.
	before := s.Ledger.Conditions()
	report.DescribeState(s, cfg)
	if diff := cmp.Diff(before, s.Ledger.Conditions()); diff != "" {
		t.Error(diff)
	}
}

// Operational events are listed with the counts of faults, with severity and attributes, and are no conditions.
func TestOperationalEvents(t *testing.T) {
	cfg, now := core.DefaultConfig(), time.Now()
	s := core.NewState(cfg).Read(cfg, now, coretest.GPUs(1)).Observe(cfg, now, health.Observation{
		At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Operational,
		Operational: health.OperationalEvent{Module: "GSP", Code: 7, Severity: health.SeverityFatal, GroupAttributes: 1 << 2, XID: 79},
	})
	table, text := render(t, report.DescribeState(s, cfg))
	if want := "OPERATIONAL_GSP_7 (fatal, XID 79, simulated)"; !strings.Contains(table, want) || strings.Contains(table, "XID_79") {
		t.Errorf("want %q, no condition:\n%s", want, table)
	}
	if want := `"detail": "fatal, XID 79, simulated"`; !strings.Contains(text, want) {
		t.Errorf("want %s:\n%s", want, text)
	}
}

// An empty list is [] in JSON, not null.
func TestEmptyLists(t *testing.T) {
	_, text := render(t, report.DescribeState(core.State{Allocatable: &inventory.Allocatable{}}, core.DefaultConfig()))
	var keys map[string]any
	check.NoError(t, json.Unmarshal([]byte(text), &keys))
	for _, key := range []string{"devices", "excluded", "conditions", "counts", "policyWarnings", "bindings", "overlaps"} {
		if list, ok := keys[key].([]any); !ok || len(list) > 0 {
			t.Errorf("%s is %v", key, keys[key])
		}
	}
}

func TestMissingDeviceNodes(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Injection.Nodes = true
	reading := coretest.GPUs(3)
	reading.Nodes = slices.DeleteFunc(reading.Nodes, func(n string) bool { return n == "/dev/nvidia-uvm" || n == "/dev/nvidia2" })
	state, _ := report.Read(t.Context(), coretest.NewMachine(reading).Open, cfg, nil, false)
	r := report.DescribeState(state, cfg)
	table, text := render(t, r)
	for _, want := range []string{
		"device nodes missing (GPU 0, 1): /dev/nvidia-uvm: run nvidia-modprobe -c0 -u\n",
		"device nodes missing (GPU 2): /dev/nvidia-uvm, /dev/nvidia2: run nvidia-modprobe -c0 -u && nvidia-modprobe -c2\n",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("no line %s in\n%s", want, table)
		}
	}
	var back report.Report
	check.NoError(t, json.Unmarshal([]byte(text), &back))
	for i, d := range back.Devices {
		if want := 1 + i/2; len(d.MissingNodes) != want || d.CreateNodesCommand == "" || !d.Schedulable || !strings.Contains(d.Health, "missing /dev/nvidia-uvm") {
			t.Errorf("%+v", d)
		}
	}
}

// XIDs in the kernel log at a PCI address without a listed GPU are reported with the GPU that is excluded there, else in a
// warning.
func TestXIDsOfGPUsThatAreNotListed(t *testing.T) {
	cfg, reading := core.DefaultConfig(), coretest.GPUs(1)
	reading.Excluded = []gpu.Exclusion{{Index: 1, PCI: "0000:5a:00.0", Failure: gpu.FailureLost, Reason: "GPU is lost"}}
	s := core.NewState(cfg).Read(cfg, time.Now(), reading)
	for _, pci := range []gpu.PCIAddress{"0000:5a:00.0", "0000:fe:00.0"} {
		for _, code := range []uint64{79, 154, 79} {
			s = s.Observe(cfg, time.Now(), health.Observation{PCI: pci, Kind: health.XID, Code: code, FromKernelLog: true})
		}
	}
	r := report.DescribeState(s, cfg, problem.Problem{Code: problem.NodeLabels, Text: "a warning"})
	if want := []string{"a warning", "the kernel log has XID 79, 154 of 0000:fe:00.0, where no GPU is listed"}; !slices.Equal(r.Warnings, want) {
		t.Errorf("warnings: %q", r.Warnings)
	}
	if len(r.Excluded) != 1 || r.Excluded[0].Reason != "GPU is lost; the kernel log has XID 79, 154" {
		t.Errorf("excluded: %+v", r.Excluded)
	}
}
