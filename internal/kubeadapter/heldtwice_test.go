package kubeadapter

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
)

// A device that a pod has by the kubelet's list is not allocated again, and the kubelet is asked for that only if it was allocated before.
func TestADeviceIsNotAllocatedTwice(t *testing.T) {
	r, pods := newTracking(t)
	id := gpuIDs(1)[0]
	allocate := func() error { _, err := r.kubelet.Allocate(r.ctx, GPUResource, id); return err }
	r.must(allocate())
	r.must(allocate()) // a container after an init container of its pod: the list has none
	pods.Hold("default/first", GPUResource, id)
	err := allocate()
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "device ID "+id+": pod default/first has it") {
		t.Errorf("second allocation: %v", err)
	}
	if s := r.adapter.Stats()[0]; s.AllocationErrors != 1 {
		t.Errorf("%+v", s)
	}
	_, err = r.kubelet.Allocate(r.ctx, GPUResource, gpuIDs(0)...)
	r.must(err)
	pods.Forget("default/first")
	r.must(allocate())
}

// A kubelet that does not list its pods keeps no pod waiting: the first time for a moment, and then, while it is known not to answer, not at all.
func TestAllocateWithoutTheListOfPods(t *testing.T) {
	r, pods := newTracking(t)
	id := gpuIDs(1)[0]
	r.allocate(pods, "default/first", GPUResource, id)
	pods.Hang(true)
	_, err := r.kubelet.Allocate(r.ctx, GPUResource, id)
	r.must(err)
	tracker := r.adapter.tracker
	tracker.requestQuery()
	r.await("a query without an answer", func() bool {
		tracker.mu.Lock()
		defer tracker.mu.Unlock()
		return tracker.unavailable
	})
	if tracker.allocatedBefore([]deviceKey{{GPUResource, inventory.UnitID(id)}}) {
		t.Error("the kubelet is asked")
	}
}

// BenchmarkAllocateAgain allocates a GPU that was allocated before, on a node with a hundred pods: the kubelet lists them.
func BenchmarkAllocateAgain(b *testing.B) {
	socket := filepath.Join(b.TempDir(), "pods", "kubelet.sock")
	pods, err := kubelettest.ServePodResources(socket)
	if err != nil {
		b.Fatal(err)
	}
	defer pods.Close()
	for i := range 100 {
		pods.Hold(fmt.Sprintf("default/pod-%d", i), GPUResource, fmt.Sprintf("other-%d", i))
	}
	s := strategyServer(GPUResource, coretest.GPUs(8), core.DefaultConfig(), []string{"envvar"})
	s.tracker.socket = socket
	client, r := serveSocket(b, s), allocateRequest(gpuIDs(2))
	for b.Loop() {
		if _, err := client.Allocate(b.Context(), r); err != nil {
			b.Fatal(err)
		}
	}
}
