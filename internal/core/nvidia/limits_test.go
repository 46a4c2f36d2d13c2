package nvidia

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

var _ monitor.MemoryLimiter = (*Session)(nil)

const gib = 1 << 30

// withLimits is the text of a machine with limits of memory for the control groups of a folder.
func withLimits(t *testing.T, machine, backend, mount string, more ...string) string {
	t.Helper()
	text, err := simdriver.Text(machine)
	must(t, err)
	text, err = simdriver.WithLimits(text, backend, mount, more...)
	must(t, err)
	return text
}

// limitedGroup starts a machine with limits, with a group of an ordinary tree.
func limitedGroup(t *testing.T, backend string, more ...string) (m *simdriver.Machine, mount, group string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root may set limits")
	}
	mount = filepath.Join(t.TempDir(), "cgroup")
	m = simdriver.StartText(t, withLimits(t, "h100x8", backend, mount, more...))
	group, err := simdriver.MakeGroup(mount, "/nomad.slice/share.slice/A.task.scope", backend)
	must(t, err)
	return m, mount, group
}

func limitOf(m *simdriver.Machine, slot int, group string) gpu.LimitQuery {
	return gpu.LimitQuery{GPU: gpu.DeviceID(m.UUID(slot)), Group: group}
}

func expectLimits(t *testing.T, s *Session, queries []gpu.LimitQuery, want ...gpu.LimitAnswer) {
	t.Helper()
	got, err := s.MemoryLimits(queries)
	must(t, err)
	for i := range want {
		want[i].LimitQuery = queries[i]
	}
	if !slices.Equal(got, want) {
		t.Errorf("%+v,\nwant %+v", got, want)
	}
}

// Limits are set and read; the answers that mean that there is none are NoLimit; each refusal has its error.
func TestMemoryLimits(t *testing.T) {
	for _, backend := range []string{simdriver.Misc, simdriver.DMem} {
		t.Run(backend, func(t *testing.T) {
			m, mount, group := limitedGroup(t, backend)
			off, err := simdriver.MakeGroup(mount, "/off", "memory")
			must(t, err)
			s := open(t, m)
			q := limitOf(m, 2, group)
			expectLimits(t, s, []gpu.LimitQuery{q}, gpu.LimitAnswer{State: gpu.LimitFailed, Err: "the GPU was not read"})
			snapshot(t, s)
			if why := s.LimitsUnsupported(); why != "" {
				t.Error(why)
			}
			queries := []gpu.LimitQuery{limitOf(m, 7, off), q, limitOf(m, 7, mount+"/none"), limitOf(m, 0, off)}
			must(t, s.SetMemoryLimit(gpu.LimitChange{LimitQuery: q, Soft: gib, Hard: 2 * gib}))
			_, err = m.Allocate(2, group, gib/2)
			must(t, err)
			expectLimits(t, s, queries, gpu.LimitAnswer{State: gpu.NoLimit}, gpu.LimitAnswer{Limit: gpu.MemoryLimit{Soft: gib, Hard: 2 * gib, Used: gib / 2}},
				gpu.LimitAnswer{State: gpu.LimitFailed, Err: "nvmlDeviceGetMemoryLimits_v1: GPU access blocked by the operating system"}, gpu.LimitAnswer{State: gpu.NoLimit})
			for _, c := range []struct {
				gpu   gpu.DeviceID
				group string
				hard  uint64
				want  error
			}{
				{q.GPU, group, 1<<44 - 1, gpu.ErrLimitInvalid},
				{q.GPU, mount, gib, gpu.ErrLimitsUnsupported},
				{q.GPU, mount + "/none", gib, gpu.ErrLimitNoGroup},
				{"GPU-0", group, gib, gpu.ErrLimitUnknown},
			} {
				err := s.SetMemoryLimit(gpu.LimitChange{LimitQuery: gpu.LimitQuery{GPU: c.gpu, Group: c.group}, Hard: c.hard})
				if !errors.Is(err, c.want) {
					t.Errorf("%s %d: %v, want %v", c.group, c.hard, err, c.want)
				}
			}
			must(t, m.Fail(simdriver.GPU(2), setLimits, "NO_PERMISSION", simdriver.Always))
			if err := s.SetMemoryLimit(gpu.LimitChange{LimitQuery: q}); !errors.Is(err, gpu.ErrLimitNotPermitted) {
				t.Error(err)
			}
		})
	}
}

