package cdi

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// While GPUs are partitioned, lose nodes, disappear and come back with other drivers, every name that a reservation
// returns is in the file on disk, and names of instances that were removed are not.
func TestEveryReservedNameIsDefined(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	m.cfg.Retire = 50 * time.Millisecond
	n.run(t, m)
	r := rand.New(rand.NewPCG(7, 7))
	layouts := [][]string{nil, {"1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"}, {"3g.40gb", "3g.40gb"}, {"4g.40gb", "1g.10gb+gfx"}}
	checked, resolved := 0, 0
	check := func() {
		before := m.State()
		cache, err := cdi.NewCache(cdi.WithSpecDirs(n.Folder), cdi.WithAutoRefresh(false))
		check.NoError(t, err)
		after := m.State()
		for u := range before.Allocatable.Units() {
			plan, err := before.Allocatable.Reserve(u.ID)
			if err != nil {
				continue
			}
			if _, err := after.Allocatable.Reserve(u.ID); err != nil {
				continue // it was withdrawn while the file was read
			}
			checked++
			for _, name := range plan.CDI {
				if cache.GetDevice(name) == nil {
					t.Fatalf("%s is not in the file: %v", name, cache.GetErrors())
				}
				resolved++
			}
		}
	}
	for step := range 150 {
		s := coretest.GPUs(4)
		for g := range 4 {
			if layout := layouts[r.IntN(len(layouts))]; layout != nil {
				s = coretest.WithMIG(s, g, layout...)
				for i := range s.Devices { // a new instance has a new UUID
					if d := &s.Devices[i]; d.Profile != "" && d.At.GPU == coretest.GPU(g) {
						d.ID = gpu.DeviceID(fmt.Sprintf("MIG-%08d-0000-4000-8000-%06d%06d", step/3, g, len(layout)*10+d.Instance))
					}
				}
			}
		}
		switch r.IntN(6) {
		case 0:
			m.read(gpu.NoDriver(gpu.DriverAbsent, "unloaded"))
			continue
		case 1:
			gone := s.Nodes[r.IntN(len(s.Nodes))]
			s.Nodes = slices.DeleteFunc(slices.Clone(s.Nodes), func(p string) bool { return p == gone })
		case 2:
			lost := s.Devices[0].At.GPU
			s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d gpu.Device) bool { return d.At.GPU == lost })
		}
		m.read(gpu.NewSnapshot(s))
		for range 8 {
			check()
			time.Sleep(time.Duration(r.IntN(3)) * time.Millisecond)
		}
	}
	final := coretest.WithMIG(coretest.GPUs(4), 1, "3g.40gb", "3g.40gb")
	m.read(final)
	s := m.await(t, "the last reading is defined", func(s core.State) bool {
		c := s.Host.CDI
		return c != nil && c.Incarnation == s.Incarnation && slices.Contains(c.Defined, coretest.Instance(1, 1)) && slices.Contains(c.Defined, coretest.GPU(3))
	})
	names := 0
	for _, d := range n.spec(t).Devices {
		if strings.HasPrefix(d.Name, "MIG-") || strings.HasPrefix(d.Name, "GPU-") {
			names++
		}
	}
	if names != len(s.Snapshot.Devices) {
		t.Errorf("%d names for %d devices", names, len(s.Snapshot.Devices))
	}
	t.Logf("%d reservations, %d names", checked, resolved)
	if checked < 500 {
		t.Errorf("only %d reservations", checked)
	}
}

// A specification for 8 GPUs within 20 ms and one for 112 MIG instances within 50 ms. In an unchanged incarnation the files of
// the driver are known.
func BenchmarkPass(b *testing.B) {
	eight, instances := coretest.GPUs(8), coretest.GPUs(16)
	for g := range 16 {
		instances = coretest.WithMIG(instances, g, "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb")
	}
	for name, snapshot := range map[string]gpu.Snapshot{"8 GPUs": eight, "112 instances": instances} {
		for _, change := range []string{"driver", "devices", "nothing"} {
			b.Run(name+"/"+change+" changed", func(b *testing.B) {
				n, m := newNode(b), newMonitor(inventory.Injection{CDI: inventory.CDIRequired})
				w := New(n.Options)
				m.read(snapshot)
				s := m.State()
				if out := w.pass(b.Context(), s); out.failed || len(out.cdi.Defined) != len(snapshot.Devices) {
					b.Fatalf("%+v", out.cdi)
				}
				began := cpuTime()
				defer func() { b.ReportMetric(float64((cpuTime()-began).Microseconds())/1000/float64(b.N), "cpu-ms/op") }() // also on a busy machine
				for i := 0; b.Loop(); i++ {
					switch change {
					case "driver":
						s.Incarnation++
					case "devices":
						s.Snapshot.Devices = snapshot.Devices[i&1:] // another file each time
					}
					if out := w.pass(b.Context(), s); out.failed {
						b.Fatalf("%+v", out.cdi)
					}
				}
			})
		}
	}
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // does not fail
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
