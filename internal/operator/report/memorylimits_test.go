package report_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// limitTable has a share in each state.
func limitTable() limit.Table {
	at := time.Date(2026, 11, 27, 9, 30, 0, 0, time.UTC)
	const GiB = 1 << 30
	task := func(name string) holders.Work {
		return holders.Work{Orchestrator: holders.Nomad, Namespace: "default", Name: name, Container: "train", ID: "5b1f3c58"}
	}
	t := limit.Table{At: at, Node: limit.Node{Backend: limit.Misc}}
	for i, s := range []limit.Share{
		{Work: task("limited"), Begun: true, Way: limit.ByTask, Required: true, State: limit.Limited, Driver: gpu.MemoryLimit{Soft: 20 * GiB, Hard: 20 * GiB, Used: 3 * GiB / 2}},
		{Work: task("near"), Begun: true, Way: limit.ByHook, State: limit.Limited, Driver: gpu.MemoryLimit{Hard: 20 * GiB, Used: 19 * GiB}},
		{Work: task("late"), Begun: true, Way: limit.ByTask, Required: true, State: limit.Late, Reason: "the task used the GPU before the limit was set", Driver: gpu.MemoryLimit{Hard: 20 * GiB}},
		{Work: task("off"), Begun: true, Way: limit.ByTask, Required: true, State: limit.Unlimited, Reason: "the controller misc is off in its control group", Driver: gpu.MemoryLimit{Hard: gpu.NoMemoryLimit}},
		{Work: task("unread"), Begun: true, Way: limit.ByPod, State: limit.Unknown, Reason: "its control group was not found"},
		{Work: task("other"), State: limit.Foreign, Reason: "another program has set it", Driver: gpu.MemoryLimit{Hard: 4 * GiB, Used: GiB}},
		{Work: task("idle"), Way: limit.ByHook, Required: true, State: limit.Unknown, Reason: "its control group is not known before a process of it uses the GPU"},
	} {
		s.GPU, s.Since, s.Read = coretest.GPU(i/3), at.Add(-time.Hour), s.State != limit.Unknown
		if s.Way != "" {
			s.Pool, s.Want = "gpu.shared", 20*GiB
		}
		if s.Read {
			s.Group = "/nomad.slice/share.slice/5b1f3c58-" + s.Work.Name + ".train.scope"
		}
		t.Shares = append(t.Shares, s)
	}
	t.Shares[4].Since, t.Shares[4].GPU = time.Time{}, coretest.GPU(9)
	t.Shares[6].GPU = coretest.GPU(1)
	return t
}

// Each share is a row with what the policy wants and what the driver has; in top, what is not limited comes first, and then what is nearest to its limit. Without a
// table of limits nothing is shown.
func TestMemoryLimits(t *testing.T) {
	var r report.Report
	for i := range 2 {
		r.Devices = append(r.Devices, report.Device{ID: coretest.GPU(i), GPU: coretest.GPU(i), Index: i, Model: "NVIDIA H100 80GB HBM3", Sharing: "time-slicing", Replicas: 4})
	}
	var all bytes.Buffer
	for _, node := range []limit.Node{
		{Unsupported: "driver 580.159.04: want 615 or newer"}, {}, {Backend: limit.DMem, CannotSet: "no limit-server answers: add the component deploy/limits"},
		{Backend: limit.Misc, Foreign: true},
	} {
		check.NoError(t, report.Report{}.WithMemoryLimits(limit.Table{Node: node}).WriteTable(&all))
	}
	limited := r.WithMemoryLimits(limitTable())
	check.NoError(t, limited.WriteTable(&all))
	text := strings.ReplaceAll(all.String(), "driver  , CUDA , 0 devices, 0 excluded\n\n", "")
	all.Reset()
	for _, rows := range []int{0, 8, 5, 4} {
		fmt.Fprintf(&all, "--- %d rows\n", rows)
		check.NoError(t, limited.WriteTop(&all, "nomad-gpu", topNow, report.Screen{Rows: rows, Columns: 120}))
		all.WriteByte('\n')
	}
	goldenfile.Compare(t, "testdata/memorylimits.txt", text+all.String())
	_, json := render(t, limited)
	_, json, _ = strings.Cut(json, `"memoryLimits"`)
	json, _, _ = strings.Cut(json, `"policyWarnings"`)
	goldenfile.Compare(t, "testdata/memorylimits.json", `"memoryLimits"`+json+"\n")
	if table, json := render(t, r); strings.Contains(table, "limit") || strings.Contains(json, "imit") {
		t.Errorf("nothing is known of limits: %s%s", table, json)
	}
}

// Whatever the size of the screen, the shares take no more rows than there are.
func TestMemoryLimitsFit(t *testing.T) {
	for rows := 1; rows < 16; rows++ {
		var b strings.Builder
		check.NoError(t, topReport().WithMemoryLimits(limitTable()).WriteTop(&b, "nomad-gpu", topNow, report.Screen{Rows: rows}))
		if lines := strings.Split(b.String(), "\n"); len(lines) > rows {
			t.Errorf("%d rows: %d lines", rows, len(lines))
		}
	}
}

// The limit of a share by the policy is that of its device; the memory of an MPS client is another value.
func TestMemoryLimitOfADevice(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Policy.Limits.On = true
	cfg.Policy.Rules = []inventory.Rule{
		{Select: on(0), Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2, Memory: 20 << 30, Limit: inventory.LimitRequired}},
		{Select: on(1), Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, Memory: 20 << 30}},
	}
	checked := health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Checked}
	state := core.NewState(cfg).Read(cfg, time.Unix(1, 0), coretest.GPUs(2), checked)
	d := report.DescribeState(state, cfg).Devices
	if i := slices.IndexFunc(d, func(d report.Device) bool { return d.Index == 0 }); d[i].MemoryLimit != "required" || d[i].MPSMemoryBytes != 0 {
		t.Errorf("time-slicing: %+v", d[i])
	}
	if i := slices.IndexFunc(d, func(d report.Device) bool { return d.Index == 0 }); d[i].MemoryNotLimited != "" {
		t.Errorf("not known: %+v", d[i])
	}
	cannot := &inventory.Limits{Withheld: map[gpu.DeviceID]inventory.LimitMissing{coretest.GPU(0): {Reason: health.ReasonNoLimit, Detail: "driver 570.1: want 615 or newer"}}}
	for _, d := range report.DescribeState(state.WithHost(cfg, time.Unix(1, 0), inventory.Host{Limits: cannot}), cfg).Devices {
		table, _ := render(t, report.Report{Devices: []report.Device{d}})
		if (d.Index == 0) != (d.MemoryNotLimited == "driver 570.1: want 615 or newer") || (d.Index == 0) != strings.Contains(table, "20480 MiB each, not limited") {
			t.Errorf("the driver has no limits: %+v\n%s", d, table)
		}
	}
	if i := slices.IndexFunc(d, func(d report.Device) bool { return d.Index == 1 }); d[i].MemoryLimit != "" || d[i].MPSMemoryBytes != 20<<30 {
		t.Errorf("MPS: %+v", d[i])
	}
}
