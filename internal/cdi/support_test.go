package cdi

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	vendor  = "k8s.device-plugin.nvidia.com"
	version = "580.95.05" // of coretest.GPUs
)

// monitor is a monitor whose readings a test gives.
type monitor struct {
	cfg   core.Config
	tasks *watchdog.Registry
	state *watch.Value[core.State]
	mu    sync.Mutex // of changes of state
	sets  int        // calls of SetCDI
}

func newMonitor(injection inventory.Injection) *monitor {
	cfg := core.DefaultConfig()
	cfg.Injection, cfg.MIG = injection, inventory.MIGMixed
	return &monitor{cfg: cfg, tasks: watchdog.NewRegistry(), state: watch.NewValue(core.NewState(cfg))}
}

func (m *monitor) change(to func(core.State) core.State) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.Store(to(m.state.Load()))
}

func (m *monitor) read(s gpu.Snapshot, checks ...health.Observation) {
	m.change(func(st core.State) core.State { return st.Read(m.cfg, time.Now(), s, checks...) })
}

func (m *monitor) State() core.State { return m.state.Load() }

func (m *monitor) Watch(ctx context.Context) iter.Seq[*inventory.Allocatable] {
	return func(yield func(*inventory.Allocatable) bool) {
		for s := range m.state.Watch(ctx) {
			if !yield(s.Allocatable) {
				return
			}
		}
	}
}

func (m *monitor) SetCDI(c *inventory.CDI) {
	m.change(func(s core.State) core.State {
		h := s.Host
		h.CDI = c
		m.sets++
		return s.WithHost(m.cfg, time.Now(), h)
	})
}

func (m *monitor) Watchdog() *watchdog.Registry { return m.tasks }

// await waits until the state is as wanted.
func (m *monitor) await(t *testing.T, what string, ok func(core.State) bool) core.State {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for s := range m.state.Watch(ctx) {
		if ok(s) {
			return s
		}
	}
	s := m.State()
	t.Fatalf("%s: not so after 20 s: CDI %+v", what, s.Host.CDI)
	return s
}

// defined waits until these devices, and no others, are defined for the present incarnation.
func (m *monitor) defined(t *testing.T, ids ...gpu.DeviceID) core.State {
	t.Helper()
	return m.await(t, fmt.Sprintf("%v defined", ids), func(s core.State) bool {
		c := s.Host.CDI
		return c != nil && c.Incarnation == s.Incarnation && fmt.Sprint(c.Defined) == fmt.Sprint(ids)
	})
}

// node is a node with a driver's installation and a folder of specifications.
type node struct {
	Options
	root string
	log  *logbuffer.Buffer
}

// newNode has the files of a driver and, under bin/, a hook program without a version.
func newNode(t testing.TB) *node {
	t.Helper()
	root, folder := t.TempDir(), filepath.Join(t.TempDir(), "cdi")
	check.NoError(t, simdriver.WriteDriverFiles(root, version))
	write(t, root+"/usr/bin/nvidia-ctk", "#!/bin/sh\n", 0o755)
	write(t, root+"/usr/bin/nvidia-smi", "#!/bin/sh\n", 0o755)
	check.NoError(t, os.MkdirAll(root+"/dev", 0o755))
	log := &logbuffer.Buffer{}
	return &node{root: root, log: log, Options: Options{
		Vendor: vendor, Folder: folder, DriverRoot: "/", ContainerRoot: root, DevRoot: "/", ContainerDevRoot: root, SysRoot: root + "/sys",
		Log: slog.New(slog.NewTextHandler(log, nil)),
	}}
}

func (n *node) file() string { return filepath.Join(n.Folder, vendor+"-gpu.json") }

// run runs a writer until the test, or stop, ends it.
func (n *node) run(t *testing.T, m *monitor) (w *Writer, stop func()) {
	t.Helper()
	w = New(n.Options)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); w.Run(ctx, m) }()
	stop = func() { cancel(); <-ended }
	t.Cleanup(stop)
	return w, stop
}

// spec reads a specification as a runtime does.
func (n *node) spec(t *testing.T) *specs.Spec {
	t.Helper()
	s, err := cdi.ReadSpec(n.file(), 0)
	check.NoError(t, err)
	return s.Spec
}

func deviceOf(t *testing.T, s *specs.Spec, name string) specs.Device {
	t.Helper()
	for _, d := range s.Devices {
		if d.Name == name {
			return d
		}
	}
	t.Fatalf("no device %s", name)
	return specs.Device{}
}

func write(t testing.TB, path, text string, mode os.FileMode) {
	t.Helper()
	check.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	check.NoError(t, os.WriteFile(path, []byte(text), mode))
}

func required() inventory.Injection { return inventory.Injection{CDI: inventory.CDIRequired} }

func ids(n ...int) (all []gpu.DeviceID) {
	for _, i := range n {
		all = append(all, coretest.GPU(i))
	}
	return all
}
