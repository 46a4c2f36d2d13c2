package doctor

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// Facts are what was read of a node. A group that was not read in time is in Late and otherwise zero.
type Facts struct {
	Options

	Container  string          // why this process is taken to be in a container; "" = it is not
	UID        int             // of this process
	Late       map[string]bool // names of groups
	Agent      Agent
	Driver     report.Report        // what an agent would offer; Source is "" if the driver was not asked
	GPUs       []pciGPU             // on the PCI bus
	PCI        bool                 // the bus is visible
	Known      map[string]kernelGPU // GPUs that the kernel module lists, by PCI address
	Library    library
	Module     module
	Nodes      nodes
	Denied     []string // device nodes that the device cgroup does not allow this process to open
	Kernel     []string // lines of the kernel log about GPUs and modules
	KernelErr  error
	State      stateDir
	Security   security
	Toolkit    Toolkit
	CDIFiles   []cdi.File
	Clock      clock
	Inotify    error                                // why no inotify instance can be made
	Check      error                                // of the program that proves GPUs, if it is a program of this process's files
	Ready      error                                // of what resets GPUs, if this process can ask it
	PauseCheck error                                // why a command of reset.pause is not run; nil = it is, or was not looked at
	Open       map[gpu.PCIAddress][]gpureset.Client // the processes that have GPUs open, as far as they are visible, but for those that close them for a reset
	Processes  []Process
	Memory     limits // what limits of device memory need

	lateReadings []Finding

	decided []problem.Code // problems of the agent that checks have found themselves
}

// Agent is what the running agent reports.
type Agent struct {
	Running bool
	Err     error // why it did not report, unless none runs
	Report  report.Report
}

// released reports whether the agent has closed the driver for maintenance.
func (a Agent) released() bool { return a.Running && a.Report.Driver.State == "released" }

// Offered is what an agent offers: the running one, or else one that would start now.
func (f *Facts) Offered() report.Report {
	if f.Agent.Running {
		return f.Agent.Report
	}
	return f.Driver
}

// reading reads one group of facts. It returns a function that adds them, so that a reading that is abandoned changes nothing.
type reading struct {
	check, place string
	read         func(ctx context.Context, o *Options) func(*Facts)
}

// gather reads everything at once.
func gather(ctx context.Context, o *Options) *Facts {
	f := &Facts{Options: *o, Late: map[string]bool{}, UID: o.system.uid()}
	if o.HostRoot == "" {
		f.Container = o.system.container()
	}
	readings := []reading{
		{"gpu", f.sys("bus/pci/devices"), readPCI},
		{"library", driverRoot(o), readLibrary},
		{"module", f.sys("module/nvidia"), readModule},
		{"nodes", f.dev(""), readNodes},
		{"driver", "agent and driver", readAgentAndDriver},
		{"kernel log", o.KernelLog, readKernelLog},
		{"state", o.StateDir, readState},
		{"security", "SELinux and AppArmor", readSecurity},
		{"toolkit", "NVIDIA's container toolkit", readToolkit},
		{"cdi", "CDI specifications", readCDI},
		{"clock", "adjtimex", readClock},
		{"inotify", "fs.inotify", readInotify},
		{"processes", f.proc(""), readProcesses},
		{"prove", strings.Join(o.Prove.Command, " "), readProofProgram},
		{"reset", "what resets GPUs, " + o.proc("*/fd"), readReset},
		{"limits", "control groups, " + o.proc("*/environ"), readLimits},
	}
	for i, add := range concurrently(ctx, o.Limit, readings, func(ctx context.Context, r reading) func(*Facts) { return r.read(ctx, o) }) {
		if add == nil {
			f.Late[readings[i].check] = true
			f.lateReadings = append(f.lateReadings, late(readings[i].check, readings[i].place, o.Limit))
			continue
		}
		(*add)(f)
	}
	return f
}

