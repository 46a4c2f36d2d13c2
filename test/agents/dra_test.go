package agents

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const draNode = "node-1"

// draAgent is k8s-gpu with the API dra, its API server and the kubelet's side of the driver.
type draAgent struct {
	*agent
	api  *kubeapitest.Server
	pods *kubelettest.PodResources
}

// newDRAAgent returns one that is not started. The kubelet has its folder; the Node has a container runtime with CDI.
func newDRAAgent(t *testing.T, node, file string) *draAgent {
	t.Helper()
	a := newAgentWithFile(t, node, file)
	d := &draAgent{agent: a, api: kubeapitest.Start(t)}
	socket := filepath.Join(a.dir, "pods.sock")
	var err error
	d.pods, err = kubelettest.ServePodResources(socket)
	a.must(err)
	t.Cleanup(d.pods.Close)
	for key, value := range map[string]any{
		"api": "dra", "node_name": draNode, "kube_api": d.api.URL, "kubelet_dir": a.dir, "cdi_dir": filepath.Join(a.dir, "cdi"), "cdi_disable_hooks": "all",
		"pod_resources_socket": socket,
	} {
		a.settings[key] = value
	}
	a.must(os.Mkdir(filepath.Join(a.dir, "cdi"), 0o755), os.Mkdir(d.registry(), 0o755))
	d.putNode("containerd://2.4.2")
	d.givenToDRA()
	return d
}

// givenToDRA records that the GPUs have come to this API before: otherwise the agent waits for half a minute whether pods have them through
// device plugins.
func (d *draAgent) givenToDRA() {
	d.Helper()
	gpus := map[gpu.DeviceID]inventory.API{}
	slots, err := d.driver.Slots()
	d.must(err)
	for _, slot := range slots {
		gpus[gpu.DeviceID(d.driver.UUID(slot))] = inventory.DRA
	}
	d.must(os.MkdirAll(d.state, 0o700), ownership.Write(d.state, ownership.File{LocalAPIs: map[string]map[gpu.DeviceID]inventory.API{k8sGPU: gpus}}))
}

func (d *draAgent) registry() string { return filepath.Join(d.dir, "plugins_registry") }

func (d *draAgent) putNode(runtime string, resources ...string) {
	n := kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: draNode}, Status: kubeapi.NodeStatus{Capacity: map[string]string{"cpu": "2"}}}
	n.Status.NodeInfo = kubeapi.NodeSystemInfo{ContainerRuntimeVersion: runtime, KubeletVersion: "v1.37.1"}
	for _, r := range resources {
		n.Status.Capacity[r] = "0"
	}
	d.api.PutNode(n)
}

// sockets are the agent's in the kubelet's folder.
func (d *draAgent) sockets() []string {
	paths, err := filepath.Glob(filepath.Join(d.registry(), dra.SocketPrefix+"*"))
	d.must(err)
	return paths
}

// dial connects to the agent's socket, as the kubelet does when it finds one.
func (d *draAgent) dial() *grpc.ClientConn {
	d.Helper()
	d.await("the socket of the driver", func() bool { return len(d.sockets()) == 1 })
	conn, err := grpc.NewClient("unix:"+d.sockets()[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	d.must(err)
	d.Cleanup(func() { _ = conn.Close() })
	return conn
}

// register registers the driver, and returns it.
func (d *draAgent) register() drav1.DRAPluginClient {
	d.Helper()
	conn := d.dial()
	ctx, cancel := context.WithTimeout(d.Context(), timeout)
	defer cancel()
	info, err := registration.NewRegistrationClient(conn).GetInfo(ctx, &registration.InfoRequest{}, grpc.WaitForReady(true))
	d.must(err)
	if info.GetName() != resourceslice.Driver || info.GetType() != registration.DRAPlugin {
		d.Errorf("%+v", info)
	}
	_, err = registration.NewRegistrationClient(conn).NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{PluginRegistered: true})
	d.must(err)
	return drav1.NewDRAPluginClient(conn)
}

// devices are those in the slices, with their taints.
func (d *draAgent) devices() map[string][]string {
	all := map[string][]string{}
	for _, s := range d.api.Slices() {
		for _, one := range s.Spec.Devices {
			all[one.Name] = []string{}
			for _, t := range one.Taints {
				all[one.Name] = append(all[one.Name], t.Key+":"+string(t.Effect))
			}
		}
	}
	return all
}

// published waits until the slices have so many devices, so many of them with a taint.
func (d *draAgent) published(all, tainted int) {
	d.Helper()
	d.await("devices in slices", func() bool {
		devices, n := d.devices(), 0
		for _, taints := range devices {
			n += min(len(taints), 1)
		}
		return len(devices) == all && n == tainted && (all > 0 || len(d.api.Slices()) == 0)
	})
}

func (d *draAgent) name(slot int) string { return strings.ToLower(d.driver.UUID(slot)) }

// claim makes a claim that the scheduler has given a GPU.
func (d *draAgent) claim(name string, slot int) *drav1.Claim {
	c := kubeapi.ResourceClaim{Metadata: kubeapi.ObjectMeta{Namespace: "team", Name: name, UID: "uid-" + name}}
	c.Status.Allocation = &kubeapi.AllocationResult{Devices: kubeapi.DeviceAllocationResult{Results: []kubeapi.DeviceRequestAllocationResult{
		{Request: "gpu", Driver: resourceslice.Driver, Pool: draNode, Device: d.name(slot)},
	}}}
	d.api.PutClaim(c)
	return &drav1.Claim{Namespace: "team", Name: name, Uid: c.Metadata.UID}
}

// prepare calls NodePrepareResources for one claim and returns its CDI names, or the error.
func (d *draAgent) prepare(driver drav1.DRAPluginClient, c *drav1.Claim) (names []string, problem string) {
	d.Helper()
	ctx, cancel := context.WithTimeout(d.Context(), timeout)
	defer cancel()
	r, err := driver.NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{Claims: []*drav1.Claim{c}}, grpc.WaitForReady(true))
	d.must(err)
	one := r.GetClaims()[c.GetUid()]
	for _, device := range one.GetDevices() {
		names = append(names, device.GetCdiDeviceIds()...)
	}
	return names, one.GetError()
}

