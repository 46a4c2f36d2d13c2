package nvidia

import (
	"errors"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// callSlot makes calls one at a time and records the one in progress. The reader has one for calls about no GPU,
// the waiter has one, and each gpuWorker has one.
type callSlot struct {
	library *library

	mu         sync.Mutex
	index      int      // NVML index of the GPU that the calls are about, -1 for none
	last       gpu.Call // the latest call
	inProgress bool     // last has not returned
	abandoned  bool     // the result is not awaited any more: no further call may begin
}

// errQueryAbandoned ends a query whose result is not awaited any more. It is never reported.
var errQueryAbandoned = errors.New("query abandoned")

// begin records the begin of a call; false if it may not be made.
func (l *callSlot) begin(name string, at gpu.Placement, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.abandoned {
		return false
	}
	l.last = gpu.Call{Name: name, At: at, Index: l.index, Since: now}
	l.inProgress = true
	return true
}

// end records the return of a call and reports whether its result is still awaited.
func (l *callSlot) end() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inProgress = false
	return !l.abandoned
}

// current is the call in progress; false if there is none.
func (l *callSlot) current() (gpu.Call, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last, l.inProgress
}

// call makes one NVML call about a placement; name is the function in nvml.h, without the version if it is in the table
// versions. A call that the library lacks fails with ERROR_FUNCTION_NOT_FOUND.
func call[T any](l *callSlot, name string, at gpu.Placement, made func() (T, nvml.Return)) (T, error) {
	var zero T
	f := l.library.function(name)
	if !f.found {
		return zero, &nvmlError{Call: name, Return: nvml.ERROR_FUNCTION_NOT_FOUND, text: "not in this driver"}
	}
	began := time.Now()
	if !l.begin(name, at, began) {
		return zero, errQueryAbandoned
	}
	v, ret := made()
	f.count(time.Since(began), ret)
	awaited := l.end()
	switch {
	case ret == nvml.SUCCESS:
		return v, nil
	case !awaited:
		return zero, errQueryAbandoned
	}
	return zero, &nvmlError{Call: name, Return: ret, text: l.library.errorText(ret)}
}

// do is call for a function that returns only a code.
func do(l *callSlot, name string, at gpu.Placement, f func() nvml.Return) error {
	_, err := call(l, name, at, func() (struct{}, nvml.Return) { return struct{}{}, f() })
	return err
}

// converted is f with its result converted.
func converted[T, U any](f func() (T, nvml.Return), convert func(T) U) func() (U, nvml.Return) {
	return func() (U, nvml.Return) {
		v, ret := f()
		return convert(v), ret
	}
}

// caller makes a series of calls about one placement until one fails: err is the reason, and all later calls are
// skipped.
type caller struct {
	slot     *callSlot
	at       gpu.Placement
	err      error
	fellBack bool // an optional call failed, and its previous value was used
}

// withPlacement is a caller for another placement on the same slot, with an error of its own.
func (c *caller) withPlacement(at gpu.Placement) *caller { return &caller{slot: c.slot, at: at} }

// required reads a value without which the device can't be offered. Any error is the caller's.
func required[T any](c *caller, name string, f func() (T, nvml.Return)) (v T) {
	if c.err == nil {
		v, c.err = call(c.slot, name, c.at, f)
	}
	return v
}

// supported reads a value that not every device has: zero if this one does not. Any other error is the caller's.
func supported[T any](c *caller, name string, f func() (T, nvml.Return)) (v T) {
	if c.err != nil {
		return v
	}
	v = required(c, name, f)
	if isUnsupported(c.err) {
		c.err = nil
	}
	return v
}

// optional reads a value without which the device can be offered: zero if it is not supported, last if the call
// fails, so that a passing failure does not change the device. Only the loss of the GPU or of the driver is the
// caller's error.
func optional[T any](c *caller, name string, last T, f func() (T, nvml.Return)) (v T) {
	if c.err != nil {
		return v
	}
	v = supported(c, name, f)
	if c.err != nil && !isLost(c.err) && !isDriverLost(c.err) && !errors.Is(c.err, errQueryAbandoned) {
		v, c.err, c.fellBack = last, nil, true
	}
	return v
}
