package nodelabels

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

// fixture is a writer that follows states of a test, in a synctest bubble.
type fixture struct {
	t      *testing.T
	path   string
	states *watch.Value[core.State]
	config core.Config
	log    logbuffer.Buffer
	writer *Writer
	stop   func()
}

func (f *fixture) State() core.State            { return f.states.Load() }
func (f *fixture) Watchdog() *watchdog.Registry { return nil }
func (f *fixture) Changed() <-chan struct{}     { return f.states.Changed() }

func newFixture(t *testing.T) *fixture {
	f := &fixture{t: t, path: filepath.Join(t.TempDir(), "features.d", "gfd"), config: core.DefaultConfig()}
	f.config.Retire = 0
	f.states = watch.NewValue(core.NewState(f.config))
	f.mkdir()
	f.start()
	return f
}

func (f *fixture) mkdir() { check.NoError(f.t, os.MkdirAll(filepath.Dir(f.path), 0o755)) }

// start starts an agent's writer, which f.stop ends.
func (f *fixture) start() {
	ctx, cancel := context.WithCancel(f.t.Context())
	f.writer = New(Options{Path: f.path, Sys: f.t.TempDir(), MIG: f.config.MIG, Log: slog.New(slog.NewTextHandler(&f.log, nil))})
	done := make(chan struct{})
	go func() { f.writer.Run(ctx, f); close(done) }()
	f.stop = func() { cancel(); <-done }
	synctest.Wait()
}

// read publishes the state after a reading of the driver.
func (f *fixture) read(s gpu.Snapshot, obs ...health.Observation) {
	f.states.Store(f.states.Load().Read(f.config, time.Now(), s, obs...))
	synctest.Wait()
}

// labels are those of the file; nil = there is none.
func (f *fixture) labels() (l Labels, timestamp string) {
	text, err := os.ReadFile(f.path)
	if os.IsNotExist(err) {
		return nil, ""
	}
	check.NoError(f.t, err)
	_, timestamp, _ = strings.Cut(string(text), timestampLabel+"=")
	timestamp, _, _ = strings.Cut(timestamp, "\n")
	l, _ = parse(text)
	return l, timestamp
}

func (f *fixture) want(when, name, value string) (timestamp string) {
	f.t.Helper()
	l, timestamp := f.labels()
	if l[prefix+name] != value {
		f.t.Errorf("%s: %s = %q, want %q", when, name, l[prefix+name], value)
	}
	return timestamp
}

// One way of a node: the file follows what is known for certain, and nothing else.
func TestFileFollowsTheDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer func() { f.stop() }()
		if l, _ := f.labels(); l != nil {
			t.Errorf("before the first reading: %v", l)
		}
		eight := coretest.GPUs(8)
		f.read(eight)
		written := f.want("eight GPUs", "gpu.count", "8")

		time.Sleep(3 * checkEvery)
		f.read(eight, health.Observation{Kind: health.Lost, At: gpu.WholeGPU(coretest.GPU(3))})
		if again := f.want("a lost GPU", "gpu.count", "8"); again != written {
			t.Errorf("written again without a change: %s, was %s", again, written)
		}

		f.read(gpu.NoDriver(gpu.DriverAbsent, "unloaded"))
		f.want("the driver is unloaded", "gpu.count", "8")
		f.stop()
		f.want("no agent runs", "gpu.count", "8")

		f.states = watch.NewValue(core.NewState(f.config))
		f.start()
		f.want("a new agent has read nothing", "gpu.count", "8")
		time.Sleep(time.Hour)
		f.read(eight)
		if again := f.want("a new agent", "gpu.count", "8"); again != written {
			t.Errorf("a restart has written %s over %s", again, written)
		}

		check.NoError(f.t, os.Remove(f.path)) // NVIDIA's program removes its file when it ends
		time.Sleep(checkEvery + time.Second)
		f.want("another program has removed the file", "gpu.count", "8")
		check.NoError(f.t, os.WriteFile(f.path, []byte("nvidia.com/gpu.count=1\n"), 0o600))
		time.Sleep(checkEvery + time.Second)
		if again := f.want("another program has replaced the file", "gpu.count", "8"); again == written {
			t.Errorf("gfd.timestamp is still %s", again)
		}
		if info, err := os.Stat(f.path); err != nil || info.Mode() != 0o644 {
			t.Errorf("%v, %v", info.Mode(), err)
		}

		f.config.MIG = inventory.MIGMixed
		f.writer.SetStrategy(f.config.MIG)
		f.read(coretest.WithMIG(eight, 0, "1g.10gb", "1g.10gb"))
		f.want("another strategy", "mig.strategy", "mixed")
		f.want("instances", "mig-1g.10gb.count", "2")

		f.read(gpu.NewSnapshot(gpu.Snapshot{Driver: eight.Driver}))
		f.states.Store(core.NewState(f.config).Read(f.config, time.Now(), gpu.NewSnapshot(gpu.Snapshot{Driver: eight.Driver})))
		synctest.Wait()
		if l, _ := f.labels(); l != nil {
			t.Errorf("without GPUs: %v", l)
		}
	})
}

