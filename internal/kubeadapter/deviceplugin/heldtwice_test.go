package deviceplugin

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/test/check"
)

// A device of a pod, by the kubelet's latest list and its answer about that pod now, is not allocated again. The error does not name the pod,
// the log does.
func TestADeviceIsNotAllocatedTwice(t *testing.T) {
	r, pods := newTracking(t)
	id := gpuIDs(1)[0]
	allocate := func() error { _, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, id); return err }
	check.NoError(r, allocate())
	check.NoError(r, allocate()) // a container after an init container of its pod: the list has none
	pods.Hold("default/first", kubeadapter.GPUResource, id)
	r.awaitPod(id, "default/first")
	err := allocate()
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "device ID "+id+": another pod has it") || strings.Contains(err.Error(), "default/first") {
		t.Errorf("second allocation: %v", err)
	}
	if s := r.plugins.Stats()[0]; s.AllocationErrors != 1 {
		t.Errorf("%+v", s)
	}
	if gets := pods.Gets(); gets != 1 {
		t.Errorf("%d pods asked for", gets)
	}
	_, err = r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, gpuIDs(0)...)
	check.NoError(r, err)
	pods.Forget("default/first")
	check.NoError(r, allocate())
}

// awaitPod waits until a pod is known to have a device.
func (r *rig) awaitPod(id, pod string) {
	r.Helper()
	k := deviceKey{kubeadapter.GPUResource, inventory.UnitID(id)}
	check.Until(r, "pod "+pod+" has "+id, func() bool { return slices.Contains(r.plugins.tracker.podsOf([]deviceKey{k}), pod) })
}

// A kubelet that does not answer keeps no pod waiting: the first time for a moment, and then, while it is known not to answer, not at all.
func TestAllocateWithoutAnswer(t *testing.T) {
	r, pods := newTracking(t, func(t *tracking) { t.pods.Query, t.pods.Get = 500*time.Millisecond, 50*time.Millisecond })
	id := gpuIDs(1)[0]
	r.allocate(pods, "default/first", kubeadapter.GPUResource, id)
	r.awaitPod(id, "default/first")
	pods.Hang(true)
	_, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, id)
	check.NoError(r, err)
	check.Until(r, "a reading without an answer", func() bool { return r.plugins.pods.Latest().Err != nil })
	asked := pods.Gets()
	_, err = r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, id)
	check.NoError(r, err)
	if pods.Gets() != asked {
		t.Error("the kubelet is asked")
	}
}

// The first of two calls at the same time gets the device.
func TestTwoAllocationsAtOnce(t *testing.T) {
	r := newRunning(t, 2)
	id := gpuIDs(0)[0]
	r.plugins.opts.Lock.Lock()
	errs := make(chan error, 2)
	for range 2 {
		go func() { _, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, id); errs <- err }()
	}
	check.Until(r, "both calls", func() bool { return r.plugins.pods.Calls() == 2 })
	r.plugins.opts.Lock.Unlock()
	if a, b := <-errs, <-errs; (a == nil) == (b == nil) {
		t.Errorf("%v, %v", a, b)
	}
	_, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, id)
	check.NoError(r, err) // a later one is of the same pod
}

// A running init container has its device: neither the kubelet's list nor its answer about the pod shows that, its checkpoint does. The device
// is free when a complete list and two versions of the checkpoint after it lack it.
func TestInitContainerHasItsDevice(t *testing.T) {
	r, pods := newTracking(t)
	id := gpuIDs(1)[0]
	_, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, id)
	check.NoError(r, err)
	pods.Hold("default/starts", "nvidia.com/other") // a container after the init container has no device
	init := kubelettest.Entry("uid-1", "init", kubeadapter.GPUResource, id)
	check.NoError(r, r.kubelet.Record(init))
	held := func() []string { return r.plugins.Record().On(coretest.GPU(1)) }
	check.Until(r, "the UID of the pod", func() bool {
		return slices.Equal(held(), []string{"the pod with UID uid-1"})
	})
	if len(r.holdersOn(gpu.WholeGPU(coretest.GPU(1)))) == 0 {
		t.Error("the device is free for a claim")
	}
	record, err := r.plugins.UseRecord(r.ctx, r.src.Current(), "")
	check.NoError(r, err)
	want := holders.Holder{Work: holders.Work{Orchestrator: holders.Kubernetes, ID: "uid-1", Container: "init"}, API: inventory.DevicePlugin, Resource: kubeadapter.GPUResource, Unit: inventory.UnitID(id), Device: coretest.GPU(1), At: gpu.WholeGPU(coretest.GPU(1))}
	if !record.Complete || !slices.Contains(record.Holders, want) {
		t.Errorf("%+v, want %+v", record, want)
	}
	r.src.Set(allElsewhere())
	r.awaitHealthy(h100, 1)
	for range 3 { // the kubelet writes it with each list of a plugin
		check.NoError(r, r.kubelet.Record(init))
		r.awaitQueries(pods)
		r.awaitListed(h100, id, v1beta1.Unhealthy)
	}
	pods.Forget("default/starts")
	check.NoError(r, r.kubelet.Record()) // and again with the lists that the agent sends for this purpose
	r.awaitHealthy(h100, 2)
	if by := held(); len(by) != 0 {
		t.Errorf("held by %v", by)
	}
}

