package nvidia

import (
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// maxVisit bounds a visit whose calls all come back, each just in time, in units of patience.
const maxVisit = 5

// moments are how many a patience has: as long as every GPU answers in a moment, they are asked one after the
// other, on one thread.
const moments = 40

// target is whom to visit: through which lane, at which NVML index as far as is known, and what the questions are
// about.
type target struct {
	lane  *lane
	index int
	at    core.Placement
}

// at is a known GPU as a target.
func (s *Session) at(d core.Device) target {
	return target{s.lane(d.At.GPU), d.Index, core.WholeGPU(d.At.GPU)}
}

// visit runs questions about a GPU in its lane and returns their result and the asker's error. If a call
// does not come back within the session's patience, it is a StuckError, at once for a GPU that is stuck
// already; what the questions find later is dropped. They run beside the session, so they touch nothing of
// it but what never changes, and return what they find.
func visit[T any](s *Session, t target, questions func(*asker) T) (T, error) {
	return begin(s, t, new(progress), questions).wait(s.patience)
}

// visitAll is visit for many GPUs, i of the questions being the place in the list. Who does not answer in a
// moment is left at it while the next is asked, so that all that hang cost one patience:
//
//	GPU 0  [..]         hang     hang     patience of all
//	GPU 1      [....................................]
//	GPU 2           [...............................]
//	GPU 3                    [..]
//
// The driver may serve them one by one, as it does when it wakes GPUs up. So the patience begins anew
// whenever one has answered: whoever hangs behind others that come back is waited for.
func visitAll[T any](s *Session, targets []target, questions func(i int, a *asker) T) ([]T, []error) {
	all, errs := make([]T, len(targets)), make([]error, len(targets))
	visits := make([]*visiting[T], len(targets))
	var others progress
	for i, t := range targets {
		visits[i] = begin(s, t, &others, func(a *asker) T { return questions(i, a) })
		visits[i].moment(s.patience / moments)
	}
	for i, v := range visits {
		all[i], errs[i] = v.wait(s.patience)
	}
	return all, errs
}

// progress is when one of several visits ended last; the zero value is never.
type progress struct{ at atomic.Pointer[time.Time] }

func (p *progress) made() {
	now := time.Now()
	p.at.Store(&now)
}

// since is the later of the progress and a time.
func (p *progress) since(t time.Time) time.Time {
	if at := p.at.Load(); at != nil && at.After(t) {
		return *at
	}
	return t
}

// visiting is a visit in progress, or one that could not begin.
type visiting[T any] struct {
	lane   *lane
	began  time.Time
	others *progress
	answer chan reply[T] // gets one, unless the visit was given up
	got    *reply[T]
}

type reply[T any] struct {
	v   T
	err error
}

func begin[T any](s *Session, t target, others *progress, questions func(*asker) T) *visiting[T] {
	l := t.lane
	v := &visiting[T]{lane: l, began: time.Now(), others: others, answer: make(chan reply[T], 1)}
	if err := s.enter(t); err != nil {
		v.got = &reply[T]{err: err}
		return v
	}
	go func() {
		a := &asker{line: &l.line, at: t.at}
		r := reply[T]{v: questions(a)}
		r.err = a.err
		if l.leave() {
			others.made()
			v.answer <- r
		}
	}()
	return v
}

// moment waits for the answer, but not longer than d.
func (v *visiting[T]) moment(d time.Duration) {
	if v.got != nil {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case r := <-v.answer:
		v.got = &r
	case <-t.C:
	}
}

// wait waits for the answer until patience is over.
func (v *visiting[T]) wait(patience time.Duration) (T, error) {
	for v.got == nil {
		left, err := v.lane.giveUp(v.others.since(v.began), patience)
		if err != nil {
			v.got = &reply[T]{err: err}
			break
		}
		v.moment(left)
	}
	return v.got.v, v.got.err
}
