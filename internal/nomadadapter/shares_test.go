package nomadadapter

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/device/proto"
	"github.com/hashicorp/nomad/plugins/shared/structs"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

func shareID(gpu, n int) string { return fmt.Sprintf("%s::%d", gpuID(gpu), n) }

// Several shares of a GPU are the GPU once, in whatever order they come.
func TestReserveShares(t *testing.T) {
	s := newFixture(t)
	s.Source.Set(inventoryUnder(core.Policy{Rules: []core.Rule{{Sharing: timeSlicing(4)}}}, coretest.GPUs(3)))
	p := dial(t, s.Plugin)
	want := &device.ContainerReservation{
		Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": gpuID(1) + "," + gpuID(2)},
		Devices: []*device.DeviceSpec{
			deviceNode("/dev/nvidia-uvm", ""), deviceNode("/dev/nvidia-uvm-tools", ""),
			deviceNode("/dev/nvidia1", ""), deviceNode("/dev/nvidia2", ""), deviceNode("/dev/nvidiactl", ""),
		},
	}
	for _, ids := range [][]string{
		{shareID(1, 0), shareID(2, 3)}, {shareID(2, 0), shareID(1, 1), shareID(2, 1), shareID(1, 3)}, {shareID(2, 2), shareID(2, 2), shareID(1, 0)},
	} {
		got, err := p.Reserve(ids)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%v (-want +got):\n%s", ids, diff)
		}
	}
	for _, no := range []string{gpuID(1), shareID(1, 4), gpuID(1) + "::", shareID(1, -1)} {
		if _, err := p.Reserve([]string{no}); err == nil || !errorContains(err, "unknown device IDs: "+no) {
			t.Errorf("%s: %v", no, err)
		}
	}
}

// Who may have one share only, and asks for more, is told why.
func TestReserveOneShareAtMost(t *testing.T) {
	s := newFixture(t)
	s.Source.Set(inventoryUnder(mixedPolicy, coretest.GPUs(8)))
	p := dial(t, s.Plugin)
	for _, ids := range [][]string{{shareID(5, 0), shareID(5, 1)}, {shareID(6, 1), shareID(5, 0)}} {
		if _, err := p.Reserve(ids); err == nil || !errorContains(err, "2 units of gpu.mps, whose devices are shared: maximum request size for shared resources is 1") {
			t.Errorf("%v: %v", ids, err)
		}
	}
	if _, err := p.Reserve([]string{shareID(5, 0), shareID(5, 0)}); err != nil {
		t.Errorf("one that is named twice: %v", err)
	}
}

// A client of an MPS daemon finds it by the environment; mounts would cost the task its volumes.
func TestReserveMPS(t *testing.T) {
	s := newFixture(t)
	s.mustConfigure(t, map[string]any{"mps_root": "/srv/mps/"})
	s.Source.Set(inventoryUnder(mixedPolicy, coretest.GPUs(8)))
	p := dial(t, s.Plugin)
	r, err := p.Reserve([]string{shareID(6, 1)})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"NVIDIA_VISIBLE_DEVICES":            gpuID(6),
		"CUDA_MPS_PIPE_DIRECTORY":           "/srv/mps/nvidia.com/gpu.mps/pipe",
		"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
		"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT":  "0=4096M",
	}
	if diff := cmp.Diff(want, r.Envs); diff != "" || len(r.Mounts) > 0 {
		t.Errorf("mounts %v, env (-want +got):\n%s", r.Mounts, diff)
	}
	for _, no := range []string{gpuID(0), shareID(2, 0)} { // others know nothing of it
		if r, err := p.Reserve([]string{no}); err != nil || len(r.Envs) != 1 {
			t.Errorf("%s: %v, %v", no, r, err)
		}
	}
}

// sharedGPUs is n GPUs, each shared by so many.
func sharedGPUs(n, replicas int, obs ...core.Observation) *core.Inventory {
	return inventoryUnder(core.Policy{Rules: []core.Rule{{Sharing: timeSlicing(replicas)}}}, withDetails(coretest.GPUs(n)), obs...)
}

// A GPU is shared by a hundred, and turns sick: all of its shares do, in one list, and no others.
func TestHealthOfSharesIsOneUpdate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t)
		s.Source.Set(sharedGPUs(2, 100))
		ch := fingerprints(t.Context(), t, s)
		<-ch
		time.Sleep(fingerprintInterval)
		for _, sick := range []map[int]bool{{1: true}, {}} {
			var obs []core.Observation
			if sick[1] {
				obs = append(obs, lost(1))
			}
			s.Source.Set(sharedGPUs(2, 100, obs...))
			synctest.Wait()
			g := (<-ch).Devices[0]
			for _, d := range g.Devices {
				if gpu, _, _ := strings.Cut(d.ID, "::"); d.Healthy == (sick[1] && gpu == gpuID(1)) || d.Healthy != (d.HealthDesc == "") {
					t.Errorf("%+v", d)
				}
			}
			if n := g.Attributes[unhealthyKey]; sick[1] != (n != nil && *n.Int == 100) {
				t.Errorf("unhealthy: %#v", n)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			select {
			case r := <-ch:
				t.Errorf("another list: %v", r.Devices)
			default:
			}
		}
	})
}