// readAgentAndDriver asks the agent first: while it has released the driver, nothing may open it.
func readAgentAndDriver(ctx context.Context, o *Options) func(*Facts) {
	var a Agent
	asking, cancel := context.WithTimeout(ctx, agentShare(o.Limit))
	defer cancel()
	r, err := o.Agent(asking)
	switch {
	case err == nil:
		a.Running, a.Report = true, r
	case !errors.Is(err, control.ErrNotRunning):
		a.Err = err
	}
	var d report.Report
	var denied []string
	if !a.released() {
		denied = deniedNodes(o)
		d = o.Driver(ctx)
		d.Source = report.FromDriver
	}
	return func(f *Facts) { f.Agent, f.Driver, f.Denied = a, d, denied }
}

// agentShare is the part of the limit that the agent may take to answer; the rest is for the driver.
func agentShare(limit time.Duration) time.Duration { return limit * 4 / 10 }

func readCDI(_ context.Context, o *Options) func(*Facts) {
	if o.CDI == nil {
		return func(*Facts) {}
	}
	files := o.CDI()
	return func(f *Facts) { f.CDIFiles = files }
}

// beneath is a path of the host beneath a root.
func beneath(root, path string) string { return filepath.Join(cmp.Or(root, "/"), path) }

func (o *Options) sys(path string) string  { return filepath.Join(cmp.Or(o.Roots.Sys, "/sys"), path) }
func (o *Options) proc(path string) string { return filepath.Join(cmp.Or(o.Roots.Proc, "/proc"), path) }
func (o *Options) dev(path string) string {
	return filepath.Join(cmp.Or(o.Roots.Dev, "/"), "dev", path)
}

func driverRoot(o *Options) string { return cmp.Or(o.Roots.Driver, "/") }

// maxText is how much is read of a file: a process decides how long its arguments and its environment are.
const maxText = 1 << 20

// text is the content of a small file without white space around it; "" if it can't be read, or is larger than maxText.
func text(path string) string {
	b, err := statefile.Read(path, maxText, 0)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// linkBase is the last element of the target of a symbolic link; "" if there is none.
func linkBase(path string) string {
	target, err := os.Readlink(path)
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// system is what is asked of the operating system itself, and not read from a file beneath a root.
type system interface {
	uid() int
	container() string // why this process is in a container; "" = it is not
	unsynchronised() (bool, error)
	now() time.Time
	inotify() error // of making an instance
	free(path string) (bytes, inodes uint64, err error)
	open(path string) error     // for reading and writing
	unified(mount string) error // nil if control groups of version 2 are mounted there
}

type operatingSystem struct{}

func (operatingSystem) uid() int       { return os.Geteuid() }
func (operatingSystem) now() time.Time { return time.Now() }

func (operatingSystem) unsynchronised() (bool, error) {
	var t unix.Timex // no mode: nothing is set
	if _, err := unix.Adjtimex(&t); err != nil {
		return false, err
	}
	return t.Status&unix.STA_UNSYNC != 0, nil
}

func (operatingSystem) inotify() error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err
}

func (operatingSystem) free(path string) (bytes, inodes uint64, err error) {
	var s unix.Statfs_t
	if err := unix.Statfs(path, &s); err != nil {
		return 0, 0, err
	}
	if s.Files == 0 { // the file system does not count inodes
		s.Ffree = 1 << 20
	}
	return s.Bavail * uint64(s.Bsize), s.Ffree, nil
}

func (operatingSystem) unified(mount string) error { return cgroup.FS{Mount: mount}.Check() }

// open opens a device node as the driver's library does. O_NONBLOCK and no further call: opening the control nodes initialises no GPU.
func (operatingSystem) open(path string) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func (operatingSystem) container() string {
	for _, path := range []string{"/.dockerenv", "/run/.containerenv"} {
		if exists(path) {
			return path + " exists"
		}
	}
	if os.Getenv("KUBERNETES_SERVICE_HOST") != "" {
		return "KUBERNETES_SERVICE_HOST is set"
	}
	return ""
}

// errno is the error number of an error; 0 if it has none.
func errno(err error) syscall.Errno {
	no, _ := errors.AsType[syscall.Errno](err)
	return no
}
