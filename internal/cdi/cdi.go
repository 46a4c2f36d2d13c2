// Package cdi writes the CDI specifications (Container Device Interface, tags.cncf.io) of an agent, and keeps them in step with the
// driver: which devices there are, and what a container needs to use one. What the files on disk define goes back into the
// inventory, so that a device that needs its definition takes no work without it.
package cdi

import (
	"cmp"
	"context"
	"iter"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/cdi/driverfiles"
	"github.com/tandem-gpu/tandem/internal/cdi/specfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

const (
	// DefaultFolder is where container runtimes look for the specifications of running programs. /etc/cdi is for those of
	// administrators, and has the lower priority.
	DefaultFolder = "/var/run/cdi"
	adminFolder   = "/etc/cdi"

	// DefaultHookPath is the default of NVIDIA's k8s-device-plugin.
	DefaultHookPath = "/usr/bin/nvidia-ctk"

	classGPU  = "gpu" // of MIG instances, too
	classIMEX = "imex-channel"
)

// Options are where specifications are written and what is in them.
type Options struct {
	Vendor string // of the devices: "k8s.device-plugin.nvidia.com"; "" = nothing is written or read
	Folder string // of the specifications; the same path on the host and for this process; "" = DefaultFolder

	// FolderIsMount means that this process is in a container, in which Folder must be a mount of the host's: no runtime reads what
	// is written into the container's own file system.
	FolderIsMount bool

	DriverRoot       string // root of the driver's installation on the host; "" = "/"
	ContainerRoot    string // the same, as this process sees it
	DevRoot          string // folder on the host that has dev/nvidia0 ...; "" = "/"
	ContainerDevRoot string // the same, as this process sees it
	SysRoot          string // sysfs, as this process sees it; "" = "/sys"

	HookPath      string   // of NVIDIA's hook program on the host, nvidia-ctk or nvidia-cdi-hook; "" = DefaultHookPath
	DisabledHooks []string // names of hooks that are left out of the specification, or "all"
	FeatureFlags  []string // of NVIDIA's library

	Indices             bool  // containers get devices by index
	GDS, MOFED, GDRCopy bool  // specifications of these devices too, if the node has them
	IMEXChannels        []int // the same, of IMEX channels: [0]

	// Stored returns the devices of a kind that containers have been given and may be started with again, by the orchestrator's record; nil = there is no record.
	// It reads a file.
	Stored func(kind string) []string

	// Auto decides by Decide whether containers can use the specification. Otherwise they can if it is written.
	Auto    bool
	Runtime func(context.Context) Runtime // what is known of the container runtime; nil = nothing

	Log *slog.Logger // nil = none
}

func (o Options) withDefaults() Options {
	o.Folder = filepath.Clean(cmp.Or(o.Folder, DefaultFolder))
	o.HookPath = cmp.Or(o.HookPath, DefaultHookPath)
	o.SysRoot = cmp.Or(o.SysRoot, "/sys")
	for _, root := range []*string{&o.DriverRoot, &o.ContainerRoot, &o.DevRoot, &o.ContainerDevRoot} {
		*root = filepath.Clean("/" + *root)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// kind is the vendor and class of the GPUs and MIG instances.
func (o Options) kind() string { return o.Vendor + "/" + classGPU }

// undefined is the value of specifications that define nothing, because of a problem.
func (o Options) undefined(s core.State, problem string) *inventory.CDI {
	return &inventory.CDI{Incarnation: s.Incarnation, Kind: o.kind(), Folder: o.Folder, Problem: problem}
}

// Monitor has the state that a Writer follows, and receives what the specifications define. *monitor.Monitor is one.
type Monitor interface {
	State() core.State
	Watch(context.Context) iter.Seq[*inventory.Allocatable]
	SetCDI(*inventory.CDI)
	Watchdog() *watchdog.Registry
}

// Writer writes the specifications of one agent. Make one with New, then call Run once; Warnings is safe for concurrent use.
type Writer struct {
	opts        Options
	dry         bool // nothing is written
	gpus        specfile.File
	limits      specfile.File
	withoutHook []gpu.DeviceID // devices that the latest specification has without limitsHook, because the agent limits their pods
	stored      []uint64       // limits that containers may be started with again, in MiB, as they were read last
	others      []*class
	scanner     specfile.Scanner
	driver      driverCache
	hooks       hookCache
	conflict    writeConflict
	lastRuntime Runtime              // the latest answer of the container runtime
	logged      map[string]time.Time // warnings in the log, and when they were last true; of the goroutine that makes passes

	withdraw func(ctx context.Context, keep []gpu.DeviceID) // called before names of other devices are taken out of the file; nil = nothing is published

	mu       sync.Mutex
	problems []problem.Problem
}

// New returns a writer. It reads and writes nothing.
func New(o Options) *Writer {
	o = o.withDefaults()
	own := specfile.Path(o.Folder, o.kind())
	w := &Writer{opts: o, gpus: specfile.File{Path: own}, limits: specfile.File{Path: specfile.Path(o.Folder, o.limitKind())}, scanner: specfile.Scanner{Skip: own}, logged: map[string]time.Time{}}
	for _, c := range []struct {
		name string
		on   bool
	}{
		{classIMEX, len(o.IMEXChannels) > 0}, {driverfiles.GDRCopy, o.GDRCopy}, {driverfiles.GDS, o.GDS}, {driverfiles.MOFED, o.MOFED}, // in the order of NVIDIA's plugin
	} {
		if c.on {
			w.others = append(w.others, &class{name: c.name, file: specfile.File{Path: specfile.Path(o.Folder, o.Vendor+"/"+c.name)}})
		}
	}
	return w
}

// Problems are those of the specifications that an operator should know of. They don't have the reasons that are in the health of devices.
func (w *Writer) Problems() []problem.Problem {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.problems)
}

// setProblems replaces the problems, adds that of a write conflict, and logs those that are new: that no pass of the last minutes had. While
// another process changes a file again and again, its problems end and begin with each change. That, and the log without the time of a write
// conflict, is what this has that problemset.Set has not.
func (w *Writer) setProblems(lines []string, now time.Time) {
	changed := w.conflict.warnings(now)
	w.mu.Lock()
	w.problems = nil
	for _, line := range slices.Concat(lines, changed) {
		w.problems = append(w.problems, problem.Problem{Code: problem.CDI, Text: "CDI: " + line})
	}
	w.mu.Unlock()
	if len(changed) > 0 {
		lines = append(lines, w.conflict.text())
	}
	maps.DeleteFunc(w.logged, func(_ string, last time.Time) bool { return now.Sub(last) > conflictForget })
	for _, line := range lines {
		if w.logged[line].IsZero() {
			w.opts.Log.Warn("CDI: " + line)
		}
		w.logged[line] = now
	}
}
