package nomadadapter

import (
	"fmt"
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

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

func shareID(device, n int) string { return fmt.Sprintf("%s::%d", gpuID(device), n) }

// A request for two shares of a pool with OnePerRequest is refused with the reason.
func TestReserveOneShareAtMost(t *testing.T) {
	s := newFixture(t)
	s.Source.Set(inventoryUnder(mixedPolicy, coretest.GPUs(8)))
	p := nomadtest.Serve(t, s.Plugin)
	for _, ids := range [][]string{{shareID(5, 0), shareID(5, 1)}, {shareID(6, 1), shareID(5, 0)}} {
		if _, err := p.Reserve(ids); err == nil || !errorContains(err, "2 units of gpu.mps, whose devices are shared: maximum request size for shared resources is 1") {
			t.Errorf("%v: %v", ids, err)
		}
	}
	if _, err := p.Reserve([]string{shareID(5, 0), shareID(5, 0)}); err != nil {
		t.Errorf("one that is named twice: %v", err)
	}
}

// A client of an MPS daemon gets its pipe directory in the environment, and no mounts: Nomad would drop the task's volumes.
func TestReserveMPS(t *testing.T) {
	s := newFixture(t)
	s.mustConfigure(t, map[string]any{"mps_root": "/srv/mps/"})
	s.Source.Set(inventoryUnder(mixedPolicy, coretest.GPUs(8)))
	p := nomadtest.Serve(t, s.Plugin)
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
	for _, no := range []string{gpuID(0), shareID(2, 0)} { // not in the MPS pool
		if r, err := p.Reserve([]string{no}); err != nil || len(r.Envs) != 1 {
			t.Errorf("%s: %v, %v", no, r, err)
		}
	}
}

// sharedGPUs returns n GPUs with this number of replicas each.
func sharedGPUs(n, replicas int, obs ...health.Observation) *inventory.Inventory {
	return inventoryUnder(inventory.Policy{Rules: []inventory.Rule{{Sharing: timeSlicing(replicas)}}}, withDetails(coretest.GPUs(n)), obs...)
}

// When a GPU with 100 replicas becomes unhealthy, all its shares and no others do, in one fingerprint.
func TestHealthOfSharesIsOneUpdate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t)
		s.Source.Set(sharedGPUs(2, 100))
		ch := fingerprints(t.Context(), t, s)
		<-ch
		time.Sleep(fingerprintInterval)
		for _, unhealthy := range []bool{true, false} {
			var obs []health.Observation
			if unhealthy {
				obs = append(obs, lost(1))
			}
			s.Source.Set(sharedGPUs(2, 100, obs...))
			synctest.Wait()
			g := (<-ch).Devices[0]
			for _, d := range g.Devices {
				if device, _, _ := strings.Cut(d.ID, "::"); d.Healthy == (unhealthy && device == gpuID(1)) || d.Healthy != (d.HealthDesc == "") {
					t.Errorf("%+v", d)
				}
			}
			if n := g.Attributes[unhealthyKey]; unhealthy != (n != nil && *n.Int == 100) {
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

// wireSize returns the bytes of a fingerprint as a gRPC message.
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

// xidOfEach returns a fault of each of n GPUs.
func xidOfEach(n int) (obs []health.Observation) {
	for i := range n {
		obs = append(obs, health.Observation{At: gpu.WholeGPU(coretest.GPU(i)), Kind: health.XID, Code: 95})
	}
	return obs
}

// The limit of gRPC for a message is 4 MiB, and Nomad's servers get the whole fingerprint with each change.
func TestFingerprintsAreSmall(t *testing.T) {
	for name, tc := range map[string]struct {
		inv *inventory.Inventory
		n   int
	}{
		"16 GPUs by 7 by 10":            {sharedInstances(10), 1120},
		"16 GPUs by 100":                {sharedGPUs(16, 100), 1600},
		"16 GPUs by 7 by 10, unhealthy": {sharedInstances(10, xidOfEach(16)...), 1120},
		"16 GPUs by 100, unhealthy":     {sharedGPUs(16, 100, xidOfEach(16)...), 1600},
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

// sharedInstances returns 16 GPUs with seven MIG instances each, all with this number of replicas.
func sharedInstances(replicas int, obs ...health.Observation) *inventory.Inventory {
	s := coretest.GPUs(16)
	for n := range 16 {
		s.Devices[n].MIG = true
		for gi := range 7 {
			d := s.Devices[n]
			d.ID = gpu.DeviceID(fmt.Sprintf("MIG-%08d-0000-4000-8000-%012d", n, gi))
			d.At, d.MIG, d.Profile = gpu.Placement{GPU: coretest.GPU(n), GI: uint32(gi + 1)}, false, "1g.10gb"
			d.Model, d.Memory, d.Instance = d.Model+" MIG 1g.10gb", 9856<<20, gi
			s.Devices = append(s.Devices, d)
		}
	}
	return inventoryUnder(inventory.Policy{Rules: []inventory.Rule{{Sharing: timeSlicing(replicas)}}}, withDetails(gpu.NewSnapshot(s)), obs...)
}

// The shares of a GPU have the usage and the health of the GPU.
func TestStatsOfShares(t *testing.T) {
	s := newFixture(t)
	s.Source.Set(inventoryUnder(inventory.Policy{Rules: []inventory.Rule{{Sharing: timeSlicing(3)}}}, coretest.GPUs(2), lost(1)))
	s.Source.SetUsage([]gpu.Usage{usage(0)}, nil)
	ch := openStats(t.Context(), t, nomadtest.Serve(t, s.Plugin), time.Hour)
	r := receive(t, ch)
	if len(r.Groups) != 1 || r.Groups[0].Type != typeTimeSlicing || r.Groups[0].Name != h100 {
		t.Fatalf("%+v", r.Groups)
	}
	all := instances(t, r)
	if len(all) != 6 {
		t.Errorf("%d devices", len(all))
	}
	for n := range 3 {
		for i, want := range map[int]*structs.StatValue{0: {IntNumeratorVal: new(int64(97))}, 1: {StringVal: new("N/A")}} {
			d := all[shareID(i, n)]
			got := d.Stats.Attributes["GPU utilization"]
			got.Unit, got.Desc = "", ""
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", shareID(i, n), diff)
			}
			if healthy := strings.HasPrefix(*d.Stats.Attributes[healthKey].StringVal, "healthy"); healthy != (i == 0) {
				t.Errorf("%s: %s", shareID(i, n), *d.Stats.Attributes[healthKey].StringVal)
			}
		}
	}
}
