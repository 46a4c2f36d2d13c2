package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Options say where the driver is. The zero value is the host that this process runs on.
type Options struct {
	Roots core.Roots
}

// Session is an initialised NVML: the only way to call it, so that nothing is called before or after.
// Wait belongs to one goroutine, Busy to all; Snapshot, Probe and Usage belong to one other goroutine,
// and Close to whoever has waited for those two.
type Session struct {
	lib            nvml.Interface
	sys, proc, dev fs.FS

	// of the reader
	reader   line
	driver   core.Driver
	gpus     []gpu // by index; as last read, or as remembered while one does not answer
	profiles map[shape]string
	caps     capabilities
	fabric   fabric
	heard    []held // those of whom an event set was made last

	// of the waiter
	waiter line
	armed  armed // the event set in use

	ears   ears // event sets, from the reader to the waiter
	closed bool
}

// Open initialises the driver's library. It fails with core.ErrNoDriver where there is none, with
// core.ErrDriverStale where library and kernel module are of different versions, and otherwise with the
// driver's reason; each is one line that stays the same while nothing changes.
//
// Once a function of a library was called, this process keeps that library: glibc never unloads what the
// executable is bound to. Another version, or another root, needs a new process.
func Open(o Options) (*Session, error) {
	found, err := findLibrary(o.Roots.Driver)
	if err != nil {
		return nil, err
	}
	defer func() { _ = found.file.Close() }() // go-nvml holds its own by then
	s := &Session{
		lib:      nvml.New(nvml.WithLibraryPath(found.path)),
		sys:      os.DirFS(rooted(o.Roots.Sys, "/sys")),
		proc:     os.DirFS(rooted(o.Roots.Proc, "/proc")),
		dev:      os.DirFS(filepath.Join(rooted(o.Roots.Dev, "/"), "dev")),
		reader:   line{have: found.have},
		waiter:   line{have: found.have},
		driver:   core.Driver{State: core.DriverReady},
		profiles: map[shape]string{},
		ears:     newEars(),
	}
	if err := do(&s.reader, "nvmlInit", core.Node, s.lib.Init); err != nil {
		return nil, notOpened(err)
	}
	return s, nil
}

func notOpened(err error) error {
	switch returned(err) {
	case nvml.ERROR_DRIVER_NOT_LOADED: // not wrapped: nothing was lost that was never there
		return fmt.Errorf("%w: the kernel module is not loaded (%s); try modprobe nvidia", core.ErrNoDriver, err.Error())
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return fmt.Errorf("%w: a part of it is missing (%w); install the driver anew", core.ErrNoDriver, err)
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return gone(err)
	default:
		return fmt.Errorf("the driver can't be opened: %w", err)
	}
}

func rooted(root, otherwise string) string {
	if root == "" {
		return otherwise
	}
	return root
}

// Close ends the session. A second Close does nothing.
func (s *Session) Close() error {
	if s.closed {
		return nil
	}
	s.closed = true
	s.hangUp()
	err := do(&s.reader, "nvmlShutdown", core.Node, s.lib.Shutdown)
	if errors.Is(err, core.ErrDriverLost) {
		return nil // it is down already
	}
	return err
}

// Busy is the reader's call in progress. It is safe for concurrent use.
func (s *Session) Busy() []core.Call {
	if c := s.reader.busy.Load(); c != nil {
		return []core.Call{*c}
	}
	return nil
}

// line is one goroutine's way to the driver.
type line struct {
	have map[string]bool
	busy atomic.Pointer[core.Call]
}

// call makes one driver call about a placement. Every call into NVML is made here.
func call[T any](l *line, name string, at core.Placement, f func() (T, nvml.Return)) (T, error) {
	var none T
	if !l.have[name] {
		return none, &CallError{Call: name, At: at, Return: nvml.ERROR_FUNCTION_NOT_FOUND, text: "not in this driver"}
	}
	l.busy.Store(&core.Call{Name: name, At: at, Since: time.Now()})
	v, ret := f()
	l.busy.Store(nil)
	if ret == nvml.SUCCESS {
		return v, nil
	}
	text := fmt.Sprintf("error %d", int(ret))
	if l.have["nvmlErrorString"] {
		text = ret.Error()
	}
	return none, &CallError{Call: name, At: at, Return: ret, text: text}
}

// do is call for what gives nothing but a code.
func do(l *line, name string, at core.Placement, f func() nvml.Return) error {
	_, err := call(l, name, at, func() (struct{}, nvml.Return) { return struct{}{}, f() })
	return err
}

// asker asks about one placement until an answer makes further questions pointless: from then on it
// asks nothing, and err says why.
type asker struct {
	line *line
	at   core.Placement
	err  error
}

// required asks for what a device can't be offered without.
func required[T any](a *asker, name string, f func() (T, nvml.Return)) (v T) {
	if a.err == nil {
		v, a.err = call(a.line, name, a.at, f)
	}
	return v
}

// supported asks for what not every device has; zero if this one does not.
func supported[T any](a *asker, name string, f func() (T, nvml.Return)) (v T) {
	v = required(a, name, f)
	if isUnsupported(a.err) {
		a.err = nil
	}
	return v
}

// optional asks for what a device can be offered without: zero if it does not have it, and what it was
// before if the driver fails to say, so that a stuttering driver does not change what a device is.
func optional[T any](a *asker, name string, last T, f func() (T, nvml.Return)) (v T) {
	if a.err != nil {
		return v
	}
	v = supported(a, name, f)
	if a.err != nil && !isLost(a.err) && !isGone(a.err) {
		v, a.err = last, nil
	}
	return v
}
