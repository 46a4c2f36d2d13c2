package nomadadapter

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

func gpuID(n int) string { return string(coretest.GPU(n)) }

func deviceNode(path, host string) *device.DeviceSpec {
	return &device.DeviceSpec{TaskPath: path, HostPath: host + path, CgroupPerms: "rw"}
}

// A reservation has each GPU once, in any order of the IDs, and several shares of a GPU are that GPU.
func TestReserve(t *testing.T) {
	want := &device.ContainerReservation{
		Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": gpuID(1) + "," + gpuID(2)},
		Devices: []*device.DeviceSpec{
			deviceNode("/dev/nvidia-uvm", ""), deviceNode("/dev/nvidia-uvm-tools", ""),
			deviceNode("/dev/nvidia1", ""), deviceNode("/dev/nvidia2", ""), deviceNode("/dev/nvidiactl", ""),
		},
	}
	for name, tc := range map[string]struct {
		inv     *inventory.Inventory
		ids     [][]string
		unknown []string
	}{
		"exclusive": {nodeInventory(coretest.GPUs(4)), [][]string{{gpuID(1), gpuID(2)}, {gpuID(2), gpuID(1)}, {gpuID(2), gpuID(1), gpuID(2)}}, []string{shareID(1, 0)}},
		"shares": {
			inventoryUnder(inventory.Policy{Rules: []inventory.Rule{{Sharing: timeSlicing(4)}}}, coretest.GPUs(3)),
			[][]string{{shareID(1, 0), shareID(2, 3)}, {shareID(2, 0), shareID(1, 1), shareID(2, 1), shareID(1, 3)}, {shareID(2, 2), shareID(2, 2), shareID(1, 0)}},
			[]string{gpuID(1), shareID(1, 4), gpuID(1) + "::", shareID(1, -1)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.Source.Set(tc.inv)
			p := nomadtest.Serve(t, s.Plugin)
			for _, ids := range tc.ids {
				got, err := p.Reserve(ids)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%v (-want +got):\n%s", ids, diff)
				}
			}
			for _, id := range tc.unknown {
				if _, err := p.Reserve([]string{id}); err == nil || !errorContains(err, "unknown device IDs: "+id) {
					t.Errorf("%s: %v", id, err)
				}
			}
		})
	}
}

// observingSource is a ReservationObserver.
type observingSource struct {
	*coretest.Source
	mu       sync.Mutex
	reserved [][]gpu.Device
}

func (l *observingSource) Reserved(devices []gpu.Device) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reserved = append(l.reserved, devices)
}

