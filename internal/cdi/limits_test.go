package cdi

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// withLimits is a monitor whose policy limits shares of full GPUs, through an API.
func withLimits(api inventory.API, replicas int, memory uint64) *monitor {
	m := newMonitor(required())
	m.cfg.API = api
	m.cfg.Policy = inventory.Policy{Limits: inventory.LimitPolicy{On: true, Reserve: 1 << 30}, Rules: []inventory.Rule{{
		Select: inventory.Selector{Full: true}, Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: replicas, Memory: memory, Limit: inventory.LimitRequired},
	}}}
	m.state.Store(core.NewState(m.cfg))
	return m
}

// supports sets by which backend the driver limits the memory of these GPUs.
func (m *monitor) supports(backend string, ids ...gpu.DeviceID) {
	m.change(func(s core.State) core.State {
		h := s.Host
		h.Limits = &inventory.Limits{Withheld: map[gpu.DeviceID]inventory.LimitMissing{}, Backend: backend}
		for _, id := range ids {
			h.Limits.Withheld[id] = inventory.LimitMissing{}
		}
		return s.WithHost(m.cfg, time.Now(), h)
	})
}

// limitDevices are the names in the specification of limits with their variables, as a runtime reads it; nil without the file.
func (n *node) limitDevices(t *testing.T) (lines []string) {
	t.Helper()
	s, err := cdi.ReadSpec(filepath.Join(n.Folder, vendor+"-memory-limit.json"), 0)
	if err != nil {
		return nil
	}
	for _, d := range s.Devices {
		e := d.ContainerEdits
		if lines = append(lines, d.Name+" "+strings.Join(e.Env, " ")); e.DeviceNodes != nil || e.Hooks != nil || e.Mounts != nil {
			t.Errorf("%s has more than variables: %+v", d.Name, e)
		}
	}
	return lines
}

// A limit is the edit of a CDI device of its own, for each number of shares that a container can have. With dmem no memory is reserved (C10). Without the backend the variables are
// not known. Names that containers may have stay when the policy has other limits: the runtime needs them to start a container again.
func TestSpecificationOfLimits(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), withLimits(inventory.DevicePlugin, 2, 20<<30)
	check.NoError(t, os.Remove(n.root+"/usr/bin/nvidia-ctk"))
	buildHookProgram(t, n.root+"/usr/bin/nvidia-ctk", toolkitVersion("1.20.1")...)
	n.run(t, m)
	m.read(coretest.GPUs(1))
	s := m.defined(t, ids(0)...)
	if s.Host.CDI.LimitsProblem == "" || n.limitDevices(t) != nil {
		t.Errorf("without a backend: %v, %+v", n.limitDevices(t), s.Host.CDI)
	}
	for _, tc := range []struct {
		backend string
		want    []string
	}{
		{"misc", []string{"20480 NVIDIA_GPU_MEMORY_LIMIT=20480 NVIDIA_GPU_MEMORY_REQUEST=20480", "40960 NVIDIA_GPU_MEMORY_LIMIT=40960 NVIDIA_GPU_MEMORY_REQUEST=40960"}},
		{inventory.BackendDMem, []string{"20480 NVIDIA_GPU_MEMORY_LIMIT=20480 NVIDIA_GPU_MEMORY_REQUEST=0", "40960 NVIDIA_GPU_MEMORY_LIMIT=40960 NVIDIA_GPU_MEMORY_REQUEST=0"}},
	} {
		m.supports(tc.backend, ids(0)...)
		check.Until(t, tc.backend, func() bool { return slices.Equal(n.limitDevices(t), tc.want) })
	}
	id := inventory.UnitID(coretest.GPU(0)) + "::1"
	p, err := m.await(t, "work", func(s core.State) bool { u, _ := s.Allocatable.Unit(id); return u.Health.Schedulable() }).Allocatable.Reserve(id)
	if want := []string{vendor + "/gpu=" + string(coretest.GPU(0)), vendor + "/memory-limit=20480"}; err != nil || !slices.Equal(p.CDI, want) {
		t.Errorf("plan %v, %v; want %v", p.CDI, err, want)
	}
	m.change(func(s core.State) core.State {
		m.cfg.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2, Memory: 1 << 30, OnePerRequest: true, Limit: inventory.LimitRequired}}}
		return s
	})
	m.read(coretest.GPUs(1))
	check.Until(t, "other limits", func() bool { return len(n.limitDevices(t)) == 3 })
	if removed, err := Remove(n.Options); err != nil || len(removed) != 2 {
		t.Errorf("removed %v, %v", removed, err)
	}
}

