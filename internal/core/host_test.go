package core_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// healthReasons lists the units that take no work, with their reasons.
func healthReasons(inv *inventory.Allocatable) string {
	var lines []string
	for u := range inv.Units() {
		if !u.Health.Schedulable() {
			lines = append(lines, u.Pool+"/"+deviceName(u.Device.ID)+" "+u.Health.Cause())
		}
	}
	return strings.Join(slices.Compact(lines), "; ")
}

// mpsHost has two MPS pools: a full GPU, and one with two instances.
func mpsHost() (gpu.Snapshot, core.Config) {
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	one, two := served(2), served(3)
	cfg.Policy.Rules = []inventory.Rule{{Select: gpuIndices(1), Sharing: &one}, {Select: gpuIndices(2), Pool: "small", Sharing: &two}}
	return coretest.WithMIG(coretest.GPUs(4), 3, "3g.40gb", "3g.40gb"), cfg
}

func TestWithHost(t *testing.T) {
	both := []string{"small", "gpu.mps"}
	claim := func(at gpu.Placement, older bool) inventory.PeerDevice {
		return inventory.PeerDevice{Agent: "nomad-gpu", At: at, Earlier: older}
	}
	instance := func(n int, gi uint32) gpu.Placement {
		return gpu.Placement{GPU: coretest.GPU(n), GI: gi + 1, CI: 0}
	}
	const warn, refuse = inventory.OverlapWarn, inventory.OverlapRefuse
	for name, tc := range map[string]struct {
		mps      []string
		claims   []inventory.PeerDevice
		overlap  inventory.OverlapMode
		xids     []health.Observation
		reasons  string
		overlaps string
	}{
		"both daemons answer":             {both, nil, warn, nil, "", ""},
		"host not read yet":               {nil, nil, warn, nil, "gpu.mps/1 MPS_DAEMON_DOWN; small/2 MPS_DAEMON_DOWN", ""},
		"one daemon is down":              {both[:1], nil, warn, nil, "gpu.mps/1 MPS_DAEMON_DOWN", ""},
		"warn":                            {both, []inventory.PeerDevice{claim(gpuAt(0), true), claim(gpuAt(1), false)}, warn, nil, "", "0 1"},
		"refuse what was claimed before":  {both, []inventory.PeerDevice{claim(gpuAt(0), true), claim(gpuAt(1), false)}, refuse, nil, "gpu/0 OVERLAP", "0 1"},
		"refuse, shared":                  {both, []inventory.PeerDevice{claim(gpuAt(1), true)}, refuse, nil, "gpu.mps/1 OVERLAP", "1"},
		"claimed comes before the daemon": {both[:1], []inventory.PeerDevice{claim(gpuAt(1), true)}, refuse, nil, "gpu.mps/1 OVERLAP", "1"},
		"a claim on a GPU is one on its instances": {
			both, []inventory.PeerDevice{claim(gpuAt(3), true)}, refuse, nil, "mig-3g.40gb/3:0 OVERLAP; mig-3g.40gb/3:1 OVERLAP", "3:0 3:1",
		},
		"a claim on an instance is one on its GPU":    {both, []inventory.PeerDevice{claim(instance(0, 2), true)}, refuse, nil, "gpu/0 OVERLAP", "0"},
		"a claim on an instance is none on another":   {both, []inventory.PeerDevice{claim(instance(3, 1), true)}, refuse, nil, "mig-3g.40gb/3:1 OVERLAP", "3:1"},
		"of several claims, one that is older counts": {both, []inventory.PeerDevice{{Agent: "a third", At: instance(0, 0)}, claim(gpuAt(0), true)}, refuse, nil, "gpu/0 OVERLAP", "0"},
		"GPU that is not offered":                     {both, []inventory.PeerDevice{claim(gpu.WholeGPU("GPU-x"), true)}, refuse, nil, "", ""},
		"the driver's faults come first": {
			nil, []inventory.PeerDevice{claim(gpuAt(0), true)}, refuse, []health.Observation{xidEvent(gpuAt(0), 95), xidEvent(gpuAt(2), 95)},
			"gpu/0 XID_95; gpu.mps/1 MPS_DAEMON_DOWN; small/2 XID_95", "0",
		},
		"what is degraded is worse without its daemon": {
			both[:1], nil, warn, []health.Observation{xidEvent(gpuAt(1), 94)}, "gpu.mps/1 MPS_DAEMON_DOWN", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, cfg := mpsHost()
			l := health.Ledger{}.Apply(cfg.Health, testStart, tc.xids...)
			inv := core.Build(s, l, cfg).WithHost(inventory.Host{MPS: tc.mps, Peers: tc.claims}, tc.overlap)
			if got := healthReasons(inv); got != tc.reasons {
				t.Errorf("take no work: %q, want %q", got, tc.reasons)
			}
			var overlaps []string
			for _, o := range inv.Overlaps() {
				if o.Agent != "nomad-gpu" || o.String() != string(o.Device)+" is also offered by nomad-gpu" {
					t.Errorf("overlap %q with %q", o, o.Agent)
				}
				overlaps = append(overlaps, deviceName(o.Device))
			}
			if got := strings.Join(overlaps, " "); got != tc.overlaps {
				t.Errorf("overlaps %q, want %q", got, tc.overlaps)
			}
		})
	}
}