func (d *draAgent) unprepare(driver drav1.DRAPluginClient, c *drav1.Claim) {
	d.Helper()
	r, err := driver.NodeUnprepareResources(d.Context(), &drav1.NodeUnprepareResourcesRequest{Claims: []*drav1.Claim{c}})
	d.must(err)
	if text := r.GetClaims()[c.GetUid()].GetError(); text != "" || r.GetClaims()[c.GetUid()] == nil {
		d.Errorf("unprepare: %q", text)
	}
}

// A claim is prepared, operators see it with the same words as the taint's cause, a change of the policy changes the slices, and the end
// leaves them (case 4 of what a driver must do at SIGTERM).
func TestDRAClaim(t *testing.T) {
	t.Parallel()
	d := newDRAAgent(t, "h100x8", header)
	d.start()
	driver := d.register()
	d.published(8, 0)
	d.ready(200, "DRA driver gpu.nvidia.com is registered with the kubelet; 8 devices in 1 ResourceSlices")

	claim := d.claim("train", 2)
	names, problem := d.prepare(driver, claim)
	if want := []string{"k8s.device-plugin.nvidia.com/gpu=" + d.driver.UUID(2)}; problem != "" || !slices.Equal(names, want) {
		t.Fatalf("%v, %q; want %v", names, problem, want)
	}
	text, err := os.ReadFile(filepath.Join(d.dir, "cdi", "k8s.device-plugin.nvidia.com-gpu.json"))
	if d.must(err); !strings.Contains(string(text), d.driver.UUID(2)) || !strings.Contains(string(text), "NVIDIA_VISIBLE_DEVICES=void") {
		t.Errorf("the specification lacks the device, or containers may see others: %s", text)
	}
	if again, problem := d.prepare(driver, claim); problem != "" || !slices.Equal(again, names) {
		t.Errorf("the second time: %v, %q", again, problem)
	}
	if _, problem := d.prepare(driver, d.claim("second", 2)); !strings.Contains(problem, "held by other work") {
		t.Errorf("a second claim on the GPU: %q", problem)
	}

	d.xid(2, 79)
	d.published(8, 1)
	d.await("the report of the fault", func() bool { return len(d.report().Devices[2].Taints) > 0 })
	r := d.report()
	faulty := r.Devices[2]
	if r.DRA == nil || len(r.DRA.Claims) != 1 || r.DRA.Claims[0].Name != "train" || r.DRA.Claims[0].Since.IsZero() || r.DRA.Published != 8 {
		t.Errorf("%+v", r.DRA)
	}
	if faulty.API != "dra" || !slices.Equal(faulty.SliceDevices, []string{d.name(2)}) || faulty.Taints[0].Key != "gpu.nvidia.com/xid" || faulty.Taints[0].Value != "79" {
		t.Errorf("%+v", faulty)
	}
	d.metrics("tandem_dra_prepared_claims 1", "tandem_dra_slice_devices 8", "tandem_dra_registered 1", "tandem_dra_api_reachable 1",
		`tandem_dra_request_errors_total{method="NodePrepareResources"} 1`, `tandem_dra_slice_writes_total{result="ok",verb="create"} 1`)
	d.prints("claim team/train: GPU 2, prepared since", "inspect")
	d.prints("the first that fit, in the order in which they are listed", "explain", "--count=2")
	if _, page := d.get("/metrics"); strings.Contains(page, "tandem_kubelet_connected{") {
		t.Error("a device plugin that nothing needs counts as not connected")
	}

	d.unprepare(driver, claim)
	d.reload(header+"policy: {rules: [{select: {index: 7}, use: reserved}]}", applied)
	d.published(7, 1)
	before := d.api.Slices()
	d.terminate(syscall.SIGTERM)
	if left := d.sockets(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if after := d.api.Slices(); len(after) != len(before) || after[0].Metadata.ResourceVersion != before[0].Metadata.ResourceVersion {
		t.Error("the slices were changed at the end")
	}
}

// Nothing that the agent needs is there when it starts; each comes later.
func TestDRAStartsWithoutAnything(t *testing.T) {
	t.Parallel()
	d := newDRAAgent(t, "t4", header)
	d.settings["rescan"] = "1s"
	d.must(os.Remove(d.registry()), d.driver.Hang(simdriver.GPU(0), "*"))
	d.api.SetDown(true)
	d.start()
	d.await("the HTTP server", func() bool { code, _ := d.get("/healthz"); return code == 200 })
	d.ready(503, "DRA driver gpu.nvidia.com: ")
	d.must(os.Mkdir(d.registry(), 0o755))
	driver := d.register()
	d.unprepare(driver, &drav1.Claim{Namespace: "team", Name: "gone", Uid: "uid-gone"}) // without API server and driver
	d.ready(503, "ResourceSlices: ")
	d.metrics("tandem_dra_api_reachable 0", "tandem_dra_registered 1")
	d.alive()
	d.api.SetDown(false)
	d.must(d.driver.Heal())
	d.published(1, 0)
	d.ready(200, "1 devices in 1 ResourceSlices")
	d.terminate(syscall.SIGTERM)
}

// With device plugins the driver runs on as long as pods have claims: their end needs it. The GPU of a claim goes to no pod of a device
// plugin before (case 45).
func TestDRAClaimsOutliveTheAPI(t *testing.T) {
	t.Parallel()
	d := newDRAAgent(t, "h100x8", header+"api: dra\n")
	delete(d.settings, "api")
	d.start()
	driver := d.register()
	d.published(8, 0)
	claim := d.claim("train", 2)
	if _, problem := d.prepare(driver, claim); problem != "" {
		t.Fatal(problem)
	}
	first := d.sockets()
	d.reload(header+"api: device-plugin\n", restarts)
	d.await("the socket of the next run", func() bool { return len(d.sockets()) == 1 && !slices.Equal(d.sockets(), first) })
	driver = d.register()
	if names, problem := d.prepare(driver, claim); problem != "" || len(names) != 1 {
		t.Errorf("the claim is not known any more: %v, %q", names, problem)
	}
	d.registered(1)
	if _, err := d.kubelet.Allocate(t.Context(), resource, d.driver.UUID(2)); err == nil {
		t.Error("the GPU of a claim was allocated")
	}
	d.unprepare(driver, claim)
}

// A kubelet that connects a hundred times leaves nothing behind in the agent: goroutines and memory stay (case 53).
func TestDRAReconnects(t *testing.T) {
	t.Parallel()
	d := newDRAAgent(t, "t4", header)
	d.start()
	d.register()
	d.published(1, 0)
	connect := func(times int) {
		for range times {
			conn := d.dial()
			ctx, cancel := context.WithTimeout(d.Context(), timeout)
			stream, err := health.NewDRAResourceHealthClient(conn).NodeWatchResources(ctx, &health.NodeWatchResourcesRequest{}, grpc.WaitForReady(true))
			d.must(err)
			_, err = stream.Recv()
			d.must(err)
			_, err = registration.NewRegistrationClient(conn).GetInfo(ctx, &registration.InfoRequest{})
			d.must(err)
			cancel()
			d.must(conn.Close())
		}
	}
	goroutines := func() int {
		var now report.Debug
		out, err := d.command("debug", "--json")
		d.must(err, json.Unmarshal([]byte(out), &now))
		return now.Goroutines
	}
	connect(10)
	d.metrics("tandem_dra_health_streams 0")
	before, memory := goroutines(), d.peakMemory()
	connect(100)
	d.metrics("tandem_dra_health_streams 0")
	d.await("the goroutines of before", func() bool { return goroutines() <= before+3 }) // requests of this test come and go
	if grown := d.peakMemory() - memory; grown > 4<<20 {
		t.Errorf("the peak of the memory grew by %d kB", grown>>10)
	}
	t.Logf("%d goroutines before, %d after; peak %d kB before, %d kB after", before, goroutines(), memory>>10, d.peakMemory()>>10)
}
