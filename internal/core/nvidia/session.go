package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Options configure a Session. The zero value is the driver of the node that this process runs on, with the
// defaults of a node agent.
type Options struct {
	Roots    core.Roots
	Deadline time.Duration // of a call about one GPU, until the session continues without that GPU; 0 = 2 s

	// How often a health check reads the signals that change slowly; every sample has all signals.
	Slow   time.Duration // error counters, pending repairs, PCIe link; 0 = 1 min
	Fabric time.Duration // NVSwitch fabric state; 0 = 30 s
	Links  time.Duration // NVLink states; 0 = 5 min

	Now func() time.Time // the clock of these intervals; nil = time.Now

	Processes bool // a health check reads the processes with memory of the GPU: one call more
	UsedBy    bool // a reading of usage does
}

// Session is an initialised NVML. It makes every NVML call between Open and Close.
//
// Snapshot, ReadGPU, Probe, Usage and the calls about limits belong to one goroutine, the reader; Wait belongs to another, the waiter. Busy and
// Nodes are safe for concurrent use. Close may be called when the reader and the waiter have ended.
type Session struct {
	lib            nvml.Interface
	library        *library
	root           string // of the driver's files
	sys, proc, dev fs.FS
	deadline       time.Duration
	intervals      [intervals]time.Duration // 0 = read once
	now            func() time.Time
	tegra          bool
	processes      bool // Options.Processes
	usedBy         bool // Options.UsedBy

	nodes     nodeList
	nodeWatch *nodeWatch // nil = without inotify, Nodes looks

	mu            sync.Mutex // the reader holds it to change these
	workers       map[gpu.DeviceID]*gpuWorker
	lookupWorkers []*gpuWorker // see gpuWorker
	adopted       []*gpuWorker // of earlier sessions, with a call that has not returned

	// These belong to the reader.
	reader         callSlot
	driver         gpu.Driver
	enumeration    enumeration
	gpus           []knownGPU // by index; of a GPU that does not answer, the latest complete reading
	capabilityList migCapabilities
	topology       topology
	registeredGPUs []registration // of the event set that was made last
	hadEventSet    bool           // an event set was created

	// These belong to the waiter.
	waiter            callSlot
	waitLimit         atomic.Int64         // nanoseconds that its calls may take
	eventSet          eventSet             // the one in use
	eventSetFailed    bool                 // no call waits on it any more
	waitErr           error                // why eventSet is unusable, which Wait has not returned yet; nil = it works
	reported          []health.Observation // by Wait, while a set that it has not taken, or not read to its end, may have them too; distinct
	heldXIDs          []heldXID            // see holdXID
	xidGroups         []xidGroup           // see knownGroup
	unread            bool                 // the set was taken, and may have more events: see drain
	waitedOperational bool                 // a wait for operational events has succeeded
	drained           time.Time            // when a set had no more events, or the session was opened
	bindEvents        bindEvents
	procfs            procfsWatch

	// These pass from the reader to the waiter.
	eventSets eventSets
	unstable  atomic.Bool // the latest enumeration did not become stable

	noOperational atomic.Bool // the driver has no nvmlEventSetWait_v3 in spite of its registration; the waiter sets it

	opened  time.Time
	closeMu sync.Mutex
	closed  atomic.Bool
}

// Open initialises the driver's library (nvmlInit_v2). It fails with
//   - gpu.ErrNoDriver if there is no driver, and gpu.ErrUnloaded too if the kernel module was unloaded;
//   - gpu.ErrDriverStale if the library of this process and the kernel module differ in version, and a new process
//     would load another library;
//   - the driver's error otherwise.
//
// The text of an error is one line, and does not change while its cause does not.
//
// A process that has called a function of a library keeps that library, whatever is on disk later. Another version,
// or another root, needs a new process: see loadedLibrary.
func Open(o Options) (*Session, error) {
	loaded, unloaded := checkModule(o.Roots)
	lib, err := loadLibrary(o.Roots.Driver)
	if err != nil {
		return nil, withUnloaded(err, unloaded)
	}
	s := &Session{
		lib:      nvml.New(nvml.WithLibraryPath(lib.path)),
		library:  lib,
		root:     o.Roots.Driver,
		sys:      os.DirFS(cmp.Or(o.Roots.Sys, "/sys")),
		proc:     os.DirFS(cmp.Or(o.Roots.Proc, "/proc")),
		dev:      os.DirFS(devFolder(o.Roots)),
		deadline: cmp.Or(o.Deadline, 2*time.Second),
		intervals: [intervals]time.Duration{
			intervalSlow: cmp.Or(o.Slow, time.Minute), intervalFabric: cmp.Or(o.Fabric, 30*time.Second), intervalLinks: cmp.Or(o.Links, 5*time.Minute),
		},
		now:       o.Now,
		processes: o.Processes,
		usedBy:    o.UsedBy,
		reader:    callSlot{library: lib, index: -1},
		waiter:    callSlot{library: lib, index: -1},
		driver:    gpu.Driver{State: gpu.DriverReady},
		eventSets: newEventSets(),
		workers:   map[gpu.DeviceID]*gpuWorker{},
	}
	if s.now == nil {
		s.now = time.Now
	}
	s.tegra = isTegra(s.sys)
	hung, _ := shutDownClosed(s) // a shutdown that fails stays pending
	s.adoptHungCalls(hung)
	if err := do(&s.reader, "nvmlInit", gpu.Node, s.lib.Init); err != nil {
		return nil, withUnloaded(s.initError(err), unloaded || !loaded && returnCode(err) == nvml.ERROR_DRIVER_NOT_LOADED)
	}
	s.opened = time.Now()
	s.drained = s.now()
	s.nodeWatch, _ = watchNodes(devFolder(o.Roots))
	track(s)
	return s, nil
}

// initError is the error of Open for an error of nvmlInit.
func (s *Session) initError(err error) error {
	switch returnCode(err) {
	case nvml.ERROR_DRIVER_NOT_LOADED: // not wrapped: err is a gpu.ErrDriverLost, and no driver was in use
		return fmt.Errorf("%w: the kernel module is not loaded (%s): run modprobe nvidia", gpu.ErrNoDriver, err.Error())
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return fmt.Errorf("%w: a part of the driver is missing (%w): reinstall the driver", gpu.ErrNoDriver, err)
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return s.versionMismatch(err)
	default:
		return fmt.Errorf("driver initialisation failed: %w", err)
	}
}

// withUnloaded adds gpu.ErrUnloaded to an error, if the kernel module was unloaded. A missing library is no evidence
// of that, and neither is NVML's DRIVER_NOT_LOADED while the kernel shows the module: a device node may be missing.
func withUnloaded(err error, unloaded bool) error {
	if unloaded && errors.Is(err, gpu.ErrNoDriver) {
		return unloadedError{err}
	}
	return err
}

// Close ends the session (nvmlShutdown). After an error the library stays initialised and its device nodes open, so
// the kernel module can't be unloaded: errAbandoned while a call of this session, or of an earlier one, has not
// returned, else the error of nvmlShutdown. The shutdown is tried again by the next Close of this session, and by
// the next Open or Close of any session.
func (s *Session) Close() error {
	s.closeMu.Lock()
	defer s.closeMu.Unlock()
	if !s.closed.Load() {
		s.freeEventSets()
		s.nodeWatch.close()
		s.closed.Store(true)
	}
	for {
		_, err := shutDownClosed(s)
		more, hung := s.hungCall()
		if hung != nil || err != nil || !more {
			return cmp.Or(hung, err)
		}
	}
}
