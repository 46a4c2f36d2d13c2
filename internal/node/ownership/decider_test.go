package ownership

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/test/check"
)

// record is an orchestrator's record of holders.
type record struct {
	mu      sync.Mutex
	by      map[gpu.DeviceID]string
	at      gpu.Placement // of the holder's device; the zero value = a whole GPU
	unknown bool
	never   bool
	late    func(gpu.DeviceID) string // the holder of a GPU that by has not; nil = none
	reads   atomic.Int64
}

func (r *record) set(id gpu.DeviceID, holder string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.by, r.late, r.at = map[gpu.DeviceID]string{id: holder}, nil, gpu.Placement{}
	if holder == "" {
		r.by = nil
	}
}

// setAt is set for hardware of a GPU.
func (r *record) setAt(at gpu.Placement, holder string) {
	r.set(at.GPU, holder)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at = at
}

func (r *record) setUnknown(unknown bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unknown = unknown
}

func (r *record) setNever() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.never, r.unknown = true, true
}

func (r *record) read() holders.Record {
	r.reads.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	h := holders.Record{Complete: !r.unknown, Never: r.never, Missing: "the record"}
	for n := range 8 {
		id := coretest.GPU(n)
		by := r.by[id]
		if by == "" && r.late != nil {
			by = r.late(id)
		}
		if by != "" {
			held := coretest.Held(id, by)
			if r.at.GPU == id {
				held[0].At = r.at
			}
			h.Holders = append(h.Holders, held...)
		}
	}
	return h
}

// node is two agents with the records of their orchestrators.
type host struct {
	dir                 string
	cfg                 map[string]core.Config
	plugins, dra, nomad *record
	resets              func() (bool, error) // whether an nvidia-smi runs; nil = that is not known
}

func newHost(t *testing.T) host {
	return host{dir: t.TempDir(), cfg: map[string]core.Config{
		"nomad-gpu": on(inventory.OverlapRefuse, 0, 1), "k8s-gpu": on(inventory.OverlapRefuse, 1, 2),
	}, plugins: &record{}, dra: &record{}, nomad: &record{}}
}

func (h host) startNomad(t *testing.T) *agent {
	t.Helper()
	return start(t, setup{name: "nomad-gpu", stateDir: h.dir, cfg: h.cfg["nomad-gpu"], resets: h.resets, serve: func(w *Watcher) {
		w.Serve([]inventory.API{inventory.Nomad}, Readers{inventory.Nomad: h.nomad.read})
	}})
}

func (h host) startKube(t *testing.T, apis ...inventory.API) *agent {
	t.Helper()
	cfg := h.cfg["k8s-gpu"]
	cfg.API = apis[0]
	a := start(t, setup{name: "k8s-gpu", stateDir: h.dir, cfg: cfg, resets: h.resets, serve: func(w *Watcher) {
		w.Serve(apis, Readers{inventory.DevicePlugin: h.plugins.read, inventory.DRA: h.dra.read})
	}})
	defined := &inventory.CDI{Kind: "k/gpu", Incarnation: 1} // which DRA needs
	for n := range 8 {
		defined.Defined = append(defined.Defined, coretest.GPU(n))
	}
	a.SetCDI(defined)
	return a
}

// move sets the target of a GPU, as the command does.
func (h host) move(t *testing.T, n int, to inventory.API) {
	t.Helper()
	check.NoError(t, Change(t.Context(), h.dir, func(f File) (File, error) {
		return f.WithTargets([]TargetChange{{GPU: coretest.GPU(n), Target: to, From: inventory.Nomad}}, time.Now()), nil
	}))
}

// expect checks through which API each GPU takes work.
func (a *agent) expect(t *testing.T, when string, want map[int]inventory.API) {
	t.Helper()
	got := map[int]inventory.API{}
	for u := range a.Current().Units() {
		if u.Health.Schedulable() {
			got[u.Device.Index] = u.API
		}
	}
	if len(got) != len(want) {
		t.Errorf("%s: %v take work, want %v\n%s", when, got, want, a.log)
		return
	}
	for n, api := range want {
		if got[n] != api {
			t.Errorf("%s: GPU %d takes work through %q, want %q\n%s", when, n, got[n], api, a.log)
		}
	}
}

type through = map[int]inventory.API

