package metrics

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// A share has the driver's values, if they were read, and the memory of its processes: a share that has some and of which the driver has counted none is one that is not
// limited, whatever Set and Get return (fence T5). A share of a GPU that is not listed has no series; a node without limits has none at all.
func TestLimits(t *testing.T) {
	cfg, at := core.DefaultConfig(), time.Unix(1000, 0)
	pod := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "n", Name: "p", ID: "u"}
	main, claimed := pod, pod
	main.Container, claimed.Claim = "main", "c"
	task := holders.Work{Orchestrator: holders.Nomad, Namespace: "n", Name: "j", Container: "t", ID: "a"}
	other := task
	other.Container = "u"
	process := func(w holders.Work, memory uint64) use.Process {
		return use.Process{Process: gpu.Process{Memory: gpu.OptionalUint64Of(memory)}, Owner: w}
	}
	of := func(gpus int) Source {
		return Source{
			Config: cfg, State: core.NewState(cfg).Read(cfg, at, coretest.GPUs(gpus)), Sources: map[string]bool{}, ResourceOf: func(u inventory.Unit) string { return u.Pool },
			Use: use.Table{At: at, Devices: []use.Device{{ID: coretest.GPU(0), Processes: []use.Process{
				process(main, 3), process(main, 4), process(task, 5), {Owner: task}, process(other, 9), process(holders.Work{}, 9)}}}},
			Limits: &limit.Table{
				At: at,
				Shares: []limit.Share{
					{GPU: coretest.GPU(0), Work: pod, Pool: "g", Required: true, Begun: true, Read: true, State: limit.Limited, Driver: gpu.MemoryLimit{Hard: 20, Used: 7}},
					{GPU: coretest.GPU(0), Work: claimed, Pool: "g", Required: true, Read: true, State: limit.Limited, Driver: gpu.MemoryLimit{Hard: 20, Used: 7}},
					{GPU: coretest.GPU(0), Work: task, Pool: "g", Begun: true, Read: true, State: limit.Unlimited, Driver: gpu.MemoryLimit{Hard: gpu.NoMemoryLimit}},
					{GPU: coretest.GPU(1), Work: task},
				},
				Problems: []problem.Problem{{Code: problem.StaleLimit, Object: "a"}, {Code: problem.StaleLimit, Object: "b"}},
				Counts:   limit.Counts{Set: 1, Failed: 2, Overridden: 3, Stale: 4, Late: 5},
			},
		}
	}
	// the values of labels are in the order of their names: (begun,) container, device, id, name, namespace, orchestrator, pool (, required, state)
	want := map[string]float64{
		"_bytes  0 u p n kubernetes g": 20, "_used_bytes  0 u p n kubernetes g": 7, "_process_bytes  0 u p n kubernetes g": 7,
		"_state true  0 u p n kubernetes g true limited": 1,
		"_used_bytes t 0 a j n nomad g":                  0, "_process_bytes t 0 a j n nomad g": 5, "_state true t 0 a j n nomad g false not limited": 1,
		"_state false t 1 a j n nomad  false unknown": 1,
	}
	node := map[string]float64{
		"_problems LIMIT_UNSUPPORTED": 0, "_problems LIMITS_UNKNOWN": 0, "_problems LIMIT_NOT_COUNTED": 0, "_problems LIMIT_CONTROLLER_OFF": 0, "_problems LIMIT_OVERRIDDEN": 0, "_problems STALE_LIMIT": 2,
		"_problems LIMITS_NOT_RECORDED": 0, "_problems MEMORY_TOTAL_LIMITED": 0,
		"s_set_total": 1, "s_failed_total": 2, "s_overridden_total": 3, "s_stale_total": 4, "s_late_total": 5,
	}
	for name, n := range node {
		want[name] = n
	}
	if diff := cmp.Diff(want, seriesOf(t, of(2), "tandem_memory_limit")); diff != "" {
		t.Errorf("(-want, +got):\n%s", diff)
	}
	if diff := cmp.Diff(node, seriesOf(t, of(0), "tandem_memory_limit")); diff != "" {
		t.Errorf("the GPUs are gone (-want, +got):\n%s", diff)
	}
	off := of(2)
	off.Limits = nil
	if got := seriesOf(t, off, "tandem_memory_limit"); len(got) != 0 {
		t.Errorf("there are no limits: %v", got)
	}
}
