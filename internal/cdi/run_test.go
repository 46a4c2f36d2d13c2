package cdi

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	info, err := os.Stat(path)
	check.NoError(t, err)
	return info.Sys().(*syscall.Stat_t).Ino
}

// never checks for a while that something does not happen.
func never(t *testing.T, what string, happened func() bool) {
	t.Helper()
	for began := time.Now(); time.Since(began) < 400*time.Millisecond; time.Sleep(5 * time.Millisecond) {
		if happened() {
			t.Fatal(what)
		}
	}
}

// The file is replaced when the driver is another incarnation, even if it is equal, and when the agent starts; a reading
// that changes nothing does nothing.
func TestReplacedOnlyWhenDue(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	_, stop := n.run(t, m)
	m.read(coretest.GPUs(2))
	m.defined(t, ids(0, 1)...)
	check.Until(t, "the folder is watched", func() bool { return strings.Contains(n.log.String(), "written") })
	time.Sleep(300 * time.Millisecond) // the watch of the folder begins with a pass
	first, sets := inode(t, n.file()), m.sets
	for range 10 {
		m.read(coretest.GPUs(2))
		sick := health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 13}
		m.read(coretest.GPUs(2), sick)
	}
	never(t, "replaced without a reason", func() bool { return inode(t, n.file()) != first || m.sets != sets })

	m.read(gpu.NoDriver(gpu.DriverFailed, "unloaded"))
	never(t, "touched without a driver", func() bool { return inode(t, n.file()) != first || m.sets != sets })
	m.read(coretest.GPUs(2))
	m.defined(t, ids(0, 1)...)
	second := inode(t, n.file())
	if second == first {
		t.Error("not replaced for another incarnation of the driver")
	}
	stop()
	if _, err := os.Stat(n.file()); err != nil {
		t.Errorf("after the end of the agent: %v", err)
	}
	m2 := newMonitor(required())
	n.run(t, m2)
	m2.read(coretest.GPUs(2))
	m2.defined(t, ids(0, 1)...)
	if inode(t, n.file()) == second {
		t.Error("not replaced by a new process")
	}
}

// Nothing is written or watched as long as no unit needs a specification, unless an earlier agent left one: containers that were given a
// name of it may restart.
func TestOnlyIfNeeded(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(inventory.Injection{Runtime: true})
	_, stop := n.run(t, m)
	m.read(coretest.GPUs(1))
	never(t, "written without need", func() bool { _, err := os.Stat(n.Folder); return err == nil })
	stop()
	write(t, n.file(), "{}", 0o600)
	n.run(t, m)
	check.Until(t, "the file of an earlier agent is replaced", func() bool {
		info, err := os.Stat(n.file())
		return err == nil && info.Mode() == 0o644 && info.Size() > 1000
	})
}

// The file is removed when there is no device, and stays when the agent ends; a left-over temporary file is removed.
func TestRemoval(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	left := filepath.Join(n.Folder, "."+filepath.Base(n.file())+"123")
	write(t, left, "half", 0o644)
	write(t, n.Folder+"/nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{name: all, containerEdits: {env: [A=B]}}]\n", 0o644)
	n.run(t, m)
	m.read(coretest.GPUs(1))
	m.defined(t, ids(0)...)
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("temporary file: %v", err)
	}
	none := coretest.GPUs(1)
	none.Devices = nil
	other := coretest.GPUs(2) // another GPU is where the first one was: that one is gone
	other.Devices = other.Devices[1:]
	other.Devices[0].PCI = coretest.GPUs(1).Devices[0].PCI
	m.read(other)
	m.defined(t, ids(1)...)
	m.change(func(core.State) core.State {
		s := core.NewState(m.cfg)
		s.Incarnation = 5
		return s.Read(m.cfg, time.Now(), none)
	})
	check.Until(t, "the file is removed", func() bool { _, err := os.Stat(n.file()); return errors.Is(err, fs.ErrNotExist) })

	m.read(coretest.GPUs(1))
	m.defined(t, ids(0)...)
	files := List(n.Options)
	if len(files) != 2 || !files[0].Own || files[0].Path != n.file() || len(files[0].Devices) != 3 || files[1].Own || files[1].Kind != "nvidia.com/gpu" {
		t.Errorf("files %+v", files)
	}
}

