package deviceplugin

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/test/check"
)

// assigned is two GPUs with assignments, and with the CDI specification that DRA needs.
func assigned(all ...inventory.GPUOwner) *inventory.Allocatable {
	defined := &inventory.CDI{Kind: "k/gpu", Defined: []gpu.DeviceID{coretest.GPU(0), coretest.GPU(1)}, Usable: true}
	return gpus(2).WithHost(inventory.Host{CDI: defined, Ownership: inventory.Ownership{GPUs: all}}, inventory.OverlapWarn)
}

func throughAPI(n int, a inventory.API, moving string) inventory.GPUOwner {
	return inventory.GPUOwner{GPU: coretest.GPU(n), API: a, Local: true, Pending: moving}
}

// A GPU of the API dra is in no list and is not allocated; one that moves is listed as unhealthy first. Its resource stays registered,
// with an empty list in the end, and is registered again at each start of the kubelet, as is a name that only DRA serves.
// (Cases 43 and 44: what the kubelet has of the device plugin.)
func TestDevicePluginBesideDRA(t *testing.T) {
	var mu sync.Mutex
	empty := []string{"nvidia.com/mig-1g.10gb"}
	r := startRig(t, assigned(throughAPI(1, inventory.DRA, "")), func(p *Plugins) {
		p.opts.Empty = func() []string {
			mu.Lock()
			defer mu.Unlock()
			return slices.Clone(empty)
		}
	})
	r.awaitHealthy(kubeadapter.GPUResource, 1)
	r.awaitEmpty("nvidia.com/mig-1g.10gb")
	ids := gpuIDs(0, 1)
	if r.listed(kubeadapter.GPUResource, ids[1]) != nil {
		t.Error("a GPU of the API dra is listed")
	}
	if _, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, ids[1]); err == nil || !strings.Contains(err.Error(), "offered through dra now") {
		t.Errorf("Allocate of a GPU of the API dra: %v", err)
	}
	r.src.Set(assigned(throughAPI(0, inventory.DevicePlugin, "to dra"), throughAPI(1, inventory.DRA, "")))
	r.awaitHealthy(kubeadapter.GPUResource, 0)
	if d := r.listed(kubeadapter.GPUResource, ids[0]); d == nil {
		t.Error("a GPU that moves is not listed")
	}
	if _, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, ids[0]); err == nil || !strings.Contains(err.Error(), "moves (to dra)") {
		t.Errorf("Allocate of a GPU that moves: %v", err)
	}
	r.src.Set(assigned(throughAPI(0, inventory.DRA, ""), throughAPI(1, inventory.DRA, "")))
	r.awaitEmpty(kubeadapter.GPUResource)
	mu.Lock()
	empty = append(empty, "nvidia.com/later")
	mu.Unlock()
	r.plugins.Refresh()
	r.awaitEmpty("nvidia.com/later")
	r.restartKubelet(true)
	for _, name := range []string{kubeadapter.GPUResource, "nvidia.com/mig-1g.10gb", "nvidia.com/later"} {
		r.awaitEmpty(name)
	}
	r.src.Set(assigned(throughAPI(0, inventory.DevicePlugin, "")))
	r.awaitHealthy(kubeadapter.GPUResource, 2)
}

// What a claim has prepared is not allocated, and the check is made under the lock that a Prepare holds: of both at once only one gets
// the GPU.
func TestAllocateRefusesWhatClaimsHave(t *testing.T) {
	var lock sync.Mutex
	claims := map[gpu.DeviceID]holders.Holder{}
	claim := func(n int) {
		claims[coretest.GPU(n)] = holders.Holder{API: inventory.DRA, Device: coretest.GPU(n), At: gpu.WholeGPU(coretest.GPU(n))}
	}
	read := true
	r := newRunning(t, 2, func(p *Plugins) {
		p.opts.Lock = &lock
		p.opts.ClaimHolders = func() holders.Record { // the lock is held
			return holders.Record{Holders: slices.Collect(maps.Values(claims)), Complete: read}
		}
	})
	ids := gpuIDs(0, 1)
	lock.Lock()
	claim(1)
	lock.Unlock()
	if _, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, ids[1]); err == nil || !strings.Contains(err.Error(), ids[1]+": a resource claim has it") {
		t.Errorf("%v", err)
	}
	lock.Lock()
	allocated := make(chan error, 1)
	go func() {
		_, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, ids[0])
		allocated <- err
	}()
	if held := r.holdersOn(gpu.WholeGPU(coretest.GPU(0))); len(held) > 0 {
		t.Errorf("%s have a GPU that is not allocated", held)
	}
	claim(0) // Prepare found it free, and records it
	lock.Unlock()
	if err := <-allocated; err == nil {
		t.Error("Allocate succeeded after Prepare")
	}
	lock.Lock()
	delete(claims, coretest.GPU(0))
	read = false
	lock.Unlock()
	if _, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, ids[0]); err == nil {
		t.Error("Allocate succeeded while the claims are not read")
	}
	lock.Lock()
	read = true
	lock.Unlock()
	if _, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, ids[0]); err != nil {
		t.Error(err)
	}
	if len(r.holdersOn(gpu.Placement{GPU: coretest.GPU(0), GI: 1, CI: 0})) == 0 {
		t.Error("an instance of an allocated GPU has no holder")
	}
}

