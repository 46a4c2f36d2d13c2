package dra

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// backedPod makes a pod whose extended resource the scheduler has served by a claim.
func (b *bothNode) backedPod(name string, device string) *v1.Pod {
	c := claim(name+"-extended-resources", result("container-0-request-0", device))
	p := b.pod(name, c)
	p.Spec.ResourceClaims, p.Status.ResourceClaimStatuses = nil, nil
	p.Spec.Containers = b.extendedPod(name, 1).Spec.Containers
	p.Status.ExtendedResourceClaimStatus = &v1.PodExtendedResourceClaimStatus{
		ResourceClaimName: c.Name,
		RequestMappings:   []v1.ContainerExtendedResourceRequest{{ContainerName: "app", ResourceName: extended, RequestName: "container-0-request-0"}},
	}
	return p
}

// A node that had a device plugin: its kubelet still has the name in its checkpoint, and would start no container that has the name by
// DRA, five minutes after the plugin's end. An endpoint with an empty list prevents that.
func TestCase43NodeWithADevicePluginPast(t *testing.T) {
	if !pastForgiven {
		t.Skip("kubelets of 1.34 take a name that had a device plugin from none but that, and the scheduler sends no pod with a claim for it")
	}
	t.Parallel()
	b := newBothNode(t, "h100x8")
	b.startKubelets()
	a := b.startAgentOf("device-plugin")
	b.awaitCapacity(8, 8)
	past := b.extendedPod("past", 2)
	b.Must(b.allocate(past))
	b.End(a, syscall.SIGTERM)
	b.removePod(past)
	b.api.setCapacity(extended, 8)

	b.startAgentOf("dra")
	b.awaitCapacity(0, 0) // an empty list; an endpoint that has ended would be 8 and 0
	b.kubelet.awaitRegistered(t)
	b.awaitDevices(8)
	p := b.backedPod("backed", deviceName(b.UUIDs()[0]))
	names := b.run(p)
	for range 3 {
		b.mustResolve(names)
		if _, err := b.devices.GetDeviceRunContainerOptions(t.Context(), p, &p.Spec.Containers[0]); err != nil {
			t.Errorf("start of a container: %v", err)
		}
		b.stopKubelets()
		b.startKubelets()
		b.awaitCapacity(0, 0)
		b.kubelet.awaitRegistered(t)
	}
	if grace := os.Getenv("TANDEM_ENDPOINT_GRACE"); grace != "" { // 6m: the kubelet's constant is five minutes
		d, err := time.ParseDuration(grace)
		b.Must(err)
		sleep(t, d)
		if _, err := b.devices.GetDeviceRunContainerOptions(t.Context(), p, &p.Spec.Containers[0]); err != nil {
			t.Errorf("start of a container after %v: %v", d, err)
		}
	}
	b.Must(b.finish(p))
}

// setCapacity writes a resource into the node's status.
func (s *apiServer) setCapacity(name v1.ResourceName, count int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.node = s.node.DeepCopy()
	s.node.Status.Capacity = v1.ResourceList{name: *resource.NewQuantity(count, resource.DecimalSI)}
}

// The scheduler serves a name by DRA where the node's allocatable is 0, else by the device plugin. So the agent lists GPUs in one of
// the two only, whatever ends and fails.
func TestCase44OneGPUThroughOneAPI(t *testing.T) {
	t.Parallel()
	b := newBothNode(t, "h100x8")
	b.startKubelets()
	b.api.setCapacity(extended, 8)
	watch := func(wrong func() string) (stop func()) {
		end, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			tick := time.NewTicker(2 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					if text := wrong(); text != "" {
						t.Error(text)
						return
					}
				case <-end:
					return
				}
			}
		}()
		return func() { close(end); <-ended }
	}

	b.recordAPI(inventory.DRA)
	began := time.Now()
	a := b.startAgentOf("dra", quick...)
	b.kubelet.awaitRegistered(t)
	b.awaitDevices(8)
	devices := b.devices
	stop := watch(func() string {
		if c, n, _ := devices.GetCapacity(b.logger); !c.Name(extended, resource.DecimalSI).IsZero() || !n.Name(extended, resource.DecimalSI).IsZero() {
			return "the device plugin lists GPUs that DRA offers"
		}
		return ""
	})
	b.End(a, syscall.SIGKILL)
	a = b.startAgentOf("dra", quick...)
	b.kubelet.awaitRegistrations(t, 2)
	for i := range 8 {
		b.Sim("lose", string(rune('0'+i)))
	}
	b.awaitTaint(deviceName(b.UUIDs()[7]), true)
	for i := range 8 {
		b.Sim("restore", string(rune('0'+i)))
	}
	b.awaitTaint(deviceName(b.UUIDs()[7]), false)
	stop()
	t.Logf("DRA only: %v", since(began))
	b.End(a, syscall.SIGTERM)

	// The other way: what DRA has published is taken back before the device plugin lists anything.
	b.recordAPI(inventory.DevicePlugin) // nothing moves
	stop = watch(func() string {
		_, allocatable := b.capacity() // first: slices that are there later were there then
		if all, _, _ := b.api.state(); allocatable > 0 && len(devicesOf(t, all)) > 0 && !allTainted(all) {
			return "both list GPUs: " + describe(all)
		}
		return ""
	})
	b.startAgentOf("device-plugin")
	b.awaitCapacity(8, 8)
	t.Logf("listed by the device plugin: %v", since(began))
	b.api.await("no slices", func(all []*resourceapi.ResourceSlice) bool { return len(devicesOf(t, all)) == 0 })
	stop()
}

func allTainted(all []*resourceapi.ResourceSlice) bool {
	for _, slice := range all {
		for _, d := range slice.Spec.Devices {
			if len(d.Taints) == 0 {
				return false
			}
		}
	}
	return true
}

// Another agent on this node has a GPU: a file in the state directory that both have.
func TestCase46GPUOfTheNomadAgent(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	gpu := n.UUIDs()[0]
	n.nomadRecords(gpu)
	n.awaitTaint(deviceName(gpu), true)
	c := claim("contested", result("gpu", deviceName(gpu)))
	n.api.putClaim(c)
	answer, err := n.call(request(c))
	n.Must(err)
	if text := answer[string(c.UID)].GetError(); !strings.Contains(text, "nomad") {
		t.Errorf("%q", text)
	} else {
		t.Logf("%s; taint %v", text, n.taints(deviceName(gpu)))
	}
}

// nomadRecords writes the file of a nomad-gpu that runs and that came first, for one GPU.
func (n *node) nomadRecords(gpu string) {
	n.Helper()
	dir := filepath.Join(n.stateDir, "agents")
	text, err := json.Marshal(map[string]any{
		"version": 2, "agent": "nomad-gpu", "bootID": strings.TrimSpace(n.Read(filepath.Join(n.Root, "proc/sys/kernel/random/boot_id"))),
		"started": time.Now().Add(-time.Hour), "devices": []map[string]any{{"gpu": gpu, "order": 0, "since": time.Now().Add(-time.Hour)}},
	})
	n.Must(err)
	lock, err := os.Create(filepath.Join(dir, "nomad-gpu.lock"))
	n.Must(err)
	n.Cleanup(func() { _ = lock.Close() })
	n.Must(syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))
	n.Must(os.WriteFile(filepath.Join(dir, "nomad-gpu.json"), text, 0o644))
}