// A GPU goes from Nomad to the kubelet and back. It stays with its owner while work has it, while that is not known, and over restarts
// of both agents, and is never offered by both.
func TestGPUMovesBetweenAgents(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(10 * time.Second)
		k := h.startKube(t, inventory.DevicePlugin)
		pass(10 * time.Second)
		n.expect(t, "at first", through{0: "", 1: ""})
		k.expect(t, "at first", through{2: inventory.DevicePlugin})

		h.nomad.set(coretest.GPU(1), "job a (allocation 1)")
		h.move(t, 1, inventory.DevicePlugin)
		pass(2 * time.Minute)
		n.expect(t, "while a job has it", through{0: ""})
		k.expect(t, "while a job has it", through{2: inventory.DevicePlugin})
		for u := range n.Current().Units() {
			if u.Device.Index == 1 && (u.Health.Reason != health.ReasonMoving || !strings.Contains(u.Health.String(), "moves (to device-plugin: waits for the end of running work)")) {
				t.Errorf("the GPU that leaves is %s", u.Health)
			}
		}
		if st := n.watcher.Status(); len(st) != 1 || st[0].Waits != "the end of job a (allocation 1)" {
			t.Errorf("the move waits for %+v", st)
		}

		n.end()
		h.nomad.set(coretest.GPU(1), "")
		pass(2 * time.Minute)
		k.expect(t, "while the agent that has it is away", through{2: inventory.DevicePlugin})
		h.nomad.setUnknown(true)
		n = h.startNomad(t)
		pass(2 * time.Minute)
		k.expect(t, "while the record is not known", through{2: inventory.DevicePlugin})
		h.nomad.setUnknown(false)
		pass(DefaultSettle - 5*time.Second)
		k.expect(t, "within the settle time", through{2: inventory.DevicePlugin})
		pass(15 * time.Second)
		n.expect(t, "after the job", through{0: ""})
		k.expect(t, "after the job", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})

		n.end()
		k.end()
		n = h.startNomad(t)
		pass(10 * time.Second)
		n.expect(t, "after a restart, without the other agent", through{0: ""})
		k = h.startKube(t, inventory.DevicePlugin)
		pass(10 * time.Second)
		k.expect(t, "after a restart", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})

		check.NoError(t, os.RemoveAll(h.dir))
		pass(10 * time.Second)
		n.expect(t, "after the directory was removed", through{0: ""})
		k.expect(t, "after the directory was removed", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})

		check.NoError(t, Change(t.Context(), h.dir, func(f File) (File, error) { return f.WithTargets(f.Back(), time.Now()), nil }))
		pass(DefaultSettle + 20*time.Second)
		n.expect(t, "back", through{0: "", 1: inventory.Nomad})
		k.expect(t, "back", through{2: inventory.DevicePlugin})

		check.NoError(t, os.Remove(filepath.Join(h.dir, FileName)))
		h.move(t, 1, inventory.DevicePlugin)
		pass(DefaultSettle + 20*time.Second)
		n.expect(t, "after a target that was set when the file was lost", through{0: ""})
		k.expect(t, "after a target that was set when the file was lost", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})
	})
}

// The mode of a node changes while pods run: their GPUs stay with the device plugin, cordoned, until they end. It completes by itself.
// (Case 45.)
func TestChangeOfModeCompletesWhenPodsEnd(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		k := h.startKube(t, inventory.DevicePlugin)
		pass(10 * time.Second)
		k.end()
		h.plugins.set(coretest.GPU(2), "pod default/a")
		k = h.startKube(t, inventory.DRA, inventory.DevicePlugin)
		pass(time.Second)
		k.expect(t, "right after the change, by what the agent offered before", through{})
		pass(DefaultSettle + 10*time.Second)
		k.expect(t, "while the pod runs", through{1: inventory.DRA})
		h.plugins.set(coretest.GPU(2), "")
		pass(DefaultSettle + 10*time.Second)
		k.expect(t, "after the pod", through{1: inventory.DRA, 2: inventory.DRA})
		k.end()
		k = h.startKube(t, inventory.DRA, inventory.DevicePlugin)
		pass(time.Second)
		k.expect(t, "after a restart, at once", through{1: inventory.DRA, 2: inventory.DRA})
		k.end()

		h.dra.set(coretest.GPU(1), "claim default/b")
		k = h.startKube(t, inventory.DevicePlugin, inventory.DRA)
		pass(DefaultSettle + 10*time.Second)
		k.expect(t, "in the other direction, while the claim is prepared", through{2: inventory.DevicePlugin})
		h.dra.set(coretest.GPU(1), "")
		pass(DefaultSettle + 10*time.Second)
		k.expect(t, "after the claim", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})
	})
}

// What an earlier process offered is known as that whatever the clock was set to in between.
func TestChangeOfModeAcrossAStepOfTheClock(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		k := h.startKube(t, inventory.DevicePlugin)
		pass(10 * time.Second)
		k.end()
		file := filepath.Join(h.dir, FolderName, "k8s-gpu.json")
		text, err := os.ReadFile(file)
		check.NoError(t, err)
		text, err = statefile.Unseal(text)
		check.NoError(t, err)
		later := bytes.ReplaceAll(text, []byte(time.Now().UTC().Format(`"2006-`)), []byte(`"2030-`))
		if bytes.Equal(text, later) {
			t.Fatalf("no times in %s", text)
		}
		check.NoError(t, os.WriteFile(file, later, 0o600))
		k = h.startKube(t, inventory.DRA, inventory.DevicePlugin)
		pass(time.Second)
		k.expect(t, "right after the change, by what the agent offered before", through{})
		pass(DefaultSettle + 10*time.Second)
		k.expect(t, "after the settle time", through{1: inventory.DRA, 2: inventory.DRA})
	})
}

