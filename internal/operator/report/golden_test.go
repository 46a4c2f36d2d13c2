package report_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// troubled is a node with each kind of condition, two minutes after the first one. It needs a synctest bubble, so that
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
	checked := func(except ...int) (obs []health.Observation) {
		for i := range 8 {
			o := health.Observation{At: gpu.WholeGPU(coretest.GPU(i)), Kind: health.Checked, Sample: samples[i]}
			if slices.Contains(except, i) {
				o = health.Observation{At: o.At, Kind: health.ProbeFailed, Detail: "nvmlDeviceGetTemperature: Unknown Error"}
			}
			obs = append(obs, o)
		}
		return obs
	}
	xid := func(id int, code uint64) health.Observation {
		return health.Observation{At: gpu.WholeGPU(coretest.GPU(id)), Kind: health.XID, Code: code}
	}
	s := core.NewState(cfg).Read(cfg, time.Now(), reading, checked()...)
	observe := func(obs ...health.Observation) {
		time.Sleep(20 * time.Second)
		s = s.Observe(cfg, time.Now(), obs...)
	}
	command := func(next core.State, _ []health.Condition, err error) {
		t.Helper()
		check.NoError(t, err)
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
	observe(checked(3)...)
	observe(checked(3)...)
	observe(checked(3)...)
	command(s.Clear(cfg, time.Now(), health.Command{GPU: coretest.GPU(2), Cause: "ROW_REMAP_PENDING"}))
	command(s.Ignore(cfg, time.Now(), health.Command{GPU: coretest.GPU(6)}, time.Now().Add(4*time.Hour)))
	observe(append(checked(), xid(1, 95))...)
	observe(checked()...)
	return s, cfg
}

// golden compares the table and the JSON of a report with testdata/<name>.txt and .json.
func golden(t *testing.T, name string, r report.Report) {
	t.Helper()
	table, text := render(t, r)
	for path, got := range map[string]string{"testdata/" + name + ".txt": table, "testdata/" + name + ".json": text} {
		goldenfile.Compare(t, path, got)
	}
}

// render is the table and the JSON of a report.
func render(t *testing.T, r report.Report) (table, text string) {
	t.Helper()
	var a, b bytes.Buffer
	check.NoError(t, errors.Join(r.WriteTable(&a), report.WriteJSON(&b, r)))
	return a.String(), b.String()
}

// The text and the JSON of a node with conditions. Keys of the JSON are added, never changed.
func TestTroubledHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, cfg := troubled(t)
		r := report.DescribeState(s, cfg, problem.Problem{Code: problem.HistorySave, Object: "/var/lib/tandem/k8s-gpu.json", Text: "health history is not kept: the disk is full"})
		r.Source = report.FromAgent
		golden(t, "troubled", r)
		table, _ := render(t, r)
		for line := range strings.Lines(table) {
			if model := strings.LastIndex(line, "  H100"); model > 0 { // pool and model are last, and may be longer
				line = line[:model]
			}
			if len(strings.TrimSpace(line)) > 120 {
				t.Errorf("%d columns: %s", len(line), line)
			}
		}
	})
}

// on selects GPUs by index.
func on(indices ...int) (s inventory.Selector) {
	for _, i := range indices {
		s.Indices = append(s.Indices, gpu.DeviceIndex{GPU: i, Instance: -1})
	}
	return s
}

// shared is a node with each kind of rule that a policy can have.
func shared() (core.State, core.Config) {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Overlap = inventory.MIGMixed, inventory.OverlapRefuse
	cfg.Policy.Rules = []inventory.Rule{
		{Select: on(0), Pool: "h100"},
		{Select: on(1), Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 100, OnePerRequest: true}},
		{Select: on(2), Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true, Memory: 30 << 30, Threads: 50}},
		{Select: on(3), Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 4, OnePerRequest: true}, Pool: "small"},
		{Select: on(4), Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}},
		{Select: on(5), NotOffered: "reserved by policy.yaml:12"},
		{Select: inventory.Selector{At: "policy.yaml:20: rules[6].select", IDs: []gpu.DeviceID{"GPU-x"}}, Pool: "unused"},
	}
	reading := coretest.WithMIG(coretest.GPUs(8), 6, "1g.10gb", "3g.40gb+me")
	for i := range reading.Devices {
		d := &reading.Devices[i]
		d.Serial, d.Architecture, d.Brand, d.ECC, d.NVLinks = "1650924", "Hopper", "NVIDIA", gpu.Enabled, 18
	}
	var checks []health.Observation
	for n := range 8 {
		checks = append(checks, health.Observation{At: gpu.WholeGPU(coretest.GPU(n)), Kind: health.Checked, Sample: health.Sample{RecoveryAction: health.RecoveryNone, Events: health.Yes}})
	}
	s := core.NewState(cfg).WithHost(cfg, time.Now(), inventory.Host{
		MPS: []string{"small"},
		Peers: []inventory.PeerDevice{
			{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(4))}, {Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(7)), Earlier: true},
		},
	}).Read(cfg, time.Now(), reading, checks...)
	return s.Observe(cfg, time.Now(), health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 95}), cfg
}

