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

	// answers has the latest value of each call that may keep it: see retained. It belongs to the running query.
	answers map[answerKey]any

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

// answerKey identifies the calls whose values follow each other.
type answerKey struct {
	call    string
	subject any // see caller
}

// caller makes a series of calls about one placement until one fails: err is the reason, and all later calls are
// skipped.
type caller struct {
	slot     *callSlot
	at       gpu.Placement
	subject  any // distinguishes calls of one name about one GPU, such as a link or an instance; nil = there is one
	err      error
	fellBack bool // a call failed, and its previous value was used
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

// retained is required, but a value that was there stays in this session: a call that had an answer before and is not
// supported now returns that answer. A code such as NOT_SUPPORTED is a fact only of a call that never had an answer.
func retained[T any](c *caller, name string, f func() (T, nvml.Return)) (v T) {
	if c.err != nil {
		return v
	}
	v = required(c, name, f)
	if c.err == nil {
		c.remember(name, v)
		return v
	}
	if last, answered := lastAnswer[T](c, name); answered && isUnsupported(c.err) {
		v, c.err, c.fellBack = last, nil, true
	}
	return v
}

// remember records the answer of a call.
func (c *caller) remember(name string, v any) {
	if c.slot.answers == nil {
		c.slot.answers = map[answerKey]any{}
	}
	c.slot.answers[answerKey{name, c.subject}] = v
}

// lastAnswer returns the latest answer of a call; false if it had none in this session.
func lastAnswer[T any](c *caller, name string) (v T, answered bool) {
	v, answered = c.slot.answers[answerKey{name, c.subject}].(T)
	return v, answered
}

// supported reads a value that not every device has: zero if this one does not. Any other error is the caller's.
func supported[T any](c *caller, name string, f func() (T, nvml.Return)) (v T) {
	if c.err != nil {
		return v
	}
	v = retained(c, name, f)
	if isUnsupported(c.err) {
		c.err = nil
	}
	return v
}

// optional reads a value without which the device can be offered: zero if it is not supported. If the call fails it
// returns the latest answer, or otherwise if there is none: a passing failure does not change the device. Only the loss
// of the GPU or of the driver is the caller's error.
func optional[T any](c *caller, name string, otherwise T, f func() (T, nvml.Return)) (v T) {
	if c.err != nil {
		return v
	}
	v = supported(c, name, f)
	if c.err == nil || endsReading(c.err) {
		return v
	}
	c.err, c.fellBack = nil, true
	if last, answered := lastAnswer[T](c, name); answered {
		return last
	}
	return otherwise
}

// measured reads a value that is of no use later: zero if the call fails. Only the loss of the GPU or of the driver is
// the caller's error.
func measured[T any](c *caller, name string, f func() (T, nvml.Return)) (v T) {
	if c.err != nil {
		return v
	}
	v = required(c, name, f)
	if c.err != nil && !endsReading(c.err) {
		c.fellBack = c.fellBack || !isUnsupported(c.err)
		c.err = nil
	}
	return v
}

// endsReading reports whether no further call about the GPU can have an answer.
func endsReading(err error) bool {
	return isLost(err) || isDriverLost(err) || errors.Is(err, errQueryAbandoned)
}