// The kubelet starts a container again with the names that it has stored, also after a reboot, which empties the folder, and whatever the policy is then: other limits,
// or none, so that nothing is known of the driver's.
func TestLimitsOfContainersAfterReboot(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		memory  uint64 // of the policy; 0 = it has no limits
		backend string
		want    []string
	}{
		"another limit": {18 << 30, "misc", []string{
			"18432 NVIDIA_GPU_MEMORY_LIMIT=18432 NVIDIA_GPU_MEMORY_REQUEST=18432", "20480 NVIDIA_GPU_MEMORY_LIMIT=20480 NVIDIA_GPU_MEMORY_REQUEST=20480",
			"36864 NVIDIA_GPU_MEMORY_LIMIT=36864 NVIDIA_GPU_MEMORY_REQUEST=36864",
		}},
		"backend not known": {18 << 30, "", []string{"20480 NVIDIA_GPU_MEMORY_LIMIT=20480 NVIDIA_GPU_MEMORY_REQUEST=0"}},
		"no limit":          {0, "misc", []string{"20480 NVIDIA_GPU_MEMORY_LIMIT=20480 NVIDIA_GPU_MEMORY_REQUEST=20480"}},
		"no section":        {0, "", []string{"20480 NVIDIA_GPU_MEMORY_LIMIT=20480 NVIDIA_GPU_MEMORY_REQUEST=0"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, m := newNode(t), newMonitor(inventory.Injection{})
			if tc.memory > 0 {
				m = withLimits(inventory.DevicePlugin, 2, tc.memory)
			}
			n.Stored = func(kind string) []string {
				if kind != vendor+"/memory-limit" {
					t.Errorf("asked for %s", kind)
				}
				return []string{"20480", "all"}
			}
			n.run(t, m)
			m.read(coretest.GPUs(1))
			if tc.backend != "" {
				m.supports(tc.backend, ids(0)...)
			}
			check.Until(t, "the limits", func() bool { return slices.Equal(n.limitDevices(t), tc.want) })
			if len(n.spec(t).Devices) == 0 {
				t.Error("the GPU, which the container has by its name, too, is not defined")
			}
			check.NoError(t, os.Remove(filepath.Join(n.Folder, vendor+"-memory-limit.json")))
			check.Until(t, "they are written again", func() bool { return slices.Equal(n.limitDevices(t), tc.want) })
		})
	}
}

// Nodes without limits have no such file, and nothing of them is known.
func TestNoLimitsNoSpecification(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	n.run(t, m)
	m.read(coretest.GPUs(1))
	m.supports("misc", ids(0)...)
	c := m.defined(t, ids(0)...).Host.CDI
	if files, _ := os.ReadDir(n.Folder); len(files) != 1 || c.LimitKind != "" || c.NoHook != "" || c.Limits != nil || c.WithoutHook != nil {
		t.Errorf("%v, %+v", files, c)
	}
}

// Fence 3 and 32: when the hook program under a pool with required limits is replaced by one that sets none, the pool takes no work with the next reading, and the text has both
// versions. It takes work again with the right program.
func TestHookProgramSwapped(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), withLimits(inventory.DevicePlugin, 2, 20<<30)
	program := n.root + "/usr/bin/nvidia-ctk"
	n.run(t, m)
	m.read(coretest.GPUs(1))
	m.supports("misc", ids(0)...)
	for _, tc := range []struct{ version, want string }{
		{"", "the version of hook program /usr/bin/nvidia-ctk is unknown: want 1.20.1 or newer"},
		{"1.20.1", ""},
		{"1.19.1", "hook program /usr/bin/nvidia-ctk has version 1.19.1: want 1.20.1 or newer"},
		{"1.17.8", "hook program /usr/bin/nvidia-ctk has version 1.17.8: want 1.20.1 or newer"},
		{"1.20.1", ""},
	} {
		if tc.version != "" {
			buildHookProgram(t, n.root+"/new", toolkitVersion(tc.version)...)
			check.NoError(t, os.Rename(n.root+"/new", program))
		}
		began := time.Now()
		s := m.await(t, "version "+tc.version, func(s core.State) bool {
			u, ok := s.Allocatable.Unit(inventory.UnitID(coretest.GPU(0)) + "::0")
			return ok && u.Health.Detail == tc.want
		})
		u, _ := s.Allocatable.Unit(inventory.UnitID(coretest.GPU(0)) + "::0")
		if u.Health.Schedulable() != (tc.want == "") || tc.want != "" && (u.Health.Reason != health.ReasonNoLimit || !strings.Contains(u.Health.String(), tc.want)) {
			t.Errorf("version %s: %s", tc.version, u.Health)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("version %s: after %s", tc.version, took)
		}
	}
}

// GPUs whose claims have limits have no hook for limits, as the agent limits their pods; others keep it.
func TestPodLimitedHaveNoHook(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), withLimits(inventory.DRA, 2, 20<<30)
	m.cfg.Policy.Rules[0].Select.IDs = ids(0)
	check.NoError(t, os.Remove(n.root+"/usr/bin/nvidia-ctk"))
	buildHookProgram(t, n.root+"/usr/bin/nvidia-ctk", toolkitVersion("1.20.1")...)
	n.run(t, m)
	m.read(coretest.GPUs(2))
	m.supports("misc", ids(0)...)
	s := m.defined(t, ids(0, 1)...)
	for i, want := range []int{0, 1} {
		hooks := 0
		for _, h := range deviceOf(t, n.spec(t), string(coretest.GPU(i))).ContainerEdits.Hooks {
			if slices.Contains(h.Args, limitsHook) {
				hooks++
			}
		}
		if hooks != want {
			t.Errorf("GPU %d has %d hooks for limits, want %d", i, hooks, want)
		}
	}
	if u, _ := s.Allocatable.Unit(inventory.UnitID(coretest.GPU(0)) + "::0"); !u.Health.Schedulable() || n.limitDevices(t) != nil {
		t.Errorf("%s, limits %v", u.Health, n.limitDevices(t))
	}
}