// The pod of a container has ended when the kubelet that listed it lists it no more, also while its checkpoint still has it. Another kubelet may
// not have received the pod: then the checkpoint counts.
func TestEndOfAPod(t *testing.T) {
	r, pods := newTracking(t)
	id := gpuIDs(1)[0]
	free := func() bool { return len(r.plugins.Record().On(coretest.GPU(1))) == 0 }
	has := kubelettest.Entry("uid-1", "main", kubeadapter.GPUResource, id)
	check.NoError(r, r.kubelet.Record(has))
	r.allocate(pods, "default/one", kubeadapter.GPUResource, id)
	r.awaitPod(id, "default/one")
	pods.Forget("default/one")
	check.Until(r, "the end of the pod", free)
	check.NoError(r, r.kubelet.Record(has)) // an old content, as the kubelet has not looked at its pods
	r.awaitQueries(pods)
	if !free() {
		t.Error("what the checkpoint still has counts again")
	}
	check.NoError(r, r.kubelet.Record(kubelettest.Entry("uid-2", "main", kubeadapter.GPUResource, id)))
	check.Until(r, "another pod in the checkpoint", func() bool { r.plugins.pods.Request(); return !free() })

	pods.Hold("default/two", kubeadapter.GPUResource, id)
	r.awaitPod(id, "default/two")
	pods.Close() // the kubelet restarts, while the API server does not respond
	next, err := kubelettest.ServePodResources(r.podSocket())
	check.NoError(r, err)
	defer next.Close()
	r.plugins.pods.Request()
	r.awaitQueries(next)
	if free() {
		t.Error("free, although only the new kubelet does not list the pod")
	}
	check.NoError(r, r.kubelet.Record())
	check.Until(r, "the checkpoint without it", free)
}

// Devices that a pod has, or may have, are preferred last. If the others are too few, the kubelet's records are read before.
func TestPreferenceAvoidsDevicesOfPods(t *testing.T) {
	r, pods := newPodRig(t)
	r.startTracking(gpus(4), func(t *tracking) {
		t.pods.MinInterval, t.pods.MaxInterval, t.pods.Active = time.Hour, time.Hour, time.Nanosecond
	})
	r.awaitHealthy(kubeadapter.GPUResource, 4)
	check.Until(r, "the only reading in the background, after that at the start", func() bool { return pods.Lists() == 2 })
	id := gpuIDs(0, 1, 2, 3)
	prefer := func(size int, available ...string) []string {
		t.Helper()
		got, err := r.kubelet.Prefer(r.ctx, kubeadapter.GPUResource, available, nil, size)
		check.NoError(r, err)
		return slices.Sorted(slices.Values(got))
	}
	r.allocate(pods, "default/first", kubeadapter.GPUResource, id[0])
	r.plugins.pods.Read(r.ctx)
	r.awaitPod(id[0], "default/first")
	check.NoError(r, r.kubelet.Record(kubelettest.Entry("uid-1", "init", kubeadapter.GPUResource, id[1])))
	_, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, id[1])
	check.NoError(r, err)
	for _, c := range []struct {
		size      int
		available []string
		want      []string
	}{
		{1, id, nil}, {2, id, id[2:]}, {1, id[:3], id[2:3]}, {2, id[:3], id[1:3]}, {1, id[:2], id[1:2]}, {3, id[:3], id[:3]}, {1, id[:1], id[:1]},
	} {
		if got := prefer(c.size, c.available...); !slices.Equal(got, c.want) && c.want != nil || slices.Contains(got, id[0]) && len(c.available) > 1 && c.size < 3 {
			t.Errorf("%d of %v: %v, want %v", c.size, c.available, got, c.want)
		}
	}
	pods.Forget("default/first") // and the next pod comes at once
	lists := pods.Lists()
	if got := prefer(1, id[:2]...); !slices.Equal(got, id[:1]) || pods.Lists() != lists+1 {
		t.Errorf("%v after %d lists, want the device of the pod that has ended", got, pods.Lists()-lists)
	}
}

// BenchmarkAllocateAgain allocates a GPU that a pod had, on a node with a hundred pods: the kubelet is asked about that pod.
func BenchmarkAllocateAgain(b *testing.B) {
	socket := filepath.Join(b.TempDir(), "pods", "kubelet.sock")
	pods, err := kubelettest.ServePodResources(socket)
	check.NoError(b, err)
	defer pods.Close()
	for i := range 100 {
		pods.Hold(fmt.Sprintf("default/pod-%d", i), kubeadapter.GPUResource, fmt.Sprintf("other-%d", i))
	}
	pods.Hold("default/had", kubeadapter.GPUResource, gpuIDs(2)...)
	src := coretest.NewSource()
	src.Set(gpus(8))
	s := newServer(kubeadapter.GPUResource, src, podresources.New(podresources.Options{Socket: socket, Log: slog.New(slog.DiscardHandler)}))
	s.tracker.setInventory(src.Current())
	s.tracker.apply(s.tracker.pods.Read(b.Context()))
	pods.Forget("default/had")
	client, r := serveSocket(b, s), allocateRequest(gpuIDs(2))
	had := s.tracker.allocations.byKey[deviceKey{kubeadapter.GPUResource, inventory.UnitID(gpuIDs(2)[0])}]
	for b.Loop() {
		s.tracker.mu.Lock()
		s.tracker.allocations.byKey[deviceKey{kubeadapter.GPUResource, inventory.UnitID(gpuIDs(2)[0])}] = had
		s.tracker.mu.Unlock()
		if _, err := client.Allocate(b.Context(), r); err != nil {
			b.Fatal(err)
		}
	}
}
