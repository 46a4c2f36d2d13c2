package deviceplugin

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/test/check"
)

// Device nodes are given beside a list for NVIDIA's container runtime only; the control nodes are those that the agent sees under the
// dev root, and have the paths of the host.
func TestDeviceNodes(t *testing.T) {
	for set, want := range map[string][]string{
		"envvar":          {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia0", "/dev/nvidiactl"},
		"envvar cdi-cri":  {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia0", "/dev/nvidiactl"},
		"cdi-cri":         nil,
		"cdi-annotations": nil,
	} {
		s := coretest.GPUs(1)
		c := core.DefaultConfig()
		c.Injection.Nodes = true
		srv := strategyServer(kubeadapter.GPUResource, s, c, strings.Fields(set))
		srv.opts.DevRoot = "/run/nvidia/driver"
		var got []string
		for _, d := range allocated(t, srv, gpuIDs(0)...).GetDevices() {
			if d.GetHostPath() != "/run/nvidia/driver"+d.GetContainerPath() || d.GetPermissions() != "rw" {
				t.Errorf("%s: %v", set, d)
			}
			got = append(got, d.GetContainerPath())
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: nodes %v, want %v", set, got, want)
		}
	}
}

// GPUDirect Storage, MOFED, GDRCopy and the variables of MPS are given with each strategy; the CDI names of the former and of an IMEX
// channel are those that the specification has.
func TestFeatures(t *testing.T) {
	others := []string{"k8s.device-plugin.nvidia.com/imex-channel=0", "k8s.device-plugin.nvidia.com/gdrcopy=all", "k8s.device-plugin.nvidia.com/gds=all"}
	features := map[string]string{"NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled", "NVIDIA_GDRCOPY": "enabled"}
	s := coretest.GPUs(1)
	s.Nodes = append([]string{gpu.IMEXChannelNode}, s.Nodes...)
	id := gpuIDs(0)
	for _, set := range sets() {
		c := core.DefaultConfig()
		c.Injection.Nodes, c.IMEXChannel = true, true
		srv := strategyServer(kubeadapter.GPUResource, gpu.NewSnapshot(s), c, set, others...)
		srv.opts.Lists.GDS, srv.opts.Lists.MOFED, srv.opts.Lists.GDRCopy = true, true, true
		got := allocated(t, srv, id...)
		want := incumbent(set, id, others, strings.Join(slices.Collect(maps.Keys(got.GetAnnotations())), " "))
		maps.Copy(want.Envs, features)
		if slices.Contains(set, "envvar") {
			want.Envs["NVIDIA_IMEX_CHANNELS"] = "0"
		}
		if slices.Contains(set, "volume-mounts") {
			want.Mounts = append(want.Mounts, &v1beta1.Mount{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/imex/0"})
		}
		var nodes []string
		for _, d := range got.GetDevices() {
			nodes = append(nodes, d.GetContainerPath())
		}
		if slices.Contains(nodes, gpu.IMEXChannelNode) != (slices.Contains(set, "envvar") || slices.Contains(set, "volume-mounts")) {
			t.Errorf("%v: nodes %v", set, nodes)
		}
		if diff := cmp.Diff(want, got, protocmp.Transform(), protocmp.IgnoreFields(&v1beta1.ContainerAllocateResponse{}, "devices")); diff != "" {
			t.Errorf("%v: %s", set, diff)
		}
	}
	mps := mixedConfig()
	mps.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2}}}
	mps.Injection = inventory.Injection{CDI: inventory.CDIRequired}
	inv := core.Build(s, health.Ledger{}, mps).WithHost(inventory.Host{CDI: definesAll(s), MPS: []string{"gpu.mps"}}, "")
	srv := newTestServer("nvidia.com/gpu.mps", inv)
	srv.opts.Lists, srv.opts.MPSRoot = DeviceLists{CDINames: true, GDS: true}, "/run/nvidia/mps"
	got := allocated(t, srv, replica(0, 1))
	want := &v1beta1.ContainerAllocateResponse{
		Envs: map[string]string{"CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu.mps/pipe", "NVIDIA_GDS": "enabled"},
		Mounts: []*v1beta1.Mount{
			{HostPath: "/run/nvidia/mps/nvidia.com/gpu.mps/pipe", ContainerPath: "/mps/nvidia.com/gpu.mps/pipe"},
			{HostPath: "/run/nvidia/mps/shm", ContainerPath: "/dev/shm"},
		},
		CdiDevices: []*v1beta1.CDIDevice{{Name: cdiKind + "=" + id[0]}},
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

// A missing IMEX channel is left out; a required one makes the units unhealthy until its device node appears.
func TestIMEXChannel(t *testing.T) {
	for _, required := range []bool{false, true} {
		c := core.DefaultConfig()
		c.IMEXChannel, c.IMEXRequired = true, required
		state := core.NewState(c).Read(c, time.Unix(0, 0), coretest.GPUs(1), health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Checked})
		for _, present := range []bool{false, true, false} {
			nodes := slices.DeleteFunc(slices.Clone(state.Snapshot.Nodes), func(path string) bool { return path == gpu.IMEXChannelNode })
			if present {
				nodes = slices.Sorted(slices.Values(append(nodes, gpu.IMEXChannelNode)))
			}
			state = state.WithNodes(c, time.Unix(1, 0), nodes)
			u, _ := state.Allocatable.Unit(inventory.UnitID(gpuIDs(0)[0]))
			if lacks := u.Health.Reason == health.ReasonNoIMEX; lacks != (required && !present) || u.Health.Schedulable() == lacks {
				t.Errorf("required %t, present %t: %s", required, present, u.Health)
				continue
			}
			if !u.Health.Schedulable() {
				continue
			}
			env := allocated(t, newTestServer(kubeadapter.GPUResource, state.Allocatable), gpuIDs(0)...).GetEnvs()
			if _, given := env["NVIDIA_IMEX_CHANNELS"]; given != present {
				t.Errorf("required %t, present %t: %v", required, present, env)
			}
		}
	}
}

// Two resources of one container, whose responses the kubelet merges, never share an annotation, also with a prefix of the operator's.
func TestAnnotationsOfOneContainer(t *testing.T) {
	s := coretest.WithMIG(coretest.GPUs(2), 1, "1g.10gb")
	keys := map[string]bool{}
	for _, id := range []string{string(coretest.GPU(0)), string(coretest.Instance(1, 0))} {
		resource := kubeadapter.GPUResource
		if strings.HasPrefix(id, "MIG") {
			resource = "nvidia.com/mig-1g.10gb"
		}
		srv := strategyServer(resource, s, mixedConfig(), []string{"cdi-annotations"})
		srv.opts.Lists.AnnotationPrefix = "nvidia.cdi.k8s.io/"
		for key := range allocated(t, srv, id).GetAnnotations() {
			name, ok := strings.CutPrefix(key, "nvidia.cdi.k8s.io/")
			if keys[key] = true; !ok || len(name) > 63 {
				t.Error(key)
			}
		}
	}
	if same := listHash("nvidia.com/a", "x") == listHash("nvidia.com/b", "x"); len(keys) != 2 || same {
		t.Errorf("%v, resource in the hash: %t", keys, !same)
	}
}

// Whatever happens to the machine and to the specification: a response has names that the specification defines for the present driver,
// or, with the strategy "auto", no names and the list for NVIDIA's container runtime.
func TestNamesAreDefined(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, injection := range []inventory.Injection{{CDI: inventory.CDIRequired}, {Runtime: true, CDI: inventory.CDIAuto}} {
		c := mixedConfig()
		c.Injection = injection
		state, now := core.NewState(c), time.Unix(0, 0)
		var named, unnamed, refused int
		for range 2000 {
			now = now.Add(time.Second)
			switch random.IntN(6) {
			case 0, 1:
				state = state.WithHost(c, now, inventory.Host{CDI: randomCDI(random, state)})
			case 2:
				state = state.Read(c, now, gpu.NoDriver(gpu.DriverAbsent, "unloaded"))
			default:
				s := coretest.GPUs(1 + random.IntN(4))
				if random.IntN(2) == 0 {
					s = coretest.WithMIG(s, random.IntN(len(s.Devices)), slices.Repeat([]string{"1g.10gb"}, 1+random.IntN(3))...)
				}
				var checks []health.Observation
				for _, d := range s.Devices {
					checks = append(checks, health.Observation{At: d.At, Kind: health.Checked})
				}
				state = state.Read(c, now, s, checks...)
			}
			inv := state.Allocatable
			for u := range inv.Devices() {
				srv := newTestServer(kubeadapter.ResourceOf(u), inv)
				srv.opts.Lists = DeviceLists{EnvVar: injection.Runtime, CDINames: true, CDIAnnotations: !injection.Runtime}
				response, err := srv.Allocate(t.Context(), allocateRequest([]string{string(u.ID)}))
				if err != nil {
					refused++
					continue
				}
				got := response.GetContainerResponses()[0]
				names := got.GetCdiDevices()
				for _, n := range names {
					id, ofGPU := strings.CutPrefix(n.GetName(), cdiKind+"=")
					if defined := slices.Contains(inv.CDI().Defined, gpu.DeviceID(id)); ofGPU && (!defined || inv.CDI().Incarnation != state.Incarnation) ||
						!ofGPU && !slices.Contains(inv.CDI().Others, n.GetName()) {
						t.Fatalf("%s is not defined by %+v, driver %d", n.GetName(), inv.CDI(), state.Incarnation)
					}
				}
				if named++; len(names) == 0 {
					named, unnamed = named-1, unnamed+1
					if got.GetEnvs()[inventory.VisibleDevices] != string(u.ID) {
						t.Fatalf("%s: a response without a GPU: %v", u.ID, got)
					}
				}
			}
		}
		if named < 100 || refused < 100 || (unnamed > 100) != injection.Runtime {
			t.Errorf("%+v: %d with names, %d without, %d refused: too few to show anything", injection, named, unnamed, refused)
		}
	}
}

// randomCDI is what a writer may report for a state: all devices, some of them, or those of an earlier driver.
func randomCDI(random *rand.Rand, s core.State) *inventory.CDI {
	c := definesAll(s.Snapshot, "k8s.device-plugin.nvidia.com/gds=all")
	c.Defined = slices.DeleteFunc(c.Defined, func(gpu.DeviceID) bool { return random.IntN(8) == 0 })
	c.Incarnation, c.Usable = s.Incarnation-random.IntN(4)/3, random.IntN(3) > 0
	if random.IntN(8) == 0 {
		return &inventory.CDI{Problem: "disk full"}
	}
	return c
}

// allocated is the response for one container.
func allocated(t *testing.T, s *server, ids ...string) *v1beta1.ContainerAllocateResponse {
	t.Helper()
	response, err := s.Allocate(t.Context(), allocateRequest(ids))
	check.NoError(t, err)
	return response.GetContainerResponses()[0]
}
