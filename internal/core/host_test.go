package core_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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
	peer := func(at gpu.Placement, earlier bool) inventory.PeerDevice {
		return inventory.PeerDevice{Agent: "nomad-gpu", At: at, Earlier: earlier}
	}
	instance := func(n int, gi uint32) gpu.Placement {
		return gpu.Placement{GPU: coretest.GPU(n), GI: gi + 1, CI: 0}
	}
	const warn, refuse = inventory.OverlapWarn, inventory.OverlapRefuse
	for name, tc := range map[string]struct {
		mps      []string
		peers    []inventory.PeerDevice
		overlap  inventory.OverlapMode
		xids     []health.Observation
		reasons  string
		overlaps string
	}{
		"both daemons answer":             {both, nil, warn, nil, "", ""},
		"host not read yet":               {nil, nil, warn, nil, "gpu.mps/1 MPS_DAEMON_DOWN; small/2 MPS_DAEMON_DOWN", ""},
		"one daemon is down":              {both[:1], nil, warn, nil, "gpu.mps/1 MPS_DAEMON_DOWN", ""},
		"warn":                            {both, []inventory.PeerDevice{peer(gpuAt(0), true), peer(gpuAt(1), false)}, warn, nil, "", "0 1"},
		"refuse what was recorded before": {both, []inventory.PeerDevice{peer(gpuAt(0), true), peer(gpuAt(1), false)}, refuse, nil, "gpu/0 OVERLAP", "0 1"},
		"refuse, shared":                  {both, []inventory.PeerDevice{peer(gpuAt(1), true)}, refuse, nil, "gpu.mps/1 OVERLAP", "1"},
		"overlap comes before the daemon": {both[:1], []inventory.PeerDevice{peer(gpuAt(1), true)}, refuse, nil, "gpu.mps/1 OVERLAP", "1"},
		"a GPU overlaps its instances": {
			both, []inventory.PeerDevice{peer(gpuAt(3), true)}, refuse, nil, "mig-3g.40gb/3:0 OVERLAP; mig-3g.40gb/3:1 OVERLAP", "3:0 3:1",
		},
		"an instance overlaps its GPU":                {both, []inventory.PeerDevice{peer(instance(0, 2), true)}, refuse, nil, "gpu/0 OVERLAP", "0"},
		"an instance overlaps no other one":           {both, []inventory.PeerDevice{peer(instance(3, 1), true)}, refuse, nil, "mig-3g.40gb/3:1 OVERLAP", "3:1"},
		"of several, the one recorded earlier counts": {both, []inventory.PeerDevice{{Agent: "a third", At: instance(0, 0)}, peer(gpuAt(0), true)}, refuse, nil, "gpu/0 OVERLAP", "0"},
		"GPU that is not offered":                     {both, []inventory.PeerDevice{peer(gpu.WholeGPU("GPU-x"), true)}, refuse, nil, "", ""},
		"the driver's faults come first": {
			nil, []inventory.PeerDevice{peer(gpuAt(0), true)}, refuse, []health.Observation{xidEvent(gpuAt(0), 95), xidEvent(gpuAt(2), 95)},
			"gpu/0 XID_95; gpu.mps/1 MPS_DAEMON_DOWN; small/2 XID_95", "0",
		},
		"what is degraded is worse without its daemon": {
			both[:1], nil, warn, []health.Observation{xidEvent(gpuAt(1), 94)}, "gpu.mps/1 MPS_DAEMON_DOWN", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, cfg := mpsHost()
			l := health.Ledger{}.Apply(cfg.Health, testStart, tc.xids...)
			inv := core.Build(s, l, cfg).WithHost(inventory.Host{MPS: tc.mps, Peers: tc.peers}, tc.overlap)
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

// A change of the node takes effect completely, and is undone completely.
func TestHostChanges(t *testing.T) {
	s, cfg := mpsHost()
	state := core.NewState(cfg).Read(cfg, testStart, s)
	u, _ := state.Allocatable.Unit(inventory.UnitID(coretest.GPU(1)) + "::1")
	want := "unhealthy: MPS control daemon does not answer (pool gpu.mps); action: start the pool's MPS control daemon; cleared by: an answer from the daemon"
	if got := u.Health.String(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	well := state.WithHost(cfg, testStart, inventory.Host{MPS: []string{"gpu.mps", "small"}})
	if got := healthReasons(well.Allocatable); got != "" || well.Allocatable.Equal(state.Allocatable) {
		t.Errorf("the daemons answer: %s", got)
	}
	if got := healthReasons(well.Observe(cfg, testStart.Add(time.Second)).Read(cfg, testStart.Add(time.Minute), s).Allocatable); got != "" {
		t.Errorf("what is known of the node is forgotten: %s", got)
	}
	overlapping := well.WithHost(cfg, testStart, inventory.Host{MPS: well.Host.MPS, Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(0))}}})
	if overlapping.Allocatable.Equal(well.Allocatable) || len(overlapping.Allocatable.Overlaps()) != 1 {
		t.Errorf("overlaps %v", overlapping.Allocatable.Overlaps())
	}
	if again := overlapping.WithHost(cfg, testStart, well.Host); !again.Allocatable.Equal(well.Allocatable) || !overlapping.WithHost(cfg, testStart, state.Host).Allocatable.Equal(state.Allocatable) {
		t.Errorf("overlaps stay: %v", again.Allocatable.Overlaps())
	}
	twice := overlapping.Allocatable.WithHost(overlapping.Host, cfg.Overlap)
	if !twice.Equal(overlapping.Allocatable) {
		t.Errorf("the same node twice: %v", twice.Overlaps())
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

// With refuse a device takes no new work before this agent has recorded it, unless no other agent can have.
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
		"nothing is needed":   {inventory.Recorded{}, inventory.OverlapRefuse, ""},
		"warn":                {inventory.Recorded{Reason: "x", Pending: true}, inventory.OverlapWarn, ""},
		"nothing is recorded": {inventory.Recorded{Reason: "x"}, inventory.OverlapRefuse, "gpu/0 OVERLAP; gpu/1 OVERLAP; mig-3g.40gb/2:0 OVERLAP; mig-3g.40gb/2:1 OVERLAP"},
		"a GPU":               {inventory.Recorded{Reason: "x", At: []gpu.Placement{first, gpuAt(2)}}, inventory.OverlapRefuse, "gpu/1 OVERLAP"},
		"an instance":         {inventory.Recorded{Reason: "x", Pending: true, At: []gpu.Placement{first, gpuAt(1), {GPU: coretest.GPU(2), GI: 1}}}, inventory.OverlapRefuse, "mig-3g.40gb/2:1 OVERLAP"},
		"being recorded":      {inventory.Recorded{Reason: "x", Pending: true, At: []gpu.Placement{first, gpuAt(1), gpuAt(2)}}, inventory.OverlapRefuse, ""},
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

// A unit that needs CDI takes work only while its device is defined for the driver's present incarnation.
func TestUnitsNeedTheirDefinition(t *testing.T) {
	const kind = "k8s.device-plugin.nvidia.com/gpu"
	both := []gpu.DeviceID{coretest.GPU(0), coretest.GPU(1)}
	libraries := []inventory.Mount{{HostPath: "/usr/lib/libcuda.so.580.95.05", ContainerPath: "/usr/lib/libcuda.so.1", ReadOnly: true}}
	required, auto := inventory.Injection{CDI: inventory.CDIRequired}, inventory.Injection{Runtime: true, CDI: inventory.CDIAuto}
	for name, tc := range map[string]struct {
		injection   inventory.Injection
		cdi         *inventory.CDI
		provisional bool
		why         string   // GPU 1 is unhealthy
		names       []string // of the plan of GPU 0
	}{
		"not needed":              {injection: inventory.Injection{Runtime: true}, cdi: &inventory.CDI{Problem: "disk full"}},
		"not attempted yet":       {injection: required, provisional: true, why: "not written yet"},
		"defined":                 {required, &inventory.CDI{Incarnation: 1, Kind: kind, Defined: both}, false, "", []string{kind + "=" + string(both[0])}},
		"an earlier driver":       {injection: required, provisional: true, cdi: &inventory.CDI{Kind: kind, Defined: both}, why: "not written yet"},
		"one is not defined":      {required, &inventory.CDI{Incarnation: 1, Kind: kind, Defined: both[:1], Others: []string{"v/gds=all"}}, false, "not written yet", []string{kind + "=" + string(both[0]), "v/gds=all"}},
		"one has a reason":        {required, &inventory.CDI{Incarnation: 1, Kind: kind, Defined: both[:1], Problem: "disk full", Undefined: []inventory.Undefined{{Device: both[1], Reason: "no node"}}}, false, "no node", []string{kind + "=" + string(both[0])}},
		"none has, disk full":     {injection: required, cdi: &inventory.CDI{Incarnation: 1, Problem: "disk full"}, why: "disk full"},
		"auto, not attempted":     {injection: auto, provisional: true, why: "not written yet"},
		"auto, an earlier driver": {injection: auto, provisional: true, cdi: &inventory.CDI{Problem: "the driver is not ready"}, why: "not written yet"},
		"auto, not usable":        {injection: auto, cdi: &inventory.CDI{Incarnation: 1, Problem: "disk full"}},
		"auto, usable":            {auto, &inventory.CDI{Incarnation: 1, Kind: kind, Defined: both, Usable: true}, false, "", []string{kind + "=" + string(both[0])}},
		"auto, one missing":       {auto, &inventory.CDI{Incarnation: 1, Kind: kind, Defined: both[:1], Usable: true}, false, "not written yet", []string{kind + "=" + string(both[0])}},
		"libraries":               {injection: inventory.Injection{Libraries: true}, cdi: &inventory.CDI{Incarnation: 1, Defined: both, Libraries: libraries}},
	} {
		cfg := core.DefaultConfig()
		cfg.Injection = tc.injection
		s := core.NewState(cfg).Read(cfg, time.Unix(0, 0), coretest.GPUs(2), checked(both...)...).WithHost(cfg, time.Unix(0, 0), inventory.Host{CDI: tc.cdi})
		inv := s.Allocatable
		if inv.Provisional() != tc.provisional {
			t.Errorf("%s: provisional %t", name, inv.Provisional())
		}
		u, _ := inv.Unit(inventory.UnitID(both[1]))
		if why := u.Health.Detail; why != tc.why || (why != "") != (u.Health.Reason == health.ReasonNoCDI) || u.Health.Schedulable() != (why == "") {
			t.Errorf("%s: %s, want %q", name, u.Health, tc.why)
		}
		p, err := inv.Reserve(inventory.UnitID(both[0]))
		if diff := cmp.Diff(tc.names, p.CDI); diff != "" {
			t.Errorf("%s: %v %s", name, err, diff)
		}
		if (p.Mounts != nil) != tc.injection.Libraries {
			t.Errorf("%s: %v", name, p.Mounts)
		}
	}
}

// Plans identify devices by index on request, as NVIDIA's container runtime does.
func TestPlanWithIndices(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.IndexIDs = inventory.MIGMixed, true
	inv := core.Build(coretest.WithMIG(coretest.GPUs(3), 1, "1g.10gb"), health.Ledger{}, cfg).WithoutHost()
	for ids, want := range map[string]string{"2 0": "0,2", "1:0": "1:0"} {
		units := parseUnits(ids)
		if strings.Contains(ids, ":") {
			units = []inventory.UnitID{inventory.UnitID(coretest.Instance(1, 0))}
		}
		if p, err := inv.Reserve(units...); err != nil || p.VisibleDevices() != want {
			t.Errorf("%s: %q, %v; want %s", ids, p.VisibleDevices(), err, want)
		}
	}
}

func checked(ids ...gpu.DeviceID) (obs []health.Observation) {
	for _, id := range ids {
		obs = append(obs, health.Observation{At: gpu.WholeGPU(id), Kind: health.Checked})
	}
	return obs
}
