package report_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

var topNow = time.Date(2026, 11, 20, 10, 31, 5, 0, time.UTC)

// topReport is a node with devices of each kind of row.
func topReport() report.Report {
	r := report.Report{
		Source: report.FromAgent, Driver: report.Driver{State: "ready", Version: "570.124.06", CUDA: "12.8"},
		Excluded: []report.Excluded{{Index: 9, Reason: "reserved"}}, Warnings: []string{"kernel log unavailable"}, PolicyWarnings: []string{"a", "b"},
	}
	for i := range 8 {
		r.Devices = append(r.Devices, report.Device{
			ID: gpu.DeviceID(fmt.Sprint("GPU-", i)), Index: i, Model: "NVIDIA H100 80GB HBM3", State: health.Healthy,
			Usage: &report.Usage{
				At: topNow, GPUPercent: new(uint64(10 * i)), MemoryUsedBytes: new(uint64(i) << 33), MemoryTotalBytes: new(uint64(80 << 30)),
				PowerMilliwatts: new(uint64(70_499)), PowerLimitMilliwatts: new(uint64(700_000)), TemperatureCelsius: new(uint64(31)),
			},
		})
	}
	d := r.Devices
	d[0].Owners = []report.Owner{{Orchestrator: "kubernetes", Namespace: "training", Name: "llama-70b-worker-0", Container: "pytorch", ID: "u"}}
	d[0].HeldSince = topNow.Add(-26*time.Hour - 10*time.Minute)
	d[1].Owners = []report.Owner{{Orchestrator: "nomad", Namespace: "default", Name: "batch", Container: "task"}, {Name: "other"}, {Name: "third"}}
	d[1].HeldSince, d[1].IdleSince = topNow.Add(-2*time.Hour), topNow.Add(-90*time.Second)
	d[2].Processes = []report.Process{{PID: 2114}, {PID: 2115}}
	d[3].State, d[3].Cause, d[3].Since = health.Unhealthy, "XID_95", topNow.Add(-12*time.Minute)
	d[4].State, d[4].Cause, d[4].Since, d[4].Usage = health.GPULost, "LOST", topNow.Add(-5*time.Second), nil
	d[5].State, d[5].Cause, d[5].Advisory, d[5].Since = health.Unhealthy, "XID_48", true, topNow.Add(-time.Hour)
	d[6].Usage = &report.Usage{MemoryUsedBytes: new(uint64(1 << 30))}
	d[7].Model, d[7].Profile, d[7].Instance = "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "1g.10gb", new(1)
	return r
}

// Each screen has the table as far as it fits: no line is longer and there are no more lines. The order in which columns go is that of
// the golden.
func TestTop(t *testing.T) {
	r := topReport()
	var all bytes.Buffer
	for _, s := range []report.Screen{{}, {Columns: 120, Rows: 40}, {Columns: 80, Rows: 24}, {Columns: 60, Rows: 6}, {Columns: 40, Rows: 10}, {Columns: 20, Rows: 3}} {
		fmt.Fprintf(&all, "--- %d x %d\n", s.Columns, s.Rows)
		check.NoError(t, r.WriteTop(&all, "k8s-gpu", topNow, s))
		all.WriteByte('\n')
	}
	if !slices.EqualFunc(r.Devices, topReport().Devices, func(a, b report.Device) bool { return a.ID == b.ID }) {
		t.Error("the order of the report's devices was changed")
	}
	for _, u := range []report.Unknown{{Reason: "the record is not complete"}, {Reason: "no Nomad agent answers", Remedy: "set nomad_address"}} {
		r.OwnersUnknown = &u
		fmt.Fprintf(&all, "--- %s\n", &u)
		check.NoError(t, r.WriteTop(&all, "nomad-gpu", topNow, report.Screen{Columns: 120}))
		all.WriteByte('\n')
	}
	r.Devices, r.Source, r.Driver = nil, report.FromDriver, report.Driver{State: "absent", Reason: "no NVIDIA driver"}
	check.NoError(t, r.WriteTop(&all, "nomad-gpu", topNow, report.Screen{}))
	all.WriteByte('\n')
	goldenfile.Compare(t, "testdata/top.txt", all.String())
	for columns := 1; columns < 180; columns++ {
		for rows := 1; rows < 14; rows++ {
			var b strings.Builder
			check.NoError(t, topReport().WriteTop(&b, "k8s-gpu", topNow, report.Screen{columns, rows}))
			lines := strings.Split(b.String(), "\n")
			if len(lines) > rows {
				t.Fatalf("%d x %d: %d lines", columns, rows, len(lines))
			}
			for _, line := range lines {
				if n := utf8.RuneCountInString(line); n > columns {
					t.Fatalf("%d x %d: %d characters: %s", columns, rows, n, line)
				}
			}
		}
	}
}