// A GPU that hangs delays no other, and neither a later Set nor a Get of it is made before its call has returned. A lost one has its error.
func TestMemoryLimitsOfHungGPU(t *testing.T) {
	const deadline = 200 * time.Millisecond
	m, _, group := limitedGroup(t, simdriver.Misc)
	s := openWith(t, m, Options{Deadline: deadline})
	snapshot(t, s)
	must(t, m.Hang(simdriver.GPU(1), getLimits), m.Lose(3))
	queries := []gpu.LimitQuery{limitOf(m, 0, group), limitOf(m, 1, group), limitOf(m, 2, group), limitOf(m, 1, group), limitOf(m, 3, group)}
	must(t, s.SetMemoryLimit(gpu.LimitChange{LimitQuery: queries[2], Hard: gib}))
	began := time.Now()
	hung := gpu.LimitAnswer{State: gpu.LimitFailed, Err: "the driver does not answer (" + getLimits + ")"}
	expectLimits(t, s, queries, gpu.LimitAnswer{State: gpu.NoLimit}, hung, gpu.LimitAnswer{Limit: gpu.MemoryLimit{Hard: gib}}, hung,
		gpu.LimitAnswer{State: gpu.LimitFailed, Err: getLimits + ": GPU is lost"})
	if took := time.Since(began); took > 5*deadline {
		t.Errorf("it took %v", took)
	}
	if err := s.SetMemoryLimit(gpu.LimitChange{LimitQuery: queries[1], Hard: gib}); !errors.Is(err, gpu.ErrLimitUnknown) || calls(t, m)[setLimits] != 1 {
		t.Errorf("%v, %d calls", err, calls(t, m)[setLimits])
	}
	must(t, m.Heal())
	waitUntilIdle(t, s)
	must(t, m.Unload())
	if _, err := s.MemoryLimits(queries); !errors.Is(err, gpu.ErrDriverLost) {
		t.Error(err)
	}
	if err := s.SetMemoryLimit(gpu.LimitChange{LimitQuery: queries[0], Hard: gib}); !errors.Is(err, gpu.ErrDriverLost) {
		t.Error(err)
	}
}

// Of one GPU alone limits can be set and read, while another one hangs.
func TestReadGPU(t *testing.T) {
	m, _, group := limitedGroup(t, simdriver.Misc)
	s := openWith(t, m, Options{Deadline: 200 * time.Millisecond})
	must(t, m.Hang(simdriver.GPU(1), memoryInfo))
	for range 2 {
		d, err := s.ReadGPU(gpu.DeviceID(m.UUID(2)))
		must(t, err)
		if d.At != gpu.WholeGPU(d.ID) || d.MIG || d.Memory>>20 != 81559 {
			t.Errorf("%+v", d)
		}
	}
	q := limitOf(m, 2, group)
	must(t, s.SetMemoryLimit(gpu.LimitChange{LimitQuery: q, Hard: gib}))
	expectLimits(t, s, []gpu.LimitQuery{q}, gpu.LimitAnswer{Limit: gpu.MemoryLimit{Hard: gib}})
	for range 2 {
		_, err := s.ReadGPU(gpu.DeviceID(m.UUID(1)))
		if _, hung := errors.AsType[*hungError](err); !hung {
			t.Errorf("the GPU that hangs: %v", err)
		}
	}
	if _, err := s.ReadGPU("GPU-0"); returnCode(err) != nvml.ERROR_NOT_FOUND {
		t.Error(err)
	}
	must(t, m.Heal())
	waitUntilIdle(t, s)
}

// A driver before 615 has no limits, and no call about them is made.
func TestNoLimitsBefore615(t *testing.T) {
	m, s := start(t, "h100x8", open)
	snapshot(t, s)
	if why := s.LimitsUnsupported(); why != "driver 570.124.06: want 615 or newer" {
		t.Error(why)
	}
	q := limitOf(m, 0, "/sys/fs/cgroup/a")
	n := counted(t, m, func() {
		expectLimits(t, s, []gpu.LimitQuery{q}, gpu.LimitAnswer{State: gpu.NoLimit})
		if err := s.SetMemoryLimit(gpu.LimitChange{LimitQuery: q}); !errors.Is(err, gpu.ErrLimitsUnsupported) {
			t.Error(err)
		}
	})
	if total(n) > 0 || calls(t, m)[memoryInfoV2] > 0 {
		t.Errorf("%v", n)
	}
}

// fence 24: the memory of a GPU stays the same when the agent's own group is limited, whichever of the calls shows the limit.
func TestMemoryInLimitedGroup(t *testing.T) {
	for _, version := range []string{"v1", "v2"} {
		t.Run(version, func(t *testing.T) {
			m, _, group := limitedGroup(t, simdriver.Misc, "limited_total = "+version)
			t.Setenv("SIMDRIVER_CGROUP", "/nomad.slice/share.slice/A.task.scope")
			s := open(t, m)
			whole := snapshot(t, s).Devices[0]
			must(t, s.SetMemoryLimit(gpu.LimitChange{LimitQuery: limitOf(m, 0, group), Hard: gib}))
			limited := snapshot(t, s)
			if d := limited.Devices[0]; d.MemoryShown != gib || d.Memory != whole.Memory || whole.MemoryShown != 0 || limited.Devices[1].MemoryShown != 0 {
				t.Errorf("%d of %d, before %d of %d", d.MemoryShown, d.Memory, whole.MemoryShown, whole.Memory)
			}
		})
	}
}
