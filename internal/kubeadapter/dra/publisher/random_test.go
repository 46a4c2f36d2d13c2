package publisher_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// Whatever happens to devices, slices, server, Node and agent: the scheduler never sees a complete pool with a device twice, and once
// everything else works again, the API has the devices that it does not refuse, and when it refuses none, all of them, within ten minutes, which
// is how long a device that was refused may wait.
//
//	TANDEM_STORM=1000     runs, instead of a few
//	TANDEM_STORM_SEED=7   of the first run
func TestRandomFailures(t *testing.T) {
	runs, err := strconv.ParseUint(cmp.Or(os.Getenv("TANDEM_STORM"), "16"), 10, 64)
	first, seedErr := strconv.ParseUint(cmp.Or(os.Getenv("TANDEM_STORM_SEED"), "0"), 10, 64)
	if err != nil || seedErr != nil {
		t.Fatal(err, seedErr)
	}
	for seed := first; seed < first+runs; seed++ {
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
			refused := refuseSome(a, r)
			a.after(11 * time.Minute)
			isRefused := func(d kubeapi.Device) bool { return refused(d.Name) }
			wantDevices(t, slices.DeleteFunc(slices.Clone(desired), isRefused), slices.DeleteFunc(a.published(), isRefused))
			a.api.Validate(nil)
			a.after(11 * time.Minute)
			a.want(desired...)
			a.wantProblem()
			if t.Failed() {
				t.Logf("TANDEM_STORM_SEED=%d\n%s", seed, a.log.String())
			}
		})
		if t.Failed() {
			return
		}
	}
}

// refuseSome has the server refuse each slice with one of two devices, as with a field that is not valid, and no other.
func refuseSome(a *agent, r *rand.Rand) (refused func(name string) bool) {
	one, other := gpu(r.IntN(200)).Name, gpu(r.IntN(200)).Name // two are found with less than siftRequests
	refused = func(name string) bool { return name == one || name == other }
	a.api.Validate(func(s kubeapitest.Slice) error {
		for i, d := range s.Spec.Devices {
			if refused(d.Name) {
				return fmt.Errorf("spec.devices[%d]: Invalid value", i)
			}
		}
		return nil
	})
	return refused
}

// step changes the desired devices, or lets something go wrong.
func step(a *agent, r *rand.Rand, desired []kubeapi.Device) []kubeapi.Device {
	verbs := []string{"create", "update", "delete", "get", "list", "watch", ""}
	failures := []kubeapitest.Failure{{Applied: true}, {}, {Code: 500}, {Code: 429, RetryAfter: 2}, {Code: 409, Reason: "Conflict"},
		{Code: 400}, {Code: 413}, {Code: 422}, {Code: 400, DryRuns: true}, {Code: 413, DryRuns: true}, {Code: 422, DryRuns: true}}
	switch r.IntN(14) {
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
	case 12:
		if refuseSome(a, r); r.IntN(2) == 0 {
			a.api.Validate(nil)
		}
	case 13:
		if a.api.FailDryRuns(kubeapitest.Failure{Code: []int{400, 413, 422, 500}[r.IntN(4)]}); r.IntN(2) == 0 {
			a.api.Resume()
		}
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
