package history_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// exhaust makes every open of this process fail until the returned function is called.
func exhaust(t *testing.T) (restore func()) {
	t.Helper()
	var limit syscall.Rlimit
	check.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	set := func(n uint64) {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: n, Max: limit.Max}); err != nil {
			t.Error(err) // also called by a timer
		}
	}
	set(0)
	return func() { set(limit.Cur) }
}

// A process that has too many files open for a moment reads its history again: the file is intact.
func TestHistoryIsReadAgainAfterAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(t)
		d.save(d.open(), full())
		f := d.open()
		time.AfterFunc(3*time.Second, exhaust(t))
		r, boot := f.Load()
		want := full().Rebase(core.Boot{}, time.Now()) // in the bubble it is the year 2000
		if diff(want, r) != "" || boot != "b00t" {
			t.Errorf("boot %q, %s", boot, diff(want, r))
		}
		if got := d.names(); len(got) != 1 || d.logged("trying again") != 1 || len(problem.Lines(f.Problems())) > 0 {
			t.Errorf("left %v, warnings %q, log %s", got, problem.Lines(f.Problems()), d.log.String())
		}
	})
}

// If a file still can't be read after some seconds, the agent starts without its history. It keeps the file, which may be
// intact.
func TestHistoryThatCannotBeReadIsNotReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(t)
		check.NoError(t, os.MkdirAll(d.dir, 0o755))
		check.NoError(t, os.Symlink(filepath.Base(d.path()), d.path())) // ELOOP, for root, too
		began := time.Now()
		f := d.open()
		if r, _ := f.Load(); len(r.Devices) > 0 {
			t.Errorf("%+v", r)
		}
		if took := time.Since(began); took < 5*time.Second || took > 30*time.Second {
			t.Errorf("started after %v", took)
		}
		if warnings := strings.Join(problem.Lines(f.Problems()), " "); !strings.Contains(warnings, "too many levels of symbolic links") {
			t.Errorf("warnings: %q", warnings)
		}
		d.save(f, full())
		if r, _ := d.open().Load(); diff(full().Rebase(core.Boot{}, time.Now()), r) != "" {
			t.Errorf("kept %+v", r)
		}
		if to, err := os.Readlink(d.path() + ".unread"); err != nil || to != filepath.Base(d.path()) {
			t.Errorf("set aside: %q, %v", to, err)
		}
		if warnings := problem.Lines(f.Problems()); len(warnings) != 1 || !strings.Contains(warnings[0], d.path()+".unread") || f.Problem() != "" {
			t.Errorf("warnings: %q, problem %q", warnings, f.Problem())
		}
	})
}

// Five invalid files are kept: the first four and the latest.
func TestBrokenFilesDoNotReplaceEachOther(t *testing.T) {
	d := newDisk(t)
	for n := range 8 {
		d.write(fmt.Appendf(nil, "broken %d", n))
		d.open().Load()
	}
	var got []string
	for _, name := range d.names() {
		got = append(got, name+": "+string(d.read(filepath.Join(d.dir, name))))
	}
	want := []string{"k8s-gpu.json.broken: broken 0", "k8s-gpu.json.broken.1: broken 1", "k8s-gpu.json.broken.2: broken 2",
		"k8s-gpu.json.broken.3: broken 3", "k8s-gpu.json.broken.4: broken 7"}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// A file that can't be set aside is not replaced either.
func TestFileThatCannotBeSetAsideIsNotReplaced(t *testing.T) {
	d := newDisk(t)
	d.write([]byte("broken"))
	for _, suffix := range []string{"", ".1", ".2", ".3", ".4"} { // folders, which a file can't replace
		check.NoError(t, os.Mkdir(d.path()+".broken"+suffix, 0o755))
	}
	f := d.open()
	f.Load()
	d.fails(f, full(), "setting aside")
	if text := d.read(d.path()); string(text) != "broken" {
		t.Errorf("replaced by %s", text)
	}
	check.NoError(t, os.Remove(d.path()+".broken"))
	d.save(f, full())
	if text := d.read(d.path() + ".broken"); string(text) != "broken" || f.Problem() != "" {
		t.Errorf("kept %s, problem %q", text, f.Problem())
	}
}

// A state directory that was copied from another node: its GPUs are not reported as lost, and its history is set aside, once.
func TestHistoryOfAnotherNodeIsSetAside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(t)
		machine := func(first int) *coretest.Machine {
			s := coretest.GPUs(2)
			for i := range s.Devices {
				s.Devices[i].ID = coretest.GPU(first + i)
				s.Devices[i].At = gpu.WholeGPU(s.Devices[i].ID)
				s.Devices[i].PCI = gpu.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x20+first+i))
			}
			s.Links = nil
			return coretest.NewMachine(gpu.NewSnapshot(s))
		}
		units := func(m *coretest.Machine) (all []string) {
			d.run(m, func(agent *monitor.Monitor) {
				for u := range agent.Current().Units() {
					all = append(all, string(u.ID)+" "+u.Health.State.String())
				}
			})
			return all
		}
		healthy := func(first int) []string {
			return []string{string(coretest.GPU(first)) + " healthy", string(coretest.GPU(first+1)) + " healthy"}
		}
		first, second := machine(0), machine(10)
		if got := units(first); !slices.Equal(got, healthy(0)) {
			t.Fatalf("%q", got)
		}
		if got := units(second); !slices.Equal(got, healthy(10)) {
			t.Errorf("with the history of another node: %q", got)
		}
		// The second machine may have written the history once more before it read the driver, and noted in it that it is unconfirmed.
		aside := string(d.read(d.path() + ".other"))
		for n, want := range map[int]bool{0: true, 1: true, 10: false, 11: false} {
			if strings.Contains(aside, string(coretest.GPU(n))) != want {
				t.Errorf("kept aside with GPU %d %v, want %v: %s", n, !want, want, aside)
			}
		}
		if d.logged("another node") != 1 {
			t.Errorf("left %v, log %s", d.names(), d.log.String())
		}
		for _, part := range []string{string(coretest.GPU(1)), string(coretest.GPU(11)), d.path() + ".other"} {
			if d.logged(part) == 0 {
				t.Errorf("%s is not in the log: %s", part, d.log.String())
			}
		}
		units(second)
		if got := d.names(); len(got) != 2 || d.logged("another node") != 1 {
			t.Errorf("left %v after a restart, log %s", got, d.log.String())
		}
		if r, _ := d.open().Load(); len(r.Devices) != 2 || r.Devices[0].ID != coretest.GPU(10) {
			t.Errorf("%+v", r.Devices)
		}
	})
}
