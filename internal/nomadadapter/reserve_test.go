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

// listener is a source that is told what was handed out.
type listener struct {
	*coretest.Source
	mu   sync.Mutex
	told [][]core.Device
}

func (l *listener) Reserved(devices []core.Device) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.told = append(l.told, devices)
}

// Who wants to know is told the devices of each reservation, once each, and of none that was refused.
func TestReservedIsTold(t *testing.T) {
	src := &listener{Source: coretest.NewSource()}
	snapshot := coretest.GPUs(4)
	src.Set(machine(snapshot, lost(3)))
	p := New(t.Context(), "2.0.0", func(context.Context, Settings, *slog.Logger) Source { return src }, discard)
	for _, ids := range [][]string{{id(2), id(0), id(2)}, {id(3)}, {id(0), "GPU-a"}, nil, {id(2)}} {
		_, err := p.Reserve(ids)
		if refused := ids != nil && ids[0] != id(2); (err != nil) != refused {
			t.Errorf("%v: %v", ids, err)
		}
	}
	want := [][]core.Device{{snapshot.Devices[0], snapshot.Devices[2]}, {snapshot.Devices[2]}}
	if diff := cmp.Diff(want, src.told); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// What is only observed is told, and takes work all the same.
func TestReserveWhatIsOnlyObserved(t *testing.T) {
	s := newStand(t)
	if err := s.configure(map[string]any{"health_mode": "observe"}); err != nil {
		t.Fatal(err)
	}
	s.currentRun()
	s.Source.Set(observed(s.Started()[0].Core, coretest.GPUs(2), lost(1)))
	p := dial(t, s.Plugin)
	d := fingerprint(t, p)()[0].Devices[1]
	if !d.Healthy || !strings.HasPrefix(d.HealthDesc, "observed, not enforced: lost: GPU is lost (") {
		t.Errorf("%+v", d)
	}
	if r, err := p.Reserve([]string{id(1)}); err != nil || r.Envs[core.VisibleDevices] != id(1) {
		t.Errorf("%+v, %v", r, err)
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
		"unhealthy":     {ready, []string{id(0), id(2), id(1)}, "unhealthy devices: " + id(1) + " is " + lostText + "; " + id(2) + " is lost"},
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
