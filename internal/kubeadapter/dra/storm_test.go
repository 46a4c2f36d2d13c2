package dra

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// work is what pods have: the model that the adapter is compared with.
type work struct {
	mu  sync.Mutex
	has map[string]holding // by pod
}

// holding is hardware that a pod has, or a share of it.
type holding struct {
	at    gpu.Placement
	share bool
}

// take records that a pod has hardware, and returns another pod that has it and does not share it.
func (h *work) take(pod string, has holding) (other string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for by, held := range h.has {
		if (!held.share || !has.share) && held.at.Overlaps(has.at) {
			return by
		}
	}
	h.has[pod] = has
	return ""
}

func (h *work) release(pod string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.has, pod)
}

// holders are the pods of a device plugin.
func (h *work) holders() (all []holders.Holder) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for by, held := range h.has {
		if strings.HasPrefix(by, "plugin") {
			all = append(all, holders.Holder{Work: holders.Work{Name: by}, API: inventory.DevicePlugin, Resource: "nvidia.com/gpu", Device: held.at.GPU, At: held.at})
		}
	}
	return all
}

// Many pods claim the same GPUs, MIG instances and shares, while a device plugin gives out the same, the policy changes between the allocation of
// claims and Prepare (other sharing, a GPU that is reserved) and the API server fails at times: no hardware ever has two holders that do not share
// it, and in the end everything is free.
//
//	TANDEM_STORM=100      runs, instead of one
//	TANDEM_STORM_SEED=7   of the first run
func TestStorm(t *testing.T) {
	runs, err := strconv.ParseUint(cmp.Or(os.Getenv("TANDEM_STORM"), "1"), 10, 64)
	first, seedErr := strconv.ParseUint(cmp.Or(os.Getenv("TANDEM_STORM_SEED"), "0"), 10, 64)
	if err != nil || seedErr != nil {
		t.Fatal(err, seedErr)
	}
	for seed := first; seed < first+runs && !t.Failed(); seed++ {
		t.Run(fmt.Sprintf("TANDEM_STORM_SEED=%d", seed), func(t *testing.T) { runStorm(t, seed) })
	}
}

func runStorm(t *testing.T, seed uint64) {
	reserved := func(c *core.Config) {
		c.Policy.Rules = []inventory.Rule{{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(0)}}, NotOffered: "for a test"}}
	}
	snapshot := coretest.WithMIG(coretest.GPUs(3), 2, "1g.10gb", "1g.10gb")
	policies := []*inventory.Allocatable{
		build(snapshot, health.Ledger{}, config()), build(snapshot, health.Ledger{}, config(shared(inventory.TimeSlicing, 3))), build(snapshot, health.Ledger{}, config(shared(inventory.MPS, 2))),
		build(snapshot, health.Ledger{}, config(reserved)),
	}
	var devices []gpu.Device
	for u := range policies[0].Devices() {
		devices = append(devices, u.Device)
	}
	model := &work{has: map[string]holding{}}
	lock := &sync.Mutex{}
	r := newRig(t, policies[0], func(a *Adapter) {
		a.lock, a.opts.PluginHolders = lock, model.holders
		a.limits.call = 20 * time.Second
	})
	rounds := 20
	if testing.Short() {
		rounds = 8
	}
	var running sync.WaitGroup
	for pod := range 8 {
		random := rand.New(rand.NewPCG(uint64(pod), 1+2*seed)) //nolint:gosec // a test that can be repeated
		running.Go(func() {
			for i := range rounds {
				d := devices[random.IntN(len(devices))]
				if random.IntN(10) == 0 {
					r.api.fail(kubeapi.ErrUnavailable)
					time.AfterFunc(50*time.Millisecond, func() { r.api.fail(nil) }) // else the last pods wait for the limit of a call
				} else {
					r.api.fail(nil)
				}
				name := fmt.Sprintf("p%d-%d", pod, i)
				allocated := []kubeapi.DeviceRequestAllocationResult{result(d.ID), result(d.ID, consuming(name, "1")), result(d.ID, share("1"))}
				form := random.IntN(len(allocated))
				r.api.put(newClaim(name, allocated[form]))
				if random.IntN(4) == 0 {
					r.src.Set(policies[random.IntN(len(policies))])
				}
				r.claimPod(model, name, holding{d.At, form > 0})
			}
			r.api.fail(nil)
		})
	}
	for pod := range 2 {
		random := rand.New(rand.NewPCG(uint64(pod), 2+2*seed)) //nolint:gosec // a test that can be repeated
		running.Go(func() {
			for range rounds {
				r.pluginPod(model, lock, devices[random.IntN(len(devices))], fmt.Sprintf("plugin-%d", pod))
			}
		})
	}
	running.Wait()
	if all := r.adapter.store.Load().All(); len(all) > 0 || r.record("p0-0").UID != "" {
		t.Errorf("%v", all)
	}
	if s := r.adapter.Stats(); s.Prepares == 0 || s.PrepareErrors == 0 {
		t.Errorf("not both ways were taken: %+v", s)
	}
}

// claimPod prepares a claim of a device, unless another pod has it, and unprepares it. It has what it was allocated.
func (r *rig) claimPod(model *work, name string, allocated holding) {
	err := r.prepareQuietly(r.conn, name)
	if err == nil {
		if other := model.take(name, allocated); other != "" {
			r.Errorf("claim %s was given %s, which %s has", name, allocated.at, other)
		}
		time.Sleep(time.Millisecond)
		model.release(name)
	}
	if err := r.unprepareQuietly(r.conn, name); err != nil {
		r.Error(err)
	}
}

// pluginPod gives a device to a pod by a device plugin, unless a claim or another pod has it.
func (r *rig) pluginPod(model *work, lock sync.Locker, d gpu.Device, name string) {
	lock.Lock()
	_, claimed := r.holder(d.At)
	held := !isFree(holders.NewSet(model.holders()), d.At)
	if !claimed && !held {
		if other := model.take(name, holding{d.At, false}); other != "" {
			r.Errorf("%s was given %s, which %s has", name, d.At, other)
		}
	}
	lock.Unlock()
	if !claimed && !held {
		time.Sleep(time.Millisecond)
		model.release(name)
	}
}
