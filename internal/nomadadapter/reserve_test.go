package nomadadapter

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

func deviceNode(path, host string) *device.DeviceSpec {
	return &device.DeviceSpec{TaskPath: path, HostPath: host + path, CgroupPerms: "rw"}
}

// A reservation has each GPU once, in any order of the IDs, and several shares of a GPU are that GPU. The source gets its
// devices.
func TestReserve(t *testing.T) {
	for name, tc := range map[string]struct {
		inv *inventory.Inventory
		ids [][]string
	}{
		"exclusive": {nodeInventory(coretest.GPUs(4)), [][]string{{gpuID(1), gpuID(2)}, {gpuID(2), gpuID(1)}, {gpuID(2), gpuID(1), gpuID(2)}}},
		"shares":    {sharedGPUs(3, 4), [][]string{{shareID(1, 0), shareID(2, 3)}, {shareID(2, 0), shareID(1, 1), shareID(2, 1), shareID(1, 3)}, {shareID(2, 2), shareID(2, 2), shareID(1, 0)}}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t, tc.inv)
			s.mustConfigure(t, map[string]any{"dev_root": "/driver/"})
			p := nomadtest.Serve(t, s.Plugin)
			for i, ids := range tc.ids {
				want := &device.ContainerReservation{
					Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": gpuID(1) + "," + gpuID(2)},
					Devices: []*device.DeviceSpec{
						deviceNode("/dev/nvidia-uvm", "/driver"), deviceNode("/dev/nvidia-uvm-tools", "/driver"),
						deviceNode("/dev/nvidia1", "/driver"), deviceNode("/dev/nvidia2", "/driver"), deviceNode("/dev/nvidiactl", "/driver"),
					},
				}
				got, err := p.Reserve(ids)
				if err != nil {
					t.Fatal(err)
				}
				checkEqual(t, fmt.Sprint(ids), want, got)
				if r := s.Source.reserved[i]; len(r) != 2 || r[0].ID != coretest.GPU(1) || r[1].ID != coretest.GPU(2) {
					t.Errorf("%v: the source got %v", ids, r)
				}
			}
		})
	}
}

// A client of an MPS daemon gets its pipe directory in the environment, and no mounts: Nomad would drop the task's volumes.
func TestReserveMPS(t *testing.T) {
	s := newFixture(t, inventoryUnder(mixedPolicy, coretest.GPUs(8)))
	s.mustConfigure(t, map[string]any{"mps_root": "/srv/mps"})
	r, err := s.Reserve([]string{shareID(6, 1)})
	if err != nil || r.Envs[mpsPipeEnv] != "/srv/mps/nvidia.com/gpu.mps/pipe" || len(r.Mounts) > 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

// With health_mode "observe" an unhealthy device is reserved.
func TestReserveWithoutEnforcedHealth(t *testing.T) {
	s := newFixture(t, nil)
	s.mustConfigure(t, map[string]any{"health_mode": "observe"})
	s.currentRun()
	s.Source.Set(inventoryWith(s.Started()[0].Core, coretest.GPUs(2), lost(1)))
	if r, err := s.Reserve([]string{gpuID(1)}); err != nil || r.Envs[inventory.VisibleDevices] != gpuID(1) {
		t.Errorf("%+v, %v", r, err)
	}
}

// An error names what is wrong with each device; the source gets nothing.
func TestReserveRefuses(t *testing.T) {
	ready := nodeInventory(coretest.GPUs(4), lost(1), lost(2))
	gone, obs := core.Reconcile(coretest.GPUs(1), gpu.NoDriver(gpu.DriverFailed, "no answer"))
	for name, tc := range map[string]struct {
		inv  *inventory.Inventory
		ids  []string
		want string
	}{
		"unknown":     {ready, []string{"GPU-b", gpuID(0), "GPU-a"}, "unknown device IDs: GPU-a,GPU-b"},
		"unhealthy":   {ready, []string{gpuID(0), gpuID(2), gpuID(1)}, "unhealthy devices: " + gpuID(1) + " is " + lostText + "; " + gpuID(2) + " is lost"},
		"both":        {ready, []string{gpuID(1), "GPU-a"}, "unknown device IDs: GPU-a; unhealthy devices: " + gpuID(1)},
		"no driver":   {nodeInventory(gpu.NoDriver(gpu.DriverAbsent, "no library")), []string{gpuID(0)}, "unknown device IDs: " + gpuID(0) + " (driver absent: no library)"},
		"lost driver": {nodeInventory(gone, obs...), []string{gpuID(0)}, "is unknown: driver is not usable (no answer)"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t, tc.inv)
			got, err := s.Reserve(tc.ids)
			if !errorContains(err, tc.want) || len(s.Source.reserved) > 0 {
				t.Errorf("got %+v, %v; want %q", got, err, tc.want)
			}
			if !strings.Contains(s.Log.String(), "reservation refused") {
				t.Errorf("logged:\n%s", s.Log)
			}
		})
	}
}

// After a crash Nomad reserves devices that the previous process announced: a reservation waits for the first snapshot, for
// at most reserveWait. Nomad waits for 10 s.
func TestReserveWaitsForTheFirstSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nil)
		begin := time.Now()
		_, err := s.Reserve([]string{gpuID(0)})
		if !errorContains(err, "unknown device IDs: "+gpuID(0)+" (driver pending: not asked yet)") || time.Since(begin) >= 10*time.Second {
			t.Errorf("after %s: %v", time.Since(begin), err)
		}
		time.AfterFunc(3*time.Second, func() { s.Source.Set(nodeInventory(coretest.GPUs(1))) })
		if _, err := s.Reserve([]string{gpuID(0)}); err != nil {
			t.Error(err)
		}
		if r, err := s.Reserve(nil); r == nil || err != nil {
			t.Errorf("nothing: %v, %v", r, err)
		}
	})
}
