package cdi

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// versions are those of the CDI library, with the file that names its modules.
var versions = map[string]string{"0.8.1": "v0.8.1.mod", "1.0.1": "v1.0.1.mod", "1.1.1": "go.mod"}

// readers are the programs by version; they are built once.
var readers = sync.OnceValues(func() (map[string]string, error) {
	dir, err := os.MkdirTemp("", "cdi-readers-")
	paths := map[string]string{}
	for version, mod := range versions {
		paths[version] = filepath.Join(dir, "reader-"+version)
		build := exec.Command("go", "build", "-modfile="+mod, "-o", paths[version], ".")
		build.Dir = "reader"
		if out, e := build.CombinedOutput(); err == nil && e != nil {
			err = fmt.Errorf("%w: %s", e, out)
		}
	}
	return paths, errorsOf(err, os.Chmod(dir, 0o755))
})

func TestMain(m *testing.M) {
	code := m.Run()
	if paths, err := readers(); err == nil {
		_ = os.RemoveAll(filepath.Dir(paths["1.1.1"]))
	}
	os.Exit(code)
}

func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eachVersion runs a test for each version of the library, with its reader.
func eachVersion(t *testing.T, test func(t *testing.T, reader string)) {
	t.Helper()
	paths, err := readers()
	must(t, err)
	for version, path := range paths {
		t.Run(version, func(t *testing.T) { test(t, path) })
	}
}

// process is a running reader.
type process struct {
	in  io.WriteCloser
	out *bufio.Scanner
}

func start(t *testing.T, reader string, args ...string) *process {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), reader, args...)
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	p := &process{in, bufio.NewScanner(out)}
	if got := p.line(t); got != "ready" {
		t.Fatalf("reader: %q", got)
	}
	return p
}

func (p *process) line(t *testing.T) string {
	t.Helper()
	if !p.out.Scan() {
		t.Fatal("the reader has ended")
	}
	return p.out.Text()
}

func (p *process) ask(t *testing.T, line string) string {
	t.Helper()
	_, err := fmt.Fprintln(p.in, line)
	must(t, err)
	return p.line(t)
}

const memory = "/dev/shm" // a file system in memory, as /run is

// folder is a new folder in another one ("" = that of temporary files), with the mode of /run/cdi.
func folder(t *testing.T, in string) string {
	t.Helper()
	path, err := os.MkdirTemp(in, "cdi-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(path) })
	must(t, os.Chmod(path, 0o755))
	return path
}

const vendor = "k8s.device-plugin.nvidia.com"

// host is a node with device nodes, the files of a driver, and a folder of specifications in memory, as /run has them.
type host struct {
	cdi.Options
	root string
	m    *monitor
}

func newHost(t *testing.T) *host {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: device nodes need root")
	}
	root := folder(t, "") // which every user may enter
	must(t, simdriver.WriteDriverFiles(root, "580.95.05"))
	must(t, os.MkdirAll(root+"/usr/bin", 0o755))
	must(t, os.WriteFile(root+"/usr/bin/nvidia-ctk", nil, 0o755))
	return &host{root: root, m: newMonitor(), Options: cdi.Options{
		Vendor: vendor, Folder: folder(t, memory), DriverRoot: root, ContainerRoot: root, DevRoot: root, ContainerDevRoot: root,
	}}
}

// nodes makes device nodes, with a major number for nvidia-uvm.
func (h *host) nodes(t *testing.T, paths []string, uvm int) {
	t.Helper()
	for minor, path := range paths {
		major := 195
		if strings.Contains(path, "uvm") {
			major = uvm
		}
		at := filepath.Join(h.root, path)
		must(t, os.MkdirAll(filepath.Dir(at), 0o755))
		_ = os.Remove(at)
		must(t, syscall.Mknod(at, syscall.S_IFCHR|0o666, major<<8|minor))
	}
}

// run runs a writer.
func (h *host) run(t *testing.T) *cdi.Writer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	w := cdi.New(h.Options)
	go func() { defer close(ended); w.Run(ctx, h.m) }()
	t.Cleanup(func() { cancel(); <-ended })
	return w
}

// names are the qualified names of devices.
func names(s gpu.Snapshot) (all []string) {
	for _, d := range s.Devices {
		all = append(all, vendor+"/gpu="+string(d.ID), vendor+"/gpu="+d.CurrentIndex().String())
	}
	slices.Sort(all)
	return append(all, vendor+"/gpu=all")
}

// monitor is a monitor whose readings a test gives.
type monitor struct {
	cfg   core.Config
	tasks *watchdog.Registry
	state *watch.Value[core.State]
	mu    sync.Mutex
}

func newMonitor() *monitor {
	cfg := core.DefaultConfig()
	cfg.Injection, cfg.MIG = inventory.Injection{CDI: inventory.CDIRequired}, inventory.MIGMixed
	return &monitor{cfg: cfg, tasks: watchdog.NewRegistry(), state: watch.NewValue(core.NewState(cfg))}
}

func (m *monitor) change(to func(core.State) core.State) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.Store(to(m.state.Load()))
}

// read gives a reading and waits until all of its devices are defined.
func (m *monitor) read(t *testing.T, s gpu.Snapshot) {
	t.Helper()
	m.change(func(st core.State) core.State { return st.Read(m.cfg, time.Now(), s) })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for st := range m.state.Watch(ctx) {
		c := st.Host.CDI
		if s.Driver.State != gpu.DriverReady || c != nil && c.Incarnation == st.Incarnation && len(c.Defined) == len(s.Devices) {
			return
		}
	}
	t.Fatalf("not defined: %+v", m.State().Host.CDI)
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
		return s.WithHost(m.cfg, time.Now(), h)
	})
}

func (m *monitor) Watchdog() *watchdog.Registry { return m.tasks }

// reload gives a reading after the driver's module was loaded again.
func (m *monitor) reload(t *testing.T, s gpu.Snapshot) {
	t.Helper()
	m.read(t, gpu.NoDriver(gpu.DriverAbsent, "unloaded"))
	m.read(t, s)
}
