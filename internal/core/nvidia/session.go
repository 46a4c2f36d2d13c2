package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Options say where the driver is and how to ask it. The zero value is the host that this process runs
// on, asked as a node agent should.
type Options struct {
	Roots    core.Roots
	Deadline time.Duration // for a call about one GPU, before the others are asked without it; 0 = 2 s

	// How often a check reads what changes slowly; every check carries all.
	Slow   time.Duration // errors counted, repairs pending, PCIe link; 0 = 1 min
	Fabric time.Duration // 0 = 30 s
	Links  time.Duration // NVLinks; 0 = 5 min

	Now func() time.Time // the clock of these paces; nil = time.Now
}

// Session is an initialised NVML: the only way to call it, so that nothing is called before or after.
// Wait belongs to one goroutine; Busy, Work and Nodes to all; Snapshot, Probe and Usage belong to one other
// goroutine, and Close to whoever has waited for those two.
type Session struct {
	lib            nvml.Interface
	library        *library
	root           string // of the driver
	sys, proc, dev fs.FS
	patience       time.Duration
	every          [paces]time.Duration // 0 = once
	now            func() time.Time
	tegra          bool

	nodes nodeList

	mu        sync.Mutex // the reader changes these under it
	lanes     map[core.DeviceID]*lane
	doors     []*lane // see lane
	inherited []*lane // of earlier sessions, with a call in the driver

	// of the reader
	reader   line
	driver   core.Driver
	census   census
	gpus     []gpu // in the order of their indices; as last read, or as remembered while one does not answer
	caps     capabilities
	network  network
	heard    []listener // those of whom an event set was made last
	stranded []stranded

	// of the waiter
	waiter  line
	allowed atomic.Int64 // nanoseconds that its calls may take
	armed   armed        // the event set in use
	broken  error        // why it is of no more use, once that is known
	system  system
	layout  layout

	ears     ears        // event sets, from the reader to the waiter
	restless atomic.Bool // the last reading did not settle who is there; from the reader to the waiter

	opened  time.Time
	closing sync.Mutex
	closed  atomic.Bool
}

// Open initialises the driver's library. It fails with core.ErrNoDriver where there is none, and with core.ErrUnloaded
// too if that is because the kernel module was unloaded, with core.ErrDriverStale where library and kernel module are of different versions and a new process would find
// another library, and otherwise with the driver's reason; each is one line that stays the same while nothing
// changes.
//
// Once a function of a library was called, this process keeps that library, whatever lies on disk since.
// Another version, or another root, needs a new process.
func Open(o Options) (*Session, error) {
	loaded, gone := lookForModule(o.Roots)
	found, err := takeLibrary(o.Roots.Driver)
	if err != nil {
		return nil, noDriver(err, gone)
	}
	s := &Session{
		lib:      nvml.New(nvml.WithLibraryPath(found.path)),
		library:  found,
		root:     o.Roots.Driver,
		sys:      os.DirFS(rooted(o.Roots.Sys, "/sys")),
		proc:     os.DirFS(rooted(o.Roots.Proc, "/proc")),
		dev:      os.DirFS(filepath.Join(rooted(o.Roots.Dev, "/"), "dev")),
		patience: cmp.Or(o.Deadline, 2*time.Second),
		every: [paces]time.Duration{
			slowly: cmp.Or(o.Slow, time.Minute), ofFabric: cmp.Or(o.Fabric, 30*time.Second), ofLinks: cmp.Or(o.Links, 5*time.Minute),
		},
		now:    o.Now,
		reader: line{have: found.have, index: -1, work: &work{}},
		waiter: line{have: found.have, index: -1, work: &work{}},
		driver: core.Driver{State: core.DriverReady},
		ears:   newEars(),
		lanes:  map[core.DeviceID]*lane{},
	}
	if s.now == nil {
		s.now = time.Now
	}
	s.tegra = isTegra(s.sys)
	held, _ := settle(s) // what can't be shut down yet stays owed
	s.inherit(held)
	if err := do(&s.reader, "nvmlInit", core.Node, s.lib.Init); err != nil {
		return nil, noDriver(s.notOpened(err), gone || !loaded && returned(err) == nvml.ERROR_DRIVER_NOT_LOADED)
	}
	s.opened = time.Now()
	enlist(s)
	return s, nil
}

func (s *Session) notOpened(err error) error {
	switch returned(err) {
	case nvml.ERROR_DRIVER_NOT_LOADED: // not wrapped: nothing was lost that was never there
		return fmt.Errorf("%w: the kernel module is not loaded (%s); try modprobe nvidia", core.ErrNoDriver, err.Error())
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return fmt.Errorf("%w: a part of it is missing (%w); install the driver anew", core.ErrNoDriver, err)
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return s.mismatch(err)
	default:
		return fmt.Errorf("the driver can't be opened: %w", err)
	}
}

// noDriver adds to the reason why there is no driver that the kernel module was unloaded. A library that is missing is no
// evidence of that, and neither is NVML's answer where the kernel shows the module: a device node may be missing.
func noDriver(err error, unloaded bool) error {
	if unloaded && errors.Is(err, core.ErrNoDriver) {
		return unloadedError{err}
	}
	return err
}

func rooted(root, otherwise string) string {
	if root == "" {
		return otherwise
	}
	return root
}

// Close ends the session. An error means that the library stays initialised and its device nodes open, so that
// the kernel module can't be unloaded: ErrAbandoned while a call of this session, or of one before it, hangs in
// the driver, else what nvmlShutdown said. Another Close tries again, and so does whoever opens or closes a
// session next.
func (s *Session) Close() error {
	s.closing.Lock()
	defer s.closing.Unlock()
	if !s.closed.Load() {
		s.hangUp()
		s.closed.Store(true)
	}
	for {
		_, err := settle(s)
		again, hangs := s.inTheWay()
		if hangs != nil || err != nil || !again {
			return cmp.Or(hangs, err)
		}
	}
}

// Work is what the session has asked of the driver so far. It is safe for concurrent use.
func (s *Session) Work() core.CallStats {
	return core.CallStats{
		Calls:    uint64(s.reader.work.calls.Load() + s.waiter.work.calls.Load()),
		Duration: time.Duration(s.reader.work.nanoseconds.Load()), // the waiter's time is waiting
	}
}
