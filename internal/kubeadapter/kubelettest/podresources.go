package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// PodResources is a server of the kubelet's pod-resources API. Its methods are safe for concurrent use.
type PodResources struct {
	podresources.UnimplementedPodResourcesListerServer
	server *grpc.Server
	served sync.WaitGroup

	mu          sync.Mutex
	pods        map[string][]*podresources.ContainerDevices // by "namespace/name"
	claims      map[string][]*podresources.DynamicResource  // by "namespace/name"
	allocatable []*podresources.ContainerDevices            // see Offer
	fail        error
	hang        bool
	before      func() // called before an answer; nil = nothing
	lists       int
	gets        int
}

// ServePodResources serves the API until Close, as a kubelet that started an hour ago and has received all pods. There is one
// pod, which holds no device.
func ServePodResources(socket string) (*PodResources, error) {
	if err := os.MkdirAll(filepath.Dir(socket), 0o750); err != nil {
		return nil, err
	}
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", socket)
	if err != nil {
		return nil, err
	}
	started := time.Now().Add(-time.Hour)
	if err := os.Chtimes(socket, started, started); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	p := &PodResources{server: grpc.NewServer(), pods: map[string][]*podresources.ContainerDevices{"kube-system/agent": nil}}
	p.claims = map[string][]*podresources.DynamicResource{}
	podresources.RegisterPodResourcesListerServer(p.server, p)
	p.served.Go(func() { _ = p.server.Serve(l) })
	return p, nil
}

// Close ends the server and removes its socket.
func (p *PodResources) Close() {
	p.server.Stop()
	p.served.Wait()
}

// Hold adds devices on NUMA node 0 to a pod, which it creates if necessary.
func (p *PodResources) Hold(pod, resource string, ids ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pods[pod] = append(p.pods[pod], onNode(resource, 0, ids))
}

// Offer adds devices of a NUMA node to those that the kubelet may allocate: the healthy ones that a device plugin lists.
func (p *PodResources) Offer(resource string, numaNode int64, ids ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.allocatable = append(p.allocatable, onNode(resource, numaNode, ids))
}

func onNode(resource string, numaNode int64, ids []string) *podresources.ContainerDevices {
	return &podresources.ContainerDevices{
		ResourceName: resource, DeviceIds: ids, Topology: &podresources.TopologyInfo{Nodes: []*podresources.NUMANode{{ID: numaNode}}},
	}
}

// Claim adds a device that a driver of resource claims gave to a pod.
func (p *PodResources) Claim(pod, name, driver, device string, cdi ...string) {
	r := &podresources.ClaimResource{DriverName: driver, PoolName: "node", DeviceName: device}
	for _, c := range cdi {
		r.CdiDevices = append(r.CdiDevices, &podresources.CDIDevice{Name: c})
	}
	namespace, _, _ := strings.Cut(pod, "/")
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.pods[pod]; !ok {
		p.pods[pod] = nil
	}
	p.claims[pod] = append(p.claims[pod], &podresources.DynamicResource{
		ClaimName: name, ClaimNamespace: namespace, ClaimResources: []*podresources.ClaimResource{r},
	})
}

// Forget removes pods.
func (p *PodResources) Forget(pods ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range pods {
		delete(p.pods, name)
		delete(p.claims, name)
	}
}

// Fail sets the error of List and Get; nil = none.
func (p *PodResources) Fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail = err
}

// Hang sets whether List and Get block until the client cancels.
func (p *PodResources) Hang(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hang = on
}

// BeforeAnswers sets what is called before each answer; nil = nothing.
func (p *PodResources) BeforeAnswers(do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.before = do
}

// Lists returns the number of List calls.
func (p *PodResources) Lists() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lists
}

// Gets returns the number of Get calls.
func (p *PodResources) Gets() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gets
}

// List implements the API.
func (p *PodResources) List(ctx context.Context, _ *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	p.mu.Lock()
	p.lists++
	r := &podresources.ListPodResourcesResponse{}
	for _, name := range slices.Sorted(maps.Keys(p.pods)) {
		r.PodResources = append(r.PodResources, p.pod(name))
	}
	p.mu.Unlock()
	return r, p.answer(ctx)
}

// Get implements the API.
func (p *PodResources) Get(ctx context.Context, r *podresources.GetPodResourcesRequest) (*podresources.GetPodResourcesResponse, error) {
	p.mu.Lock()
	p.gets++
	name := r.GetPodNamespace() + "/" + r.GetPodName()
	_, known := p.pods[name]
	response := &podresources.GetPodResourcesResponse{PodResources: p.pod(name)}
	p.mu.Unlock()
	if err := p.answer(ctx); err != nil {
		return nil, err
	}
	if !known {
		return nil, fmt.Errorf("pod %s in namespace %s not found", r.GetPodName(), r.GetPodNamespace())
	}
	return response, nil
}

// GetAllocatableResources implements the API.
func (p *PodResources) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return &podresources.AllocatableResourcesResponse{Devices: slices.Clone(p.allocatable)}, p.fail
}

// pod is a pod as the API shows it. The caller holds mu.
func (p *PodResources) pod(name string) *podresources.PodResources {
	namespace, short, _ := strings.Cut(name, "/")
	return &podresources.PodResources{
		Namespace: namespace, Name: short,
		Containers: []*podresources.ContainerResources{{Name: "main", Devices: slices.Clone(p.pods[name]), DynamicResources: slices.Clone(p.claims[name])}},
	}
}

// answer hangs or fails as the test has set it.
func (p *PodResources) answer(ctx context.Context) error {
	p.mu.Lock()
	hang, fail, before := p.hang, p.fail, p.before
	p.mu.Unlock()
	if before != nil {
		before()
	}
	if hang {
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	}
	return fail
}