// holdersOn are the pods that have, or may have, hardware through device plugins.
func (r *rig) holdersOn(at gpu.Placement) (names []string) {
	for h := range holders.NewSet(r.plugins.Holders()).On(at) {
		names = append(names, h.Work.String())
	}
	return names
}

// The list of claims has what a Prepare that has begun gives out, and the claims of all drivers.
func TestClaimsWaitForPrepare(t *testing.T) {
	var lock sync.Mutex
	r := newRunning(t, 2, func(p *Plugins) { p.opts.Lock = &lock })
	lock.Lock()
	answer := make(chan struct{})
	go func() { defer close(answer); r.plugins.Claims() }()
	select {
	case <-answer:
		t.Error("the list does not wait")
	case <-time.After(50 * time.Millisecond):
	}
	lock.Unlock()
	<-answer
}

// The record has pods by GPU and the list has claims; both are known only while the kubelet lists all pods.
func TestRecord(t *testing.T) {
	r, pods := newTracking(t)
	await := func(what string, n int, ok func(h holders.Record, by []string) bool) {
		t.Helper()
		check.Until(r, what, func() bool { h := r.plugins.Record(); return ok(h, h.On(coretest.GPU(n))) })
	}
	await("a free GPU", 0, func(h holders.Record, by []string) bool { return h.Complete && len(by) == 0 })
	r.allocate(pods, "default/a", kubeadapter.GPUResource, gpuIDs(0)...)
	await("a pod", 0, func(h holders.Record, by []string) bool {
		return h.Complete && slices.Equal(by, []string{"pod default/a"})
	})
	pods.Claim("default/b", "lost", "gpu.nvidia.com", strings.ToLower(string(coretest.GPU(0))))
	check.Until(r, "a claim", func() bool {
		claims, h := r.plugins.Claims()
		return h.Complete && len(h.Holders) == 0 && len(claims) == 1 && claims[0].Name == "lost" && claims[0].Pod == "default/b"
	})
	latest := r.plugins.pods.Latest()
	if h := completeAt(latest, time.Now().Add(2*answerAge)); h.Complete || h.Missing == "" {
		t.Errorf("an answer that is old: %+v", h)
	}
	latest.Err = errors.New("unavailable")
	if h := completeAt(latest, time.Now()); !h.Complete {
		t.Errorf("an answer of just now: %+v", h)
	}
}

// If the folder of the kubelet's socket is not mounted, the record is never known, and a forced move does not wait for it. One whose folder was
// there has shown holders, which stay.
func TestRecordWithoutTheFolder(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.startTracking(gpus(1))
	r.awaitHealthy(kubeadapter.GPUResource, 1)
	check.Until(r, "no record", func() bool { h := r.plugins.Record(); return h.First && h.Never && !h.Complete })
	pods, err := kubelettest.ServePodResources(r.podSocket())
	check.NoError(r, err)
	defer pods.Close()
	check.Until(r, "a record", func() bool { h := r.plugins.Record(); return h.Complete && !h.Never })
	pods.Close()
	check.NoError(r, os.RemoveAll(filepath.Dir(r.podSocket())))
	check.Until(r, "no folder", func() bool {
		r.plugins.pods.Request()
		return errors.Is(r.plugins.pods.Latest().Err, podresources.ErrNoDirectory)
	})
	if h := r.plugins.Record(); h.Never {
		t.Errorf("%+v", h)
	}
}

// What pods have through resource claims is as of the call: whoever asks twice, because a pod may have ended meanwhile, gets two answers.
func TestPodClaimsAreOfNow(t *testing.T) {
	r, pods := newTracking(t, func(t *tracking) { t.pods.MaxInterval, t.pods.Active = time.Hour, time.Nanosecond })
	for _, want := range []int{0, 1, 0} {
		if pods.Forget("default/train"); want == 1 {
			pods.Claim("default/train", "claim", "gpu.nvidia.com", "gpu-1")
		}
		claims, complete, err := r.plugins.PodClaims(r.ctx)
		check.NoError(r, err)
		if len(claims) != want || !complete {
			t.Errorf("%d claims, want %d; complete: %t", len(claims), want, complete)
		}
	}
}
