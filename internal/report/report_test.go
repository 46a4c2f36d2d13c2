package report_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/report"
)

func host() gpu.Snapshot {
	s := coretest.GPUs(2)
	s.Excluded = []gpu.Exclusion{{Index: 7, Failure: gpu.FailureError, Reason: "nvmlDeviceGetHandleByIndex: Unknown Error"}}
	return s
}

// read describes the state of a host without a history.
func read(t *testing.T, m *coretest.Machine) report.Report {
	t.Helper()
	cfg := core.DefaultConfig()
	return report.DescribeState(report.Read(t.Context(), m.Open, cfg, nil), cfg)
}

func TestTableAndJSONAgree(t *testing.T) {
	m := coretest.NewMachine(host())
	r := read(t, m)
	var table, text bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	if err := r.WriteJSON(&text); err != nil {
		t.Fatal(err)
	}
	var back report.Report
	if err := json.Unmarshal(text.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	if len(back.Devices) != 2 || len(back.Excluded) != 1 {
		t.Fatalf("JSON: %s", text.String())
	}
	for _, want := range []string{
		"driver ready 580.95.05, CUDA 13.0, 2 devices, 1 excluded",
		string(back.Devices[1].ID), back.Devices[1].Health, string(back.Devices[1].PCI), back.Excluded[0].Reason,
	} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in\n%s", want, table.String())
		}
	}
}

func TestNoDriver(t *testing.T) {
	m := coretest.NewMachine(host())
	m.FailOpen(fmt.Errorf("%w: no libnvidia-ml.so.1", gpu.ErrNoDriver))
	r := read(t, m)
	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	got, conditions, _ := strings.Cut(table.String(), "\nCONDITIONS\n")
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
func (h history) SetAside(error)                  {}
func (h history) Save(core.Checkpoint) error      { return nil }

func TestReadAppliesTheHistory(t *testing.T) {
	m, cfg := coretest.NewMachine(host()), core.DefaultConfig()
	state := core.NewState(cfg).Read(cfg, time.Now(), host()).
		Observe(cfg, time.Now(), health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 95})
	r := report.DescribeState(report.Read(t.Context(), m.Open, cfg, history{state.Checkpoint("b00t")}), cfg)
	if len(r.Devices) != 2 || r.Devices[1].Cause != "XID_95" || r.Devices[1].Schedulable || r.Driver.State != "ready" {
		t.Errorf("%+v", r)
	}
}

func TestHungDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(host())
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
