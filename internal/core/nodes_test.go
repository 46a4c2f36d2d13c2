package core_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// passingNodes returns a configuration whose plans contain device nodes.
func passingNodes() core.Config {
	cfg := core.DefaultConfig()
	cfg.MIG, cfg.DeviceNodes = core.MIGMixed, true
	return cfg
}

// lacking removes device nodes from a snapshot.
func lacking(s core.Snapshot, nodes ...string) core.Snapshot {
	s.Nodes = slices.DeleteFunc(slices.Clone(s.Nodes), func(n string) bool { return slices.Contains(nodes, n) })
	return s
}

// healthLines returns the health texts of the units, each once.
func healthLines(inv *core.Inventory) string {
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
	instances := coretest.Cut(coretest.GPUs(1), 0, "1g.10gb")
	unnumbered := coretest.Cut(coretest.GPUs(1), 0, "1g.10gb")
	unnumbered.Devices[1].GICap, unnumbered.Devices[1].CICap, unnumbered.Devices[1].Minor = 0, 0, -1
	for name, tc := range map[string]struct {
		reading core.Snapshot
		change  func(*core.Config)
		want    string
	}{
		"all are there": {coretest.GPUs(2), nil, "healthy"},
		"unified memory": {
			lacking(coretest.GPUs(2), "/dev/nvidia-uvm"), nil,
			"healthy (missing /dev/nvidia-uvm: run nvidia-modprobe -c0 -u)",
		},
		"optional nodes": {lacking(coretest.GPUs(2), "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"), nil, "healthy"},
		"one GPU's": {
			lacking(coretest.GPUs(2), "/dev/nvidia1"), nil,
			"healthy; healthy (missing /dev/nvidia1: run nvidia-modprobe -c1)",
		},
		"several": {
			lacking(coretest.GPUs(1), "/dev/nvidia-uvm", "/dev/nvidiactl"), nil,
			"healthy (missing /dev/nvidiactl, /dev/nvidia-uvm: run nvidia-modprobe -c0 -u && nvidia-modprobe -c255)",
		},
		"capability of a MIG instance": {
			lacking(instances, "/dev/nvidia-caps/nvidia-cap101"), nil,
			"healthy (missing /dev/nvidia-caps/nvidia-cap101: run nvidia-modprobe -f /proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access)",
		},
		"numbers that are not known": {lacking(unnumbered, "/dev/nvidia0"), nil, "healthy"},
		"none is visible":            {lacking(coretest.GPUs(1), coretest.GPUs(1).Nodes...), nil, "healthy"},
		"none is passed": {
			lacking(coretest.GPUs(1), "/dev/nvidia-uvm"), func(c *core.Config) { c.DeviceNodes = false }, "healthy",
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := passingNodes()
			if tc.change != nil {
				tc.change(&cfg)
			}
			s := core.NewState(cfg).Read(cfg, time.Unix(0, 0), tc.reading)
			if got := healthLines(s.Inventory); got != tc.want {
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
		plan, err := s.Inventory.Reserve(core.UnitID(coretest.GPU(0)))
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.ContainsFunc(plan.Nodes, func(n core.DeviceNode) bool { return n.Path == "/dev/nvidia-uvm" }); got != inContainer {
			t.Errorf("%s: a container gets the node: %t", what, got)
		}
		if got, _ := s.Inventory.MissingNodes(plan.Devices[0]); (len(got) > 0) != missing {
			t.Errorf("%s: missing %v", what, got)
		}
		if got := healthLines(s.Inventory); (got != "healthy") != warned {
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
	s = s.Read(cfg, now, core.NoDriver(core.DriverFailed, "unloaded"))
	if u, _ := s.Inventory.Unit(core.UnitID(coretest.GPU(0))); u.Health.MissingNodes != "" {
		t.Errorf("a warning of nodes without a driver: %s", u.Health.MissingNodes)
	}
}