// A change of the host takes effect completely, and is undone completely.
func TestHostChanges(t *testing.T) {
	s, cfg := mpsHost()
	state := core.NewState(cfg).Read(cfg, testStart, s)
	u, _ := state.Allocatable.Unit(inventory.UnitID(coretest.GPU(1)) + "::1")
	want := "unhealthy: MPS control daemon does not answer (pool gpu.mps); action: start the pool's MPS control daemon; clears: daemon answers"
	if got := u.Health.String(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	well := state.WithHost(cfg, testStart, inventory.Host{MPS: []string{"gpu.mps", "small"}})
	if got := healthReasons(well.Allocatable); got != "" || well.Allocatable.Equal(state.Allocatable) {
		t.Errorf("the daemons answer: %s", got)
	}
	if got := healthReasons(well.Observe(cfg, testStart.Add(time.Second)).Read(cfg, testStart.Add(time.Minute), s).Allocatable); got != "" {
		t.Errorf("what is known of the host is forgotten: %s", got)
	}
	claimed := well.WithHost(cfg, testStart, inventory.Host{MPS: well.Host.MPS, Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(0))}}})
	if claimed.Allocatable.Equal(well.Allocatable) || len(claimed.Allocatable.Overlaps()) != 1 {
		t.Errorf("overlaps %v", claimed.Allocatable.Overlaps())
	}
	if again := claimed.WithHost(cfg, testStart, well.Host); !again.Allocatable.Equal(well.Allocatable) || !claimed.WithHost(cfg, testStart, state.Host).Allocatable.Equal(state.Allocatable) {
		t.Errorf("overlaps stay: %v", again.Allocatable.Overlaps())
	}
	twice := claimed.Allocatable.WithHost(claimed.Host, cfg.Overlap)
	if !twice.Equal(claimed.Allocatable) {
		t.Errorf("the same host twice: %v", twice.Overlaps())
	}
	if n := len((&inventory.Allocatable{}).Overlaps()) + len((&inventory.Allocatable{}).PolicyWarnings()); n != 0 {
		t.Errorf("%d of nothing", n)
	}
}

// passingNodes returns a configuration whose plans contain device nodes.
func passingNodes() core.Config {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.Injection.Nodes = inventory.MIGMixed, true
	return cfg
}

// lacking removes device nodes from a snapshot.
func lacking(s gpu.Snapshot, nodes ...string) gpu.Snapshot {
	s.Nodes = slices.DeleteFunc(slices.Clone(s.Nodes), func(n string) bool { return slices.Contains(nodes, n) })
	return s
}

// healthLines returns the health texts of the units, each once.
func healthLines(inv *inventory.Allocatable) string {
	var lines []string
	for u := range inv.Units() {
		if !u.Health.Schedulable() {
			return "a unit takes no work: " + u.Health.String()
		}
		if l := u.Health.String(); !slices.Contains(lines, l) {
			lines = append(lines, l)
		}
	}
	return strings.Join(lines, "; ")
}

func TestMissingDeviceNodeWarning(t *testing.T) {
	instances := coretest.WithMIG(coretest.GPUs(1), 0, "1g.10gb")
	unnumbered := coretest.WithMIG(coretest.GPUs(1), 0, "1g.10gb")
	unnumbered.Devices[1].GICap, unnumbered.Devices[1].CICap, unnumbered.Devices[1].Minor = 0, 0, -1
	for name, tc := range map[string]struct {
		reading gpu.Snapshot
		noNodes bool // plans contain no device nodes
		want    string
	}{
		"all are there": {coretest.GPUs(2), false, "healthy"},
		"unified memory": {
			lacking(coretest.GPUs(2), "/dev/nvidia-uvm"), false,
			"healthy (missing /dev/nvidia-uvm: run nvidia-modprobe -c0 -u)",
		},
		"optional nodes": {lacking(coretest.GPUs(2), "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"), false, "healthy"},
		"one GPU's": {
			lacking(coretest.GPUs(2), "/dev/nvidia1"), false,
			"healthy; healthy (missing /dev/nvidia1: run nvidia-modprobe -c1)",
		},
		"several": {
			lacking(coretest.GPUs(1), "/dev/nvidia-uvm", "/dev/nvidiactl"), false,
			"healthy (missing /dev/nvidiactl, /dev/nvidia-uvm: run nvidia-modprobe -c0 -u && nvidia-modprobe -c255)",
		},
		"capability of a MIG instance": {
			lacking(instances, "/dev/nvidia-caps/nvidia-cap101"), false,
			"healthy (missing /dev/nvidia-caps/nvidia-cap101: run nvidia-modprobe -f /proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access)",
		},
		"numbers that are not known": {lacking(unnumbered, "/dev/nvidia0"), false, "healthy"},
		"none is visible":            {lacking(coretest.GPUs(1), coretest.GPUs(1).Nodes...), false, "healthy"},
		"none is passed":             {lacking(coretest.GPUs(1), "/dev/nvidia-uvm"), true, "healthy"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := passingNodes()
			cfg.Injection.Nodes = !tc.noNodes
			s := core.NewState(cfg).Read(cfg, time.Unix(0, 0), tc.reading)
			if got := healthLines(s.Allocatable); got != tc.want {
				t.Errorf("got  %s\nwant %s", got, tc.want)
			}
		})
	}
}

