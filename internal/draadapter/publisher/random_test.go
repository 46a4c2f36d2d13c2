package publisher_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeapi/kubeapitest"
)

// Whatever happens to devices, slices, server, Node and agent: the scheduler never sees a complete pool with a device twice, and once
// everything works again, the API has the devices within ten minutes, which is how long a device that was refused may wait.
func TestRandomFailures(t *testing.T) {
	for seed := range uint64(16) {
		inBubble(t, func(a *agent) {
			r := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // a test that can be repeated
			a.api.OnChange(func(all []kubeapi.ResourceSlice) { checkPool(a.t, all) })
			desired := []kubeapi.Device{}
			for range 40 {
				desired = step(a, r, desired)
				a.after(time.Duration(r.IntN(2000)) * time.Millisecond)
			}
			a.api.Resume()
			a.api.DropFields(false, false)
			a.api.SetDown(false)
			a.api.CollectGarbage()
			a.after(10 * time.Minute)
			a.want(desired...)
			a.wantProblem()
			if t.Failed() {
				t.Logf("seed %d\n%s", seed, a.log.String())
			}
		})
		if t.Failed() {
			return
		}
	}
}

// step changes the desired devices, or lets something go wrong.
func step(a *agent, r *rand.Rand, desired []kubeapi.Device) []kubeapi.Device {
	verbs := []string{"create", "update", "delete", "get", "list", "watch", ""}
	failures := []kubeapitest.Failure{{Applied: true}, {}, {Code: 500}, {Code: 429, RetryAfter: 2}, {Code: 409, Reason: "Conflict"},
		{Code: 400}, {Code: 422}, {Code: 400, DryRuns: true}, {Code: 413, DryRuns: true}}
	switch r.IntN(12) {
	case 0, 1, 2:
		desired = desired[:0:0]
		for i := range r.IntN(200) {
			d := gpu(i)
			if r.IntN(20) == 0 {
				d = tainted(d, kubeapi.NoSchedule)
			}
			if r.IntN(50) != 0 {
				desired = append(desired, d)
			}
		}
		a.devices.Store(desired)
	case 3:
		if len(desired) > 0 {
			desired = append([]kubeapi.Device{}, desired...)
			i := r.IntN(len(desired))
			desired[i].Taints = nil
			desired[i] = tainted(desired[i], kubeapi.NoExecute)
			a.devices.Store(desired)
		}
	case 4:
		a.api.Wipe(node, "")
	case 5:
		a.api.Fail(verbs[r.IntN(len(verbs))], 1+r.IntN(3), failures[r.IntN(len(failures))])
	case 6:
		a.api.SetDown(r.IntN(2) == 0)
	case 7:
		[]func(){a.api.CutWatches, a.api.EndWatches, a.api.ExpireWatches}[r.IntN(3)]()
	case 8:
		a.api.DeleteNode(node)
		a.api.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: node}})
		a.api.CollectGarbage()
	case 9:
		a.restart()
	case 10:
		if r.IntN(4) == 0 {
			a.api.PutSlice(foreign(fmt.Sprintf("left-over-%d", r.IntN(2))))
		}
	case 11:
		a.api.DeleteSlice(fmt.Sprintf("n1-gpu.nvidia.com-%d", r.IntN(4)))
	}
	return desired
}

// checkPool reports a device that is twice in the newest generation of a complete pool.
func checkPool(t *testing.T, all []kubeapi.ResourceSlice) {
	newest := int64(0)
	for _, s := range all {
		newest = max(newest, s.Spec.Pool.Generation)
	}
	names, count, want := map[string]string{}, int64(0), int64(0)
	twice := ""
	for _, s := range all {
		if s.Spec.Pool.Generation != newest {
			continue
		}
		count, want = count+1, s.Spec.Pool.ResourceSliceCount
		for _, d := range s.Spec.Devices {
			if other, ok := names[d.Name]; ok {
				twice = fmt.Sprintf("%s is in %s and %s", d.Name, other, s.Metadata.Name)
			}
			names[d.Name] = s.Metadata.Name
		}
	}
	if count == want && twice != "" {
		t.Errorf("generation %d: %s", newest, twice)
	}
}