// A ReservationObserver gets the devices of each reservation, each device once, and none of a refused one.
func TestReservationObserver(t *testing.T) {
	src := &observingSource{Source: coretest.NewSource()}
	snapshot := coretest.GPUs(4)
	src.Set(nodeInventory(snapshot, lost(3)))
	p := New(t.Context(), "2.0.0", func(context.Context, Settings, *slog.Logger) Source { return src }, discardLog)
	for _, ids := range [][]string{{gpuID(2), gpuID(0), gpuID(2)}, {gpuID(3)}, {gpuID(0), "GPU-a"}, nil, {gpuID(2)}} {
		_, err := p.Reserve(ids)
		if refused := ids != nil && ids[0] != gpuID(2); (err != nil) != refused {
			t.Errorf("%v: %v", ids, err)
		}
	}
	want := [][]gpu.Device{{snapshot.Devices[0], snapshot.Devices[2]}, {snapshot.Devices[2]}}
	if diff := cmp.Diff(want, src.reserved); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// With health_mode "observe" an unhealthy device has a description, and is reserved.
func TestReserveWithoutEnforcedHealth(t *testing.T) {
	s := newFixture(t)
	s.mustConfigure(t, map[string]any{"health_mode": "observe"})
	s.currentRun()
	s.Source.Set(inventoryWith(s.Started()[0].Core, coretest.GPUs(2), lost(1)))
	p := nomadtest.Serve(t, s.Plugin)
	d := openFingerprint(t, p)()[0].Devices[1]
	if !d.Healthy || !strings.HasPrefix(d.HealthDesc, "observed, not enforced: lost: GPU is lost (") {
		t.Errorf("%+v", d)
	}
	if r, err := p.Reserve([]string{gpuID(1)}); err != nil || r.Envs[inventory.VisibleDevices] != gpuID(1) {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestReserveUnderDevRoot(t *testing.T) {
	s := newFixture(t)
	s.mustConfigure(t, map[string]any{"dev_root": "/run/nvidia/driver/"})
	s.Source.Set(nodeInventory(coretest.GPUs(1)))
	got, err := s.Reserve([]string{gpuID(0)})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(deviceNode("/dev/nvidia-uvm", "/run/nvidia/driver"), got.Devices[0]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestReserveNothing(t *testing.T) {
	got, err := nomadtest.Serve(t, newFixture(t).Plugin).Reserve(nil)
	if err != nil || got == nil || len(got.Envs)+len(got.Devices)+len(got.Mounts) != 0 {
		t.Errorf("got %+v, %v; want an empty reservation", got, err)
	}
}

func TestReserveRefuses(t *testing.T) {
	ready := nodeInventory(coretest.GPUs(4), lost(1), lost(2))
	gone, obs := core.Reconcile(coretest.GPUs(1), gpu.NoDriver(gpu.DriverFailed, "no answer"))
	for name, tc := range map[string]struct {
		inv  *inventory.Inventory
		ids  []string
		want string
	}{
		"unknown":     {ready, []string{"GPU-b", gpuID(0), "GPU-a"}, "unknown device IDs: GPU-a,GPU-b"},
		"an empty id": {ready, []string{""}, "unknown device IDs: "},
		"unhealthy":   {ready, []string{gpuID(0), gpuID(2), gpuID(1)}, "unhealthy devices: " + gpuID(1) + " is " + lostText + "; " + gpuID(2) + " is lost"},
		"both":        {ready, []string{gpuID(1), "GPU-a"}, "unknown device IDs: GPU-a; unhealthy devices: " + gpuID(1)},
		"no driver":   {nodeInventory(gpu.NoDriver(gpu.DriverAbsent, "no library")), []string{gpuID(0)}, "unknown device IDs: " + gpuID(0) + " (driver absent: no library)"},
		"lost driver": {nodeInventory(gone, obs...), []string{gpuID(0)}, "is unknown: driver is not usable (no answer)"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.Source.Set(tc.inv)
			got, err := nomadtest.Serve(t, s.Plugin).Reserve(tc.ids)
			if err == nil || !errorContains(err, tc.want) {
				t.Errorf("got %+v, %v; want %q", got, err, tc.want)
			}
		})
	}
}

// After a crash Nomad reserves devices that the previous process announced.
func TestReserveWaitsForTheFirstSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t)
		time.AfterFunc(3*time.Second, func() { s.Source.Set(nodeInventory(coretest.GPUs(1))) })
		if _, err := s.Reserve([]string{gpuID(0)}); err != nil {
			t.Error(err)
		}
	})
}

func TestReserveTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t)
		begin := time.Now()
		_, err := s.Reserve([]string{gpuID(0)})
		if err == nil || !errorContains(err, "unknown device IDs: "+gpuID(0)+" (driver pending: not asked yet)") {
			t.Errorf("got %v", err)
		}
		if d := time.Since(begin); d >= 10*time.Second {
			t.Errorf("after %s", d)
		}
	})
}

func TestReserveInParallel(t *testing.T) {
	s := newFixture(t)
	s.Source.Set(nodeInventory(coretest.GPUs(64)))
	p := nomadtest.Serve(t, s.Plugin)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			r, err := p.Reserve([]string{gpuID(i), gpuID((i + 1) % 64)})
			if err != nil {
				t.Error(err)
				return
			}
			if n := strings.Count(r.Envs[inventory.VisibleDevices], "GPU-"); n != 2 {
				t.Errorf("%d: got %v", i, r.Envs)
			}
		})
		if i%8 == 0 {
			s.Source.Set(nodeInventory(coretest.GPUs(64))) // replaced during reservations
		}
	}
	wg.Wait()
}
