package cdi

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The driver is upgraded on disk while its module is the old one: the file stays, and no device is offered. When the module is
// loaded, the file has the new paths.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	w, _ := n.run(t, m)
	m.read(coretest.GPUs(1))
	m.defined(t, ids(0)...)
	before := inode(t, n.file())
	time.Sleep(200 * time.Millisecond) // the watch of the libraries begins
	const next = "590.10.01"
	check.NoError(t, simdriver.WriteDriverFiles(n.root, next))
	old, _ := filepath.Glob(n.root + "/usr/lib/x86_64-linux-gnu/*.so." + version)
	for _, path := range old {
		check.NoError(t, os.Remove(path))
	}
	s := m.defined(t)
	if !strings.Contains(s.Host.CDI.Problem, "libcuda.so."+version+" is not below "+n.root) || inode(t, n.file()) != before {
		t.Errorf("after the upgrade on disk: %q", s.Host.CDI.Problem)
	}
	for u := range s.Allocatable.Units() {
		if u.Health.Schedulable() || !strings.Contains(u.Health.String(), "libcuda") {
			t.Errorf("unit is %s", u.Health)
		}
	}
	if lines := problem.Lines(w.Problems()); len(lines) != 1 || !strings.Contains(lines[0], "libcuda.so."+version) {
		t.Errorf("warnings %q", lines)
	}
	m.read(gpu.NoDriver(gpu.DriverAbsent, "unloaded"))
	loaded := coretest.GPUs(1)
	loaded.Driver.Version = next
	m.read(loaded)
	m.defined(t, ids(0)...)
	for _, mount := range n.spec(t).ContainerEdits.Mounts {
		if _, err := os.Stat(filepath.Join(n.root, mount.HostPath)); err != nil || strings.Contains(mount.HostPath, version) {
			t.Errorf("mount of %s: %v", mount.HostPath, err)
		}
	}
	if lines := problem.Lines(w.Problems()); len(lines) != 0 {
		t.Errorf("warnings %q", lines)
	}
}

// A GPU that is lost or hangs changes nothing for the others, and its container fails by its name.
func TestSickDevices(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	n.run(t, m)
	m.read(coretest.GPUs(3))
	m.defined(t, ids(0, 1, 2)...)
	reading := coretest.GPUs(3)
	hung := reading.Devices[1]
	reading.Devices = []gpu.Device{reading.Devices[0]} // the driver does not list GPU 2 any more
	reading.Excluded = []gpu.Exclusion{{Index: 1, At: hung.At, PCI: hung.PCI, Failure: gpu.FailureHung, Reason: "hangs"}}
	began := time.Now()
	m.read(reading)
	check.Until(t, "the index of the lost GPU is no name", func() bool { return len(n.spec(t).Devices) == 6 })
	if took := time.Since(began); took > time.Second {
		t.Errorf("written after %v", took)
	}
	s := n.spec(t)
	for name, nodes := range map[string]string{"0": "/dev/nvidia0", "1": "/dev/nvidia1", string(coretest.GPU(0)): "/dev/nvidia0", string(coretest.GPU(1)): "/dev/nvidia1", string(coretest.GPU(2)): "/dev/nvidia2"} {
		if d := deviceOf(t, s, name); len(d.ContainerEdits.DeviceNodes) != 1 || d.ContainerEdits.DeviceNodes[0].Path != nodes {
			t.Errorf("%s: %+v", name, d.ContainerEdits)
		}
	}
	for u := range m.State().Allocatable.Units() {
		if want := u.Device.ID == coretest.GPU(0); u.Health.Schedulable() != want {
			t.Errorf("%s is %s", u.ID, u.Health)
		}
	}
}

// A missing node costs the device that needs it, until it is there.
func TestMissingNode(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	n.run(t, m)
	all := coretest.GPUs(2)
	without := slices.DeleteFunc(slices.Clone(all.Nodes), func(p string) bool { return p == "/dev/nvidia1" })
	reading := all
	reading.Nodes = without
	m.read(reading)
	s := m.defined(t, ids(0)...)
	u, _ := s.Allocatable.Unit(inventory.UnitID(coretest.GPU(1)))
	if u.Health.Schedulable() || !strings.Contains(u.Health.String(), "device node /dev/nvidia1 is missing") {
		t.Errorf("GPU 1 is %s", u.Health)
	}
	if d := deviceOf(t, n.spec(t), string(coretest.GPU(1))); d.ContainerEdits.DeviceNodes[0].Path != "/dev/nvidia1" {
		t.Errorf("%+v", d)
	}
	m.change(func(s core.State) core.State { return s.WithNodes(m.cfg, time.Now(), all.Nodes) })
	m.defined(t, ids(0, 1)...)
	m.change(func(s core.State) core.State {
		return s.WithNodes(m.cfg, time.Now(), slices.DeleteFunc(slices.Clone(all.Nodes), func(p string) bool { return p == "/dev/nvidia-uvm" }))
	})
	m.defined(t)
	m.change(func(s core.State) core.State { return s.WithNodes(m.cfg, time.Now(), all.Nodes) })
	m.defined(t, ids(0, 1)...)
	if nodes := fmt.Sprint(len(n.spec(t).ContainerEdits.DeviceNodes)); nodes != "3" {
		t.Errorf("%s control nodes", nodes)
	}
}

// A file of the driver that is gone, such as the socket of a daemon that has ended, is left out: a container with its mount can't start.
func TestFileGone(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	m.read(coretest.GPUs(1))
	w := New(n.Options)
	has := func() bool {
		return slices.ContainsFunc(n.spec(t).ContainerEdits.Mounts, func(m *specs.Mount) bool { return m.ContainerPath == "/usr/bin/nvidia-smi" })
	}
	if out := w.pass(t.Context(), m.State()); out.failed || !has() {
		t.Fatalf("%+v", out.cdi)
	}
	check.NoError(t, os.Remove(n.root+"/usr/bin/nvidia-smi"))
	if out := w.pass(t.Context(), m.State()); out.failed || len(out.cdi.Defined) != 1 || has() {
		t.Errorf("%+v", out.cdi)
	}
}