// wireSize is the size of a fingerprint as the message that leaves the process.
func wireSize(gs []*device.DeviceGroup) int {
	var out proto.FingerprintResponse
	for _, g := range gs {
		group := &proto.DeviceGroup{Vendor: g.Vendor, DeviceType: g.Type, DeviceName: g.Name, Attributes: structs.ConvertStructAttributeMap(g.Attributes)}
		for _, d := range g.Devices {
			one := &proto.DetectedDevice{ID: d.ID, Healthy: d.Healthy, HealthDescription: d.HealthDesc}
			if d.HwLocality != nil {
				one.HwLocality = &proto.DeviceLocality{PciBusId: d.HwLocality.PciBusID}
			}
			group.Devices = append(group.Devices, one)
		}
		out.DeviceGroup = append(out.DeviceGroup, group)
	}
	return protobuf.Size(protoadapt.MessageV2Of(&out))
}

// xidOfEach is a fault of each of n GPUs.
func xidOfEach(n int) (obs []core.Observation) {
	for i := range n {
		obs = append(obs, core.Observation{At: core.WholeGPU(coretest.GPU(i)), Kind: core.XID, Code: 95})
	}
	return obs
}

// gRPC's limit for a message is 4 MiB; Nomad's servers get it all with every change.
func TestFingerprintsAreSmall(t *testing.T) {
	for name, tc := range map[string]struct {
		inv *core.Inventory
		n   int
	}{
		"16 GPUs by 7 by 10":       {sharedInstances(10), 1120},
		"16 GPUs by 100":           {sharedGPUs(16, 100), 1600},
		"16 GPUs by 7 by 10, sick": {sharedInstances(10, xidOfEach(16)...), 1120},
		"16 GPUs by 100, sick":     {sharedGPUs(16, 100, xidOfEach(16)...), 1600},
	} {
		gs := groups(tc.inv, assignment{})
		all, size := 0, wireSize(gs)
		for _, g := range gs {
			all += len(g.Devices)
		}
		if all != tc.n || size > 1<<20 {
			t.Errorf("%s: %d devices in %d bytes", name, all, size)
		}
		t.Logf("%s: %d bytes, %d each", name, size, size/all)
	}
}

// sharedInstances is 16 GPUs cut into seven instances each, all of them shared.
func sharedInstances(replicas int, obs ...core.Observation) *core.Inventory {
	s := coretest.GPUs(16)
	for n := range 16 {
		s.Devices[n].MIG = true
		for gi := range 7 {
			d := s.Devices[n]
			d.ID = core.DeviceID(fmt.Sprintf("MIG-%08d-0000-4000-8000-%012d", n, gi))
			d.At, d.MIG, d.Profile = core.Placement{GPU: coretest.GPU(n), GI: uint32(gi + 1)}, false, "1g.10gb"
			d.Model, d.Memory, d.Instance = d.Model+" MIG 1g.10gb", 9856<<20, gi
			s.Devices = append(s.Devices, d)
		}
	}
	return inventoryUnder(core.Policy{Rules: []core.Rule{{Sharing: timeSlicing(replicas)}}}, withDetails(core.NewSnapshot(s)), obs...)
}

// The shares of a GPU have its numbers, and their own health.
func TestStatsOfShares(t *testing.T) {
	s := newFixture(t)
	s.Source.Set(inventoryUnder(core.Policy{Rules: []core.Rule{{Sharing: timeSlicing(3)}}}, coretest.GPUs(2), lost(1)))
	s.Source.SetUsage([]core.Usage{usage(0)}, nil)
	ch := openStats(t.Context(), t, dial(t, s.Plugin), time.Hour)
	r := receive(t, ch)
	if len(r.Groups) != 1 || r.Groups[0].Type != typeTimeSlicing || r.Groups[0].Name != h100 {
		t.Fatalf("%+v", r.Groups)
	}
	all := instances(t, r)
	if len(all) != 6 {
		t.Errorf("%d devices", len(all))
	}
	for n := range 3 {
		for gpu, want := range map[int]*structs.StatValue{0: {IntNumeratorVal: new(int64(97))}, 1: {StringVal: new("N/A")}} {
			d := all[shareID(gpu, n)]
			got := d.Stats.Attributes["GPU utilization"]
			got.Unit, got.Desc = "", ""
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", shareID(gpu, n), diff)
			}
			if well := strings.HasPrefix(*d.Stats.Attributes[healthKey].StringVal, "healthy"); well != (gpu == 0) {
				t.Errorf("%s: %s", shareID(gpu, n), *d.Stats.Attributes[healthKey].StringVal)
			}
		}
	}
}

// Groups of one name and several types come and go each by itself.
func TestStatsOfDepartedShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t)
		s.Source.Set(inventoryUnder(mixedPolicy, coretest.GPUs(8)))
		ch := openStats(t.Context(), t, s, time.Second)
		of := func(r *device.StatsResponse) (all []string) {
			for _, g := range r.Groups {
				all = append(all, fmt.Sprintf("%s/%s:%d", g.Type, g.Name, len(g.InstanceStats)))
			}
			return all
		}
		if got, want := of(<-ch), []string{"gpu/" + h100 + ":2", "gpu-shared/" + h100 + ":12", "gpu-mps/" + h100 + ":4"}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		s.Source.Set(nodeInventory(core.NoDriver(core.DriverAbsent, "unloaded")))
		<-ch // may have been taken before
		if got, want := of(<-ch), []string{"gpu/" + h100 + ":0", "gpu-shared/" + h100 + ":0", "gpu-mps/" + h100 + ":0"}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}