// A plan contains a node as soon as it exists. The warning ends immediately, but begins only with a snapshot.
func TestWithNodes(t *testing.T) {
	cfg, now := passingNodes(), time.Unix(0, 0)
	all, without := coretest.GPUs(1), lacking(coretest.GPUs(1), "/dev/nvidia-uvm")
	s := core.NewState(cfg).Read(cfg, now, without)
	expect := func(what string, inContainer, missing, warned bool) {
		t.Helper()
		plan, err := s.Allocatable.Reserve(inventory.UnitID(coretest.GPU(0)))
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.ContainsFunc(plan.Nodes, func(n inventory.DeviceNode) bool { return n.Path == "/dev/nvidia-uvm" }); got != inContainer {
			t.Errorf("%s: a container gets the node: %t", what, got)
		}
		if got, _ := s.Allocatable.MissingNodes(plan.Devices[0]); (len(got) > 0) != missing {
			t.Errorf("%s: missing %v", what, got)
		}
		if got := healthLines(s.Allocatable); (got != "healthy") != warned {
			t.Errorf("%s: %s", what, got)
		}
	}
	expect("without", false, true, true)
	s = s.WithNodes(cfg, now, all.Nodes)
	expect("created", true, false, false)
	s = s.WithNodes(cfg, now, without.Nodes)
	expect("removed", false, true, false)
	s = s.Observe(cfg, now.Add(time.Second))
	expect("a moment later", false, true, false)
	s = s.Read(cfg, now, without)
	expect("read again", false, true, true)
	s = s.Read(cfg, now, gpu.NoDriver(gpu.DriverFailed, "unloaded"))
	if u, _ := s.Allocatable.Unit(inventory.UnitID(coretest.GPU(0))); u.Health.MissingNodes != "" {
		t.Errorf("a warning of nodes without a driver: %s", u.Health.MissingNodes)
	}
}

// With refuse a device takes no new work before this agent has claimed it, unless no other agent can have.
func TestRecordedDevices(t *testing.T) {
	s := coretest.WithMIG(coretest.GPUs(3), 2, "3g.40gb", "3g.40gb")
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	built := core.Build(s, health.Ledger{}, cfg).WithoutHost()
	first := gpuAt(0)
	for name, tc := range map[string]struct {
		own     inventory.Recorded
		overlap inventory.OverlapMode
		reasons string
	}{
		"nothing is needed":     {inventory.Recorded{}, inventory.OverlapRefuse, ""},
		"warn":                  {inventory.Recorded{Reason: "x", Pending: true}, inventory.OverlapWarn, ""},
		"nothing is claimed":    {inventory.Recorded{Reason: "x"}, inventory.OverlapRefuse, "gpu/0 OVERLAP; gpu/1 OVERLAP; mig-3g.40gb/2:0 OVERLAP; mig-3g.40gb/2:1 OVERLAP"},
		"a GPU":                 {inventory.Recorded{Reason: "x", At: []gpu.Placement{first, gpuAt(2)}}, inventory.OverlapRefuse, "gpu/1 OVERLAP"},
		"an instance":           {inventory.Recorded{Reason: "x", Pending: true, At: []gpu.Placement{first, gpuAt(1), {GPU: coretest.GPU(2), GI: 1}}}, inventory.OverlapRefuse, "mig-3g.40gb/2:1 OVERLAP"},
		"claimed in the moment": {inventory.Recorded{Reason: "x", Pending: true, At: []gpu.Placement{first, gpuAt(1), gpuAt(2)}}, inventory.OverlapRefuse, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inv := built.WithHost(inventory.Host{Recorded: tc.own}, tc.overlap)
			if got := healthReasons(inv); got != tc.reasons {
				t.Errorf("take no work: %q, want %q", got, tc.reasons)
			}
			if got, want := inv.Provisional(), tc.own.Pending && tc.reasons != ""; got != want {
				t.Errorf("provisional: %v, want %v", got, want)
			}
			if tc.own.Pending = false; inv.Provisional() && built.WithHost(inventory.Host{Recorded: tc.own}, tc.overlap).Equal(inv) {
				t.Error("equal to the inventory that is not provisional")
			}
		})
	}
}
