package draadapter

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/kubeapi"
)

// holders are what pods have, by a GPU or instance: the model that the adapter is compared with.
type holders struct {
	mu  sync.Mutex
	has map[gpu.Placement]string
}

// take records that a pod has hardware, and returns another pod that has it.
func (h *holders) take(at gpu.Placement, pod string) (other string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for held, by := range h.has {
		if by != pod && held.Overlaps(at) {
			return by
		}
	}
	h.has[at] = pod
	return ""
}

func (h *holders) release(at gpu.Placement) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.has, at)
}

// holder returns the pod of a device plugin that has hardware.
func (h *holders) holder(at gpu.Placement) (string, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for held, by := range h.has {
		if strings.HasPrefix(by, "plugin") && held.Overlaps(at) {
			return by, true
		}
	}
	return "", false
}

// Many pods claim the same GPUs and MIG instances, while a device plugin gives out the same and the API server fails at times: no hardware
// ever has two holders, and in the end everything is free.
func TestStorm(t *testing.T) {
	snapshot := coretest.WithMIG(coretest.GPUs(3), 2, "1g.10gb", "1g.10gb")
	inv := build(snapshot, health.Ledger{}, config())
	var devices []gpu.Device
	for u := range inv.Devices() {
		devices = append(devices, u.Device)
	}
	model := &holders{has: map[gpu.Placement]string{}}
	lock := &sync.Mutex{}
	r := newRig(t, inv, func(a *Adapter) {
		a.lock, a.opts.DevicePluginHolder = lock, model.holder
		a.limits.call = 20 * time.Second
	})
	rounds := 20
	if testing.Short() {
		rounds = 8
	}
	var running sync.WaitGroup
	for pod := range 8 {
		random := rand.New(rand.NewPCG(uint64(pod), 1)) //nolint:gosec // a test that can be repeated
		running.Go(func() {
			for i := range rounds {
				d := devices[random.IntN(len(devices))]
				if random.IntN(10) == 0 {
					r.api.fail(kubeapi.ErrUnavailable)
				} else {
					r.api.fail(nil)
				}
				r.claimPod(model, d, fmt.Sprintf("p%d-%d", pod, i))
			}
			r.api.fail(nil)
		})
	}
	for pod := range 2 {
		random := rand.New(rand.NewPCG(uint64(pod), 2)) //nolint:gosec // a test that can be repeated
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

// claimPod prepares a claim of a device, unless another pod has it, and unprepares it.
func (r *rig) claimPod(model *holders, d gpu.Device, name string) {
	r.api.put(newClaim(name, result(d.ID)))
	err := r.prepareQuietly(r.conn, name)
	if err == nil {
		if other := model.take(d.At, name); other != "" {
			r.Errorf("claim %s was given %s, which %s has", name, d.At, other)
		}
		model.release(d.At)
	}
	if err := r.unprepareQuietly(r.conn, name); err != nil {
		r.Error(err)
	}
}

// pluginPod gives a device to a pod by a device plugin, unless a claim or another pod has it.
func (r *rig) pluginPod(model *holders, lock sync.Locker, d gpu.Device, name string) {
	lock.Lock()
	_, claimed := r.adapter.Holder(d.At)
	_, held := model.holder(d.At)
	if !claimed && !held {
		if other := model.take(d.At, name); other != "" {
			r.Errorf("%s was given %s, which %s has", name, d.At, other)
		}
	}
	lock.Unlock()
	if !claimed && !held {
		time.Sleep(time.Millisecond)
		model.release(d.At)
	}
}