// A folder that is missing is one warning, however often it is tried, and no end.
func TestFailureIsAWarning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer func() { f.stop() }()
		check.NoError(f.t, os.Remove(filepath.Dir(f.path)))
		f.read(coretest.GPUs(2))
		time.Sleep(10 * time.Minute)
		want := "node labels: " + f.path + " can't be written: no such file or directory: --features-file needs a file of its own in a folder that exists and can be written: features.d of Node Feature Discovery"
		if got := problem.Lines(f.writer.Problems()); len(got) != 1 || got[0] != want {
			t.Errorf("%q", got)
		}
		if n := strings.Count(f.log.String(), "can't be written"); n != 1 {
			t.Errorf("logged %d times:\n%s", n, f.log.String())
		}
		f.mkdir()
		time.Sleep(2 * retryMost)
		f.want("the folder is there", "gpu.count", "2")
		if got := problem.Lines(f.writer.Problems()); got != nil {
			t.Errorf("%q", got)
		}
		entries, err := os.ReadDir(filepath.Dir(f.path))
		check.NoError(f.t, err)
		if len(entries) != 1 {
			t.Errorf("NFD would read %v", entries)
		}
	})
}

// A file that is none of node labels, such as /etc/passwd by a mistake in the setting, stays as it is: with GPUs, without any, and in an agent that
// starts.
func TestFileOfAnotherProgramStays(t *testing.T) {
	for name, text := range map[string]string{
		"passwd": "root:x:0:0:root:/root:/bin/sh\n", "a shell's": "A=b\n", "another program's labels": "nvidia.com/gpu.count=1\nexample.com/x=y\n", "large": strings.Repeat("x", maxSize+1),
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t)
			defer func() { f.stop() }()
			check.NoError(f.t, os.WriteFile(f.path, []byte(text), 0o600))
			f.read(coretest.GPUs(2))
			f.states.Store(core.NewState(f.config).Read(f.config, time.Now(), gpu.NewSnapshot(gpu.Snapshot{Driver: coretest.GPUs(2).Driver})))
			synctest.Wait()
			if got, err := os.ReadFile(f.path); err != nil || string(got) != text {
				t.Errorf("%s: the file is %.50q, %v", name, got, err)
			}
			if got := problem.Lines(f.writer.Problems()); len(got) != 1 || !strings.Contains(got[0], f.path+" exists and is no file of node labels: it is neither replaced nor removed: --features-file needs a file of its own") {
				t.Errorf("%s: %q", name, got)
			}
			check.NoError(f.t, os.Remove(f.path))
			f.read(coretest.GPUs(2))
			time.Sleep(2 * retryMost)
			f.want(name+" removed", "gpu.count", "2")
		})
	}
}
