package usage

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// A reservation makes a reading follow soon, also when nothing has happened for long, and the ones after it more frequent.
func TestWakeWhileIdle(t *testing.T) {
	n := newNode(t)
	watched(t, n, inventory.OccupancyReport, holders.Nomad, func(w *Watcher) {
		time.Sleep(time.Minute)
		for was := n.count(); n.count() == was; {
			time.Sleep(100 * time.Millisecond) // until just after a reading
		}
		time.Sleep(5 * time.Second)
		was := n.count()
		w.Wake()
		if time.Sleep(wakeDelay - 10*time.Millisecond); n.count() != was {
			t.Error("read before the orchestrator had time to record it")
		}
		if time.Sleep(20 * time.Millisecond); n.count() != was+1 {
			t.Error("not read soon")
		}
		if time.Sleep(activeFor - time.Second); n.count() < was+9 {
			t.Errorf("%d readings within %v", n.count()-was, activeFor)
		}
	})
}

// What could not be read is a problem of the table and nothing more. A node without a driver is none.
func TestProblems(t *testing.T) {
	n := newNode(t)
	watched(t, n, inventory.OccupancyReport, holders.Nomad, func(w *Watcher) {
		for _, c := range []struct {
			usage, record error
			want          []string
		}{
			{errors.New("hangs"), nil, []string{"usage: hangs"}},
			{gpu.ErrNoDriver, errors.New("refused"), []string{"owners: refused"}},
			{nil, nil, nil},
		} {
			n.locked(func() { n.usageErr, n.recordErr = c.usage, c.record })
			if time.Sleep(2 * idleInterval); !slices.Equal(problem.Lines(w.Table().Problems), c.want) || w.Table().HoldersKnown != (c.record == nil) {
				t.Errorf("%v, want %v", w.Table(), c.want)
			}
		}
	})
}

// Run makes job files of the tables and removes them at its end, and those that an agent left.
func TestRunWritesJobFiles(t *testing.T) {
	n := newNode(t)
	n.record.Holders = []holders.Holder{{Work: holders.Work{Orchestrator: holders.Nomad, ID: allocID}, Device: coretest.GPU(0)}}
	folder := t.TempDir()
	check.NoError(t, os.WriteFile(filepath.Join(folder, ".tandem-nomad"), []byte("1\n"), 0o600), os.WriteFile(filepath.Join(folder, "1"), []byte("old\n"), 0o600))
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		w := New(Options{Mode: inventory.OccupancyReport, Orchestrator: holders.Nomad, Holders: n.holders, ProcRoot: n.proc, MappingDir: folder, Log: slog.New(slog.DiscardHandler)})
		done := make(chan struct{})
		go func() { defer close(done); w.Run(ctx, n) }()
		synctest.Wait()
		files(t, folder, map[string]string{"0": allocID + "\n", ".tandem-nomad": "0\n"})
		cancel()
		<-done
		files(t, folder, map[string]string{})
	})
}

// A folder that can't be written is logged once, and so is that it can be again.
func TestJobFilesFail(t *testing.T) {
	var log bytes.Buffer
	inv := newNode(t).state.Allocatable
	held := use.Table{Devices: []use.Device{{ID: coretest.GPU(0), Holders: []holders.Holder{{Work: holders.Work{Orchestrator: holders.Nomad, ID: allocID}}}}}}
	folder := filepath.Join(t.TempDir(), "jobs")
	check.NoError(t, os.WriteFile(folder, nil, 0o600)) // no folder
	f := jobFiles{folder: folder, orchestrator: holders.Nomad, log: slog.New(slog.NewTextHandler(&log, nil))}
	f.begin()
	for range 3 {
		f.write(inv, held)
	}
	check.NoError(t, os.Remove(folder), os.MkdirAll(filepath.Join(folder, "0"), 0o755)) // a folder in the place of the file
	f.write(inv, held)
	if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "not written") {
		t.Errorf("%s", text)
	}
	check.NoError(t, os.Remove(filepath.Join(folder, "0")))
	for range 2 {
		f.write(inv, held)
	}
	files(t, folder, map[string]string{"0": allocID + "\n", ".tandem-nomad": "0\n"})
	if text := log.String(); strings.Count(text, "\n") != 2 || !strings.Contains(text, "written again") {
		t.Errorf("%s", text)
	}
	check.NoError(t, os.Remove(filepath.Join(folder, "0")))
	f.write(inv, use.Table{})
	files(t, folder, map[string]string{".tandem-nomad": "0\n"})
	if text := log.String(); strings.Count(text, "\n") != 2 {
		t.Errorf("a file that is already removed: %s", text)
	}
}
