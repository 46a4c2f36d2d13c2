package nvidia

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// line is a way to the driver for one call at a time: the reader has one for what is about no GPU, so has
// the waiter, and each GPU has one in its lane.
type line struct {
	have map[string]bool
	work *work

	mu     sync.Mutex
	index  int       // NVML index of the GPU that the calls are about, -1 for none
	last   core.Call // the latest call
	inside bool      // it is in progress
	closed bool      // no call may begin: nobody waits for its answer any more
}

// work counts calls, for all lines of a session together.
type work struct{ calls, nanoseconds atomic.Int64 }

// errLate ends the questions of a visit that nobody waits for; nobody sees it either.
var errLate = errors.New("nobody waits for the answer any more")

// begin notes a call; false if it may not be made.
func (l *line) begin(name string, at core.Placement) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.last = core.Call{Name: name, At: at, Index: l.index, Since: time.Now()}
	l.inside = true
	return true
}

// end says whether somebody still waits.
func (l *line) end() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inside = false
	l.work.calls.Add(1)
	l.work.nanoseconds.Add(int64(time.Since(l.last.Since)))
	return !l.closed
}

// busy is the call in progress, if there is one.
func (l *line) busy() (core.Call, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last, l.inside
}

// call makes one driver call about a placement. Every call into NVML is made here.
func call[T any](l *line, name string, at core.Placement, f func() (T, nvml.Return)) (T, error) {
	var none T
	if !l.have[name] {
		return none, &CallError{Call: name, At: at, Return: nvml.ERROR_FUNCTION_NOT_FOUND, text: "not in this driver"}
	}
	if !l.begin(name, at) {
		return none, errLate
	}
	v, ret := f()
	awaited := l.end()
	switch {
	case ret == nvml.SUCCESS:
		return v, nil
	case !awaited:
		return none, errLate
	}
	return none, l.failure(name, at, ret)
}

// failure is a code with the driver's words for it.
func (l *line) failure(name string, at core.Placement, ret nvml.Return) error {
	text := fmt.Sprintf("error %d", int(ret))
	if l.have["nvmlErrorString"] {
		text = ret.Error()
	}
	return &CallError{Call: name, At: at, Return: ret, text: text}
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
	kept bool // the driver failed to say something, and what was known before stands for it
}

// about asks about another placement on the same line, with an error of its own.
func (a *asker) about(at core.Placement) *asker { return &asker{line: a.line, at: at} }

// required asks for what a device can't be offered without.
func required[T any](a *asker, name string, f func() (T, nvml.Return)) (v T) {
	if a.err == nil {
		v, a.err = call(a.line, name, a.at, f)
	}
	return v
}

// supported asks for what not every device has; zero if this one does not.
func supported[T any](a *asker, name string, f func() (T, nvml.Return)) (v T) {
	if a.err != nil {
		return v
	}
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
	if a.err != nil && !isLost(a.err) && !isGone(a.err) && !errors.Is(a.err, errLate) {
		v, a.err, a.kept = last, nil, true
	}
	return v
}
