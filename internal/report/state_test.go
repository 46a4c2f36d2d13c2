package report_test

import (
	"bytes"
	"flag"
	"os"
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
	"github.com/tandem-gpu/tandem/internal/report"
)

var update = flag.Bool("update", false, "update the golden files")

// troubled is a host with each kind of condition, two minutes after the first one. It needs a synctest bubble, so that
// its times are always the same.
func troubled(t *testing.T) (core.State, core.Config) {
	t.Helper()
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	cfg.Health.RecoveryDwell = 10 * time.Minute
	reading := coretest.GPUs(8)
	reading.Devices[7].MIG = true
	instance := reading.Devices[7]
	instance.ID, instance.At.GI, instance.At.CI = "MIG-00000000-0000-4000-8000-000000000017", 3, 0
	instance.Model, instance.Profile, instance.MIG = "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "1g.10gb", false
	instance.NUMANode, instance.Memory = -1, 9984<<20
	reading.Devices = append(reading.Devices, instance)
	reading.Excluded = []gpu.Exclusion{{Index: 8, Failure: gpu.FailureError, Reason: "nvmlDeviceGetHandleByIndex: Unknown Error"}}

	healthy := health.Sample{RecoveryAction: health.RecoveryNone, Events: health.Yes, RemapPending: health.No}
	samples := map[int]health.Sample{}
	for i := range 8 {
		samples[i] = healthy
	}
	check := func(except ...int) (obs []health.Observation) {
		for i := range 8 {
			o := health.Observation{At: gpu.WholeGPU(coretest.GPU(i)), Kind: health.Checked, Sample: samples[i]}
			for _, failing := range except {
				if i == failing {
					o = health.Observation{At: o.At, Kind: health.ProbeFailed, Detail: "nvmlDeviceGetTemperature: Unknown Error"}
				}
			}
			obs = append(obs, o)
		}
		return obs
	}
	xid := func(id int, code uint64) health.Observation {
		return health.Observation{At: gpu.WholeGPU(coretest.GPU(id)), Kind: health.XID, Code: code}
	}
	s := core.NewState(cfg).Read(cfg, time.Now(), reading, check()...)
	observe := func(obs ...health.Observation) {
		time.Sleep(20 * time.Second)
		s = s.Observe(cfg, time.Now(), obs...)
	}
	command := func(next core.State, _ []health.Condition, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		s = next
	}
	simulated := xid(4, 79)
	simulated.Simulated = true
	contained := xid(7, 94)
	contained.At.GI, contained.At.CI = 3, 0
	reset, remap, silent := healthy, healthy, healthy
	reset.RecoveryAction, remap.RemapPending, silent.Events = health.RecoveryReset, health.Yes, health.No
	samples[1], samples[2], samples[5] = reset, remap, silent
	observe(xid(1, 95), xid(1, 31), xid(1, 31), simulated, contained, xid(6, 48), xid(0, 80))
	observe(check(3)...)
	observe(check(3)...)
	observe(check(3)...)
	command(s.Clear(cfg, time.Now(), health.Command{GPU: coretest.GPU(2), Cause: "ROW_REMAP_PENDING"}))
	command(s.Ignore(cfg, time.Now(), health.Command{GPU: coretest.GPU(6)}, time.Now().Add(4*time.Hour)))
	observe(append(check(), xid(1, 95))...)
	observe(check()...)
	return s, cfg
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(name, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s: %s", name, diff)
	}
}

// The text and the JSON of a host with conditions. Keys of the JSON are added, never changed.
func TestTroubledHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, cfg := troubled(t)
		r := report.DescribeState(s, cfg, "health history is not kept: the disk is full")
		r.Source = report.FromAgent
		var table, text bytes.Buffer
		if err := r.WriteTable(&table); err != nil {
			t.Fatal(err)
		}
		if err := r.WriteJSON(&text); err != nil {
			t.Fatal(err)
		}
		golden(t, "testdata/troubled.txt", table.Bytes())
		golden(t, "testdata/troubled.json", text.Bytes())
		for line := range strings.Lines(table.String()) {
			if model := strings.LastIndex(line, "  H100"); model > 0 { // pool and model are last, and may be longer
				line = line[:model]
			}
			if len(strings.TrimSpace(line)) > 120 {
				t.Errorf("%d columns: %s", len(line), line)
			}
		}
	})
}

// The report of a healthy host has only its devices.
func TestHealthyHost(t *testing.T) {
	cfg := core.DefaultConfig()
	s := core.NewState(cfg).Read(cfg, time.Now(), coretest.GPUs(1), health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Checked})
	r := report.DescribeState(s, cfg)
	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(table.String(), "\n"); n != 3 || len(r.Conditions)+len(r.Counts)+len(r.Warnings) > 0 {
		t.Errorf("%d lines:\n%s", n, table.String())
	}
	// DescribeState does not change the state.
	before := s.Ledger.Conditions()
	report.DescribeState(s, cfg)
	if diff := cmp.Diff(before, s.Ledger.Conditions()); diff != "" {
		t.Error(diff)
	}
}
