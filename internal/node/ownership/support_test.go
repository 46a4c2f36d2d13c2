package ownership

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

// agent is a monitor and a watcher on a node with eight GPUs, in a synctest bubble.
type agent struct {
	*monitor.Monitor
	machine *coretest.Machine
	watcher *Watcher
	log     *logbuffer.Buffer
	end     func()
}

type setup struct {
	name, stateDir string
	cfg            core.Config

	boot       string                            // "" = b00t
	resets     func() (bool, error)              // whether an nvidia-smi runs; nil = that is not known
	serve      func(*Watcher)                    // before it runs; nil = nothing
	timings    timings                           // zero = defaultTimings
	newWatcher func() (*fsnotify.Watcher, error) // nil = inotify is unavailable: its goroutine would stop the fake time
}

func start(t *testing.T, s setup) *agent {
	t.Helper()
	a := &agent{log: &logbuffer.Buffer{}, machine: coretest.NewMachine(coretest.GPUs(8))}
	log := slog.New(slog.NewTextHandler(a.log, nil))
	a.Monitor = monitor.New(a.machine.Open, s.cfg, log, nil)
	a.watcher = New(Options{
		Agent: s.name, StateDir: s.stateDir, BootID: cmp.Or(s.boot, "b00t"), Config: s.cfg, Log: log, ResetRuns: s.resets,
	})
	if s.timings != (timings{}) {
		a.watcher.timings = s.timings
	}
	if a.watcher.newWatcher = s.newWatcher; s.newWatcher == nil {
		a.watcher.newWatcher = func() (*fsnotify.Watcher, error) { return nil, syscall.EMFILE }
	}
	if s.serve != nil {
		s.serve(a.watcher)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var parts sync.WaitGroup
	parts.Go(func() { a.watcher.Run(ctx, a) })
	parts.Go(func() {
		watch.Await(ctx, a.watcher.First(), firstAtMost)
		if err := a.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	a.end = func() { cancel(); parts.Wait() }
	t.Cleanup(a.end)
	return a
}

// nomad and kube start an agent of that name in a state directory.
func nomad(t *testing.T, dir string, cfg core.Config) *agent {
	t.Helper()
	return start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: cfg})
}

func kube(t *testing.T, dir string, cfg core.Config) *agent {
	t.Helper()
	return start(t, setup{name: "k8s-gpu", stateDir: dir, cfg: cfg})
}

// expectSchedulable checks which GPUs take new work.
func (a *agent) expectSchedulable(t *testing.T, when string, want ...int) {
	t.Helper()
	if got := a.schedulable(); !slices.Equal(got, want) {
		t.Errorf("%s: schedulable are %v, want %v", when, got, want)
	}
}

// expectWarnings checks how many warnings an operator gets.
func (a *agent) expectWarnings(t *testing.T, when string, want int) {
	t.Helper()
	if got := problem.Lines(a.watcher.Problems()); len(got) != want {
		t.Errorf("%s: warnings %q, want %d\n%s", when, got, want, a.log)
	}
}

// on offers only some GPUs.
func on(overlap inventory.OverlapMode, gpus ...int) core.Config {
	cfg := core.DefaultConfig()
	cfg.Overlap = overlap
	var only inventory.Selector
	for _, n := range gpus {
		only.IDs = append(only.IDs, coretest.GPU(n))
	}
	cfg.Policy.Include = []inventory.Selector{only}
	return cfg
}

// schedulable are the indices of the GPUs that take new work.
func (a *agent) schedulable() (gpus []int) {
	for u := range a.Current().Units() {
		if u.Health.Schedulable() {
			gpus = append(gpus, u.Device.Index)
		}
	}
	return gpus
}

// logged counts the occurrences of a text in the log.
func (a *agent) logged(text string) int { return strings.Count(a.log.String(), text) }

// pass lets fake time pass.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}
