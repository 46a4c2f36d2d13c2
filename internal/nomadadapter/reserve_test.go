package nomadadapter

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

func id(n int) string { return string(coretest.GPU(n)) }

func node(path, host string) *device.DeviceSpec {
	return &device.DeviceSpec{TaskPath: path, HostPath: host + path, CgroupPerms: "rw"}
}

func TestReserve(t *testing.T) {
	s := newStand(t)
	s.Source.Set(machine(coretest.GPUs(4)))
	p := dial(t, s.Plugin)
	want := &device.ContainerReservation{
		Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": id(1) + "," + id(2)},
		Devices: []*device.DeviceSpec{
			node("/dev/nvidia-uvm", ""), node("/dev/nvidia-uvm-tools", ""),
			node("/dev/nvidia1", ""), node("/dev/nvidia2", ""), node("/dev/nvidiactl", ""),
		},
	}
	for _, ids := range [][]string{{id(1), id(2)}, {id(2), id(1)}, {id(2), id(1), id(2)}} {
		got, err := p.Reserve(ids)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%v (-want +got):\n%s", ids, diff)
		}
	}
}

func TestReserveUnderDevRoot(t *testing.T) {
	s := newStand(t)
	if err := s.configure(map[string]any{"dev_root": "/run/nvidia/driver/"}); err != nil {
		t.Fatal(err)
	}
	s.Source.Set(machine(coretest.GPUs(1)))
	got, err := s.Reserve([]string{id(0)})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(node("/dev/nvidia-uvm", "/run/nvidia/driver"), got.Devices[0]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestReserveNothing(t *testing.T) {
	got, err := dial(t, newStand(t).Plugin).Reserve(nil)
	if err != nil || got == nil || len(got.Envs)+len(got.Devices)+len(got.Mounts) != 0 {
		t.Errorf("got %+v, %v; want an empty reservation", got, err)
	}
}

func TestReserveRefuses(t *testing.T) {
	ready := machine(coretest.GPUs(4), lost(1), lost(2))
	gone, obs := core.Reconcile(coretest.GPUs(1), core.NoDriver(core.DriverFailed, "no answer"))
	for name, tc := range map[string]struct {
		inv  *core.Inventory
		ids  []string
		want string
	}{
		"unknown":       {ready, []string{"GPU-b", id(0), "GPU-a"}, "unknown device IDs: GPU-a,GPU-b"},
		"an empty id":   {ready, []string{""}, "unknown device IDs: "},
		"unhealthy":     {ready, []string{id(0), id(2), id(1)}, "unhealthy devices: " + id(1) + " is lost: GPU is lost (not listed by the driver); " + id(2) + " is lost"},
		"both":          {ready, []string{id(1), "GPU-a"}, "unknown device IDs: GPU-a; unhealthy devices: " + id(1)},
		"no driver":     {machine(core.NoDriver(core.DriverAbsent, "no library")), []string{id(0)}, "unknown device IDs: " + id(0) + " (driver absent: no library)"},
		"driver is out": {machine(gone, obs...), []string{id(0)}, "is unknown: driver is not usable (no answer)"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t)
			s.Source.Set(tc.inv)
			got, err := dial(t, s.Plugin).Reserve(tc.ids)
			if err == nil || !contains(err, tc.want) {
				t.Errorf("got %+v, %v; want %q", got, err, tc.want)
			}
		})
	}
}

// After a crash Nomad reserves what the process before this one offered.
func TestReserveWaitsForTheFirstReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t)
		time.AfterFunc(3*time.Second, func() { s.Source.Set(machine(coretest.GPUs(1))) })
		if _, err := s.Reserve([]string{id(0)}); err != nil {
			t.Error(err)
		}
	})
}

func TestReserveGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t)
		begin := time.Now()
		_, err := s.Reserve([]string{id(0)})
		if err == nil || !contains(err, "unknown device IDs: "+id(0)+" (driver pending: not asked yet)") {
			t.Errorf("got %v", err)
		}
		if d := time.Since(begin); d >= 10*time.Second {
			t.Errorf("after %s", d)
		}
	})
}

func TestReserveInParallel(t *testing.T) {
	s := newStand(t)
	s.Source.Set(machine(coretest.GPUs(64)))
	p := dial(t, s.Plugin)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			r, err := p.Reserve([]string{id(i), id((i + 1) % 64)})
			if err != nil {
				t.Error(err)
				return
			}
			if n := strings.Count(r.Envs[core.VisibleDevices], "GPU-"); n != 2 {
				t.Errorf("%d: got %v", i, r.Envs)
			}
		})
		if i%8 == 0 {
			s.Source.Set(machine(coretest.GPUs(64))) // and the inventory is replaced meanwhile
		}
	}
	wg.Wait()
}