// cdi remove removes the files of the agent's vendor and no other.
func TestRemove(t *testing.T) {
	n := newNode(t)
	var own []string
	for _, class := range []string{"gpu", "imex-channel", "gdrcopy", "gds", "mofed"} {
		own = append(own, filepath.Join(n.Folder, vendor+"-"+class+".json"))
		write(t, own[len(own)-1], "{}", 0o644)
	}
	write(t, n.Folder+"/."+vendor+"-gpu.json77", "", 0o644)
	others := []string{"." + vendor + "-other.json77", "example.com-gpu.json", vendor + "-gpu.json.bak", vendor + "-gpu.yaml"}
	for _, name := range others {
		write(t, filepath.Join(n.Folder, name), "{}", 0o644)
	}
	removed, err := Remove(n.Options)
	if err != nil || !slices.Equal(removed, own) {
		t.Errorf("removed %v, %v", removed, err)
	}
	left, _ := os.ReadDir(n.Folder)
	var names []string
	for _, e := range left {
		names = append(names, e.Name())
	}
	slices.Sort(others)
	if !slices.Equal(names, others) {
		t.Errorf("left: %v", names)
	}
	if removed, err := Remove(n.Options); err != nil || len(removed) > 0 {
		t.Errorf("again: %v, %v", removed, err)
	}
}

// A disk that hangs delays nothing but the specification: the inventory is complete in time, and the agent ends in time.
func TestDiskHangs(t *testing.T) {
	t.Parallel()
	n, m := newNode(t), newMonitor(required())
	library := n.root + "/usr/lib/x86_64-linux-gnu/libnvidia-hangs.so." + version
	if err := syscall.Mkfifo(library, 0o644); err != nil { // to open it waits for a writer
		t.Fatal(err)
	}
	_, stop := n.run(t, m)
	began := time.Now()
	m.read(coretest.GPUs(1))
	s := m.defined(t)
	if took := time.Since(began); took > 2*time.Second || s.Allocatable.Provisional() || s.Host.CDI.Problem != slow {
		t.Errorf("after %v: provisional %v, %+v", took, s.Allocatable.Provisional(), s.Host.CDI)
	}
	if once := ReadOnce(n.Options, s); once.Problem != slow {
		t.Errorf("read once: %+v", once)
	}
	writer, err := os.OpenFile(library, os.O_WRONLY, 0)
	check.NoError(t, err)
	m.defined(t, ids(0)...)
	_ = writer.Close()

	m.read(gpu.NoDriver(gpu.DriverAbsent, "unloaded"))
	m.read(coretest.GPUs(1)) // hangs again, as the files are looked for in each incarnation
	m.await(t, "slow", func(s core.State) bool { return s.Host.CDI.Problem == slow })
	began = time.Now()
	stop()
	if took := time.Since(began); took > time.Second {
		t.Errorf("ended after %v", took)
	}
	// The abandoned pass ends later. It leaves the file to the next agent.
	before := inode(t, n.file())
	if writer, err = os.OpenFile(library, os.O_WRONLY|syscall.O_NONBLOCK, 0); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close() }()
	never(t, "written after the end", func() bool { return inode(t, n.file()) != before })
}

// inspect without an agent: what an agent would define, and nothing is written.
func TestReadOnce(t *testing.T) {
	n, m := newNode(t), newMonitor(required())
	if c := ReadOnce(n.Options, m.State()); c.Problem != "the driver is not ready" {
		t.Errorf("without a driver: %+v", c)
	}
	m.read(coretest.GPUs(2))
	c := ReadOnce(n.Options, m.State())
	if c.Problem != "" || !c.Usable || len(c.Defined) != 2 || c.Incarnation != 1 || len(c.Libraries) < 20 {
		t.Errorf("%+v", c)
	}
	if _, err := os.Stat(n.Folder); err == nil {
		t.Error("the folder was made")
	}
	n.Folder = "/nowhere/cdi"
	if c := ReadOnce(n.Options, m.State()); !strings.Contains(c.Problem, "/nowhere/cdi: no such file") || c.Usable || len(c.Defined) > 0 {
		t.Errorf("%+v", c)
	}
	if c := ReadOnce(Options{}, m.State()); c != nil {
		t.Errorf("without a vendor: %+v", c)
	}
}

// A device is out of the offer when withdraw returns, before its name is taken out of the file.
func TestWithdraw(t *testing.T) {
	n, m := newNode(t), newMonitor(required())
	m.read(coretest.GPUs(2))
	l := loop{Writer: New(n.Options), monitor: m}
	l.set(&inventory.CDI{Incarnation: 1, Defined: ids(0, 1)})
	l.withdraw(t.Context(), ids(1))
	for u := range m.State().Allocatable.Units() {
		if want := u.Device.ID == coretest.GPU(1); u.Health.Schedulable() != want {
			t.Errorf("%s is %s", u.ID, u.Health)
		}
	}
}