// A new node with the API dra offers its GPUs at once: nothing had them before.
func TestNewNodeWaitsForNothing(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		k := h.startKube(t, inventory.DRA, inventory.DevicePlugin)
		pass(2 * time.Second)
		k.expect(t, "after two seconds", through{1: inventory.DRA, 2: inventory.DRA})
	})
}

// In an update without a gap the new process serves the APIs of the old one while that runs, and changes them when it has ended.
func TestTwoProcessesOfAnAgent(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		old := h.startKube(t, inventory.DRA, inventory.DevicePlugin)
		pass(10 * time.Second)
		k := h.startKube(t, inventory.DRA, inventory.DevicePlugin)
		pass(2 * time.Second)
		k.expect(t, "beside the old one", through{1: inventory.DRA, 2: inventory.DRA})
		h.move(t, 2, inventory.DevicePlugin)
		pass(DefaultSettle + 10*time.Second)
		for _, a := range []*agent{old, k} {
			a.expect(t, "after a move", through{1: inventory.DRA, 2: inventory.DevicePlugin})
		}
		old.end()
		h.move(t, 2, inventory.DRA)
		pass(DefaultSettle + 20*time.Second)
		k.expect(t, "alone", through{1: inventory.DRA, 2: inventory.DRA})
	})
}

// A broken file is one warning. The last good one stays in force; an agent that has never read one gives nothing out.
func TestBrokenFileOfTheNode(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		k := h.startKube(t, inventory.DevicePlugin)
		pass(10 * time.Second)
		h.move(t, 1, inventory.DevicePlugin)
		pass(DefaultSettle + 20*time.Second)
		k.expect(t, "after the move", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})
		path := filepath.Join(h.dir, FileName)
		good, err := os.ReadFile(path)
		check.NoError(t, err)
		check.NoError(t, os.WriteFile(path, []byte(`{"version": 2, "gpus": {"GPU-1": {"target": "drra"}}}`), 0o600))
		pass(time.Minute)
		k.expect(t, "with a broken file", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})
		n.expect(t, "with a broken file", through{0: ""})
		if count := k.logged("owners of GPUs not read"); count != 1 {
			t.Errorf("%d warnings in the log:\n%s", count, k.log)
		}
		if w := problem.Lines(k.watcher.Problems()); !slices.ContainsFunc(w, func(line string) bool { return strings.Contains(line, "drra") }) {
			t.Errorf("warnings: %q", w)
		}
		k.end()
		k = h.startKube(t, inventory.DevicePlugin)
		pass(10 * time.Second)
		k.expect(t, "after a restart with a broken file", through{})
		check.NoError(t, os.WriteFile(path, good, 0o600))
		pass(10 * time.Second)
		k.expect(t, "with the file", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})
		k.expectWarnings(t, "with the file", 0)
	})
}

// Before the files of the agents are read no GPU takes work if the file has targets, or is broken.
func TestUnreadOwnership(t *testing.T) {
	for name, tc := range map[string]struct {
		make func(path string) error
		want bool
	}{
		"no file":    {func(string) error { return nil }, false},
		"no targets": {func(path string) error { return os.WriteFile(path, []byte(`{"version": 2}`), 0o600) }, false},
		"a target": {func(path string) error {
			return os.WriteFile(path, []byte(`{"version": 2, "gpus": {"GPU-1": {"target": "dra"}}}`), 0o600)
		}, true},
		"broken":        {func(path string) error { return os.WriteFile(path, []byte(`{`), 0o600) }, true},
		"not readable":  {func(path string) error { return os.Mkdir(path, 0o700) }, false},
		"a later state": {func(path string) error { return os.WriteFile(path, []byte(`{"version": 3}`), 0o600) }, true},
	} {
		dir := t.TempDir()
		check.NoError(t, tc.make(filepath.Join(dir, FileName)))
		a := &decider{stateDir: dir, apis: []inventory.API{inventory.Nomad}}
		for _, refuse := range []bool{false, true} {
			if got, want := a.unread(refuse).Required, tc.want || refuse && name == "not readable"; got != want {
				t.Errorf("%s, refuse %t: required %t, want %t", name, refuse, got, want)
			}
		}
	}
}

// An agent with one API and without targets reads no record: the kubelet and Nomad are asked for it. While a GPU moves it is read in each
// second, once for all GPUs.
func TestRecordsAreReadWhenNeeded(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		h.startNomad(t)
		h.startKube(t, inventory.DevicePlugin)
		pass(10 * time.Minute)
		if h.plugins.reads.Load()+h.nomad.reads.Load() != 0 {
			t.Errorf("%d and %d reads without a target", h.plugins.reads.Load(), h.nomad.reads.Load())
		}
		h.plugins.set(coretest.GPU(1), "pod default/train")
		h.plugins.set(coretest.GPU(2), "pod default/train")
		h.move(t, 1, inventory.Nomad)
		h.move(t, 2, inventory.Nomad)
		pass(10 * time.Second)
		before := h.plugins.reads.Load()
		pass(time.Minute)
		if n := h.plugins.reads.Load() - before; n < 55 || n > 130 {
			t.Errorf("%d reads in a minute in which two GPUs wait to leave", n)
		}
	})
}