// A device is one row however many units it has.
func TestSharedHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, cfg := shared()
		golden(t, "shared", report.DescribeState(s, cfg))
	})
}

// While a change of the policy takes effect a device may be listed with its old and its new units.
func TestSharesThatChange(t *testing.T) {
	s, cfg := shared()
	cfg.Policy.Rules[4].Sharing = &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2}
	s = s.Observe(cfg, time.Now())
	var rows []report.Device
	for _, d := range report.DescribeState(s, cfg).Devices {
		if d.Index == 4 {
			rows = append(rows, d)
		}
	}
	if len(rows) != 2 || rows[0].Replicas != 2 || !rows[0].Schedulable || rows[1].Replicas != 2 || rows[1].Cause != "WITHDRAWN" {
		t.Errorf("%+v", rows)
	}
}

// TestInjection shows the strategy "auto" while it means CDI, with a device that the specification does not define and one that has
// a way of its own.
func TestInjection(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Injection = inventory.Injection{Name: "auto", Runtime: true, CDI: inventory.CDIAuto}
	nodes := inventory.Injection{Name: "devices", Nodes: true}
	cfg.Policy.Rules = []inventory.Rule{{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(2)}}, Pool: "plain", Injection: &nodes}}
	var checks []health.Observation
	for i := range 3 {
		checks = append(checks, health.Observation{At: gpu.WholeGPU(coretest.GPU(i)), Kind: health.Checked, Sample: health.Sample{
			RecoveryAction: health.RecoveryNone, Events: health.Yes, RemapPending: health.No,
		}})
	}
	at := time.Unix(1_700_000_000, 0)
	s := core.NewState(cfg).Read(cfg, at, coretest.GPUs(3), checks...)
	s = s.WithHost(cfg, at, inventory.Host{CDI: &inventory.CDI{
		Incarnation: s.Incarnation, Folder: "/var/run/cdi", Kind: "k8s.device-plugin.nvidia.com/gpu",
		Defined:   []gpu.DeviceID{coretest.GPU(0), coretest.GPU(2)},
		Undefined: []inventory.Undefined{{Device: coretest.GPU(1), Reason: "device node /dev/nvidia1 is missing"}},
		Others:    []string{"k8s.device-plugin.nvidia.com/gds=all"},
		Usable:    true, Reason: "specification written, hooks of /usr/bin/nvidia-ctk found",
	}})
	golden(t, "injection", report.DescribeState(s, cfg))
}

// The line of the specification has its problem once, and does not call a specification usable if nothing was judged but that it is written.
func TestLineOfCDI(t *testing.T) {
	const folder = "folder of CDI specifications /x: not a folder"
	for want, r := range map[string]report.Report{
		"CDI: not usable: " + folder:                            {CDI: &report.CDI{Reason: folder, Problem: folder}},
		"CDI: not usable: no CDI specification: " + folder:      {CDI: &report.CDI{Reason: "no CDI specification: " + folder, Problem: folder}},
		"CDI: written: specification in /x":                     {CDI: &report.CDI{Usable: true, Reason: "specification in /x"}, Injections: []report.Injection{{Configured: "cdi-cri"}}},
		"CDI: usable: specification in /x, hooks by nvidia-ctk": {CDI: &report.CDI{Usable: true, Reason: "specification in /x, hooks by nvidia-ctk"}, Injections: []report.Injection{{Configured: "auto"}}},
	} {
		var text strings.Builder
		if err := r.WriteTable(&text); err != nil || !slices.Contains(strings.Split(text.String(), "\n"), want) {
			t.Errorf("%q is not in %q", want, text.String())
		}
	}
}
