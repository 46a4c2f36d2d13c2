package resetter

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Progress is how far the latest reset of this process has come.
type Progress struct {
	Number uint64       `json:"number"`
	GPU    gpu.DeviceID `json:"gpu"`
	Phases []Phase      `json:"phases,omitempty"` // so far
	End    *reset.End   `json:"end,omitempty"`    // nil = it runs
}

// Phase is a part of a reset.
type Phase struct {
	At   time.Time `json:"at"` // its beginning
	Text string    `json:"text"`
}

// Plan is a reset that a person asks for.
type Plan struct {
	GPU    gpu.DeviceID   `json:"gpu"`
	With   []gpu.DeviceID `json:"with,omitempty"`   // its P2P group, which must be free, too
	Keeps  []reset.Wait   `json:"keeps,omitempty"`  // all that keeps it from beginning now
	Number uint64         `json:"number,omitempty"` // of the reset that has begun; 0 = none has
}

// Progress returns that of a reset of this process, if it is the latest one.
func (r *Resetter) Progress(number uint64) (Progress, bool) {
	p := r.progress.Load()
	if p == nil || p.Number != number {
		return Progress{}, false
	}
	return *p, true
}

// phase records the beginning of a part of a reset.
func (a *attempt) phase(text string) {
	a.opts.Log.Debug("reset", "id", a.GPU, "phase", text)
	a.show(func(p *Progress) { p.Phases = append(slices.Clone(p.Phases), Phase{time.Now(), text}) })
}

// show changes what Progress returns.
func (a *attempt) show(change func(*Progress)) {
	p := *a.progress.Load()
	change(&p)
	a.progress.Store(&p)
}

// Plan returns what a reset by a person would be, and all that keeps it from beginning now. It changes nothing. With loseMIG, instances of MIG may be lost.
func (r *Resetter) Plan(ctx context.Context, id gpu.DeviceID, loseMIG bool) Plan {
	plan, _ := r.plan(ctx, id, loseMIG)
	return plan
}

// Begin begins a reset by a person, unless something keeps it from beginning, by the plan that is returned. Progress has the rest.
func (r *Resetter) Begin(ctx context.Context, id gpu.DeviceID, loseMIG bool) Plan {
	plan, b := r.plan(ctx, id, loseMIG)
	if len(plan.Keeps) > 0 {
		return plan
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s, b := r.state.BegunByPerson(b, time.Now())
	if r.ending || r.Resets() != "" || b.Number == 0 { // since the plan was made
		plan.Keeps = []reset.Wait{{GPU: id, Code: reset.WaitTurn, Text: "another reset has begun, or the agent ends"}}
		return plan
	}
	if err := r.file.Store(s); err != nil {
		plan.Keeps = []reset.Wait{unrecorded(id, err)}
		return plan
	}
	r.set(s)
	r.begin(ctx, b, r.byPerson(loseMIG))
	plan.Number = b.Number
	return plan
}

// byPerson is the policy for a reset by a person.
func (r *Resetter) byPerson(loseMIG bool) reset.Policy {
	p := r.opts.Policy
	p.Mode, p.LoseMIG = reset.Act, p.LoseMIG || loseMIG
	return p
}

// plan returns the plan of a reset by a person, with its beginning.
func (r *Resetter) plan(ctx context.Context, id gpu.DeviceID, loseMIG bool) (Plan, reset.Begin) {
	r.mu.Lock()
	err, s, ends := r.load(), r.state, r.ending
	r.mu.Unlock()
	n := r.opts.Node.See()
	unready := r.opts.Resetter.Ready(ctx)
	n.Cannot = both(n.Cannot, unready)
	b, keeps := r.byPerson(loseMIG).ByPerson(s, n, id)
	if ends {
		keeps = append(keeps, reset.Wait{GPU: id, Code: reset.WaitPaused, Text: ErrEnding.Error()})
	}
	if err != nil {
		keeps = append(keeps, unrecorded(id, err))
	}
	if _, runs := s.Running(); r.Resets() != "" && !runs {
		keeps = append(keeps, reset.Wait{GPU: id, Code: reset.WaitTurn, Text: ending})
	}
	if s.Watchers && r.Resets() == "" {
		keeps = append(keeps, reset.Wait{GPU: id, Code: reset.WaitPaused, Text: resuming})
	}
	unknown := slices.ContainsFunc(keeps, func(w reset.Wait) bool { return w.Code == reset.WaitUnknown })
	if unready == nil && !unknown {
		for _, one := range slices.Concat([]gpu.DeviceID{id}, b.With) {
			if _, err := r.lookAt(ctx, one); err != nil && !r.endsWhenTaken(err) {
				keeps = append(keeps, reset.Wait{GPU: id, Code: codeOf(err), Text: err.Error()})
			}
		}
	}
	return Plan{GPU: id, With: b.With, Keeps: keeps}, b
}

// endsWhenTaken reports whether what a look has found are only processes that end when the GPU is taken.
func (r *Resetter) endsWhenTaken(err error) bool {
	e, inUse := errors.AsType[*gpureset.InUseError](err)
	stays := func(c gpureset.Client) bool { return !r.opts.Node.EndsWhenTaken(e.GPU, c) }
	return inUse && !slices.ContainsFunc(e.Clients, stays)
}

// unrecorded is what keeps a reset from beginning without the record of resets.
func unrecorded(id gpu.DeviceID, err error) reset.Wait {
	return reset.Wait{GPU: id, Code: reset.Code(problem.ResetState), Text: "the record of resets can't be read or written: " + err.Error()}
}

// codeOf is the code of what a look has found.
func codeOf(err error) reset.Code {
	_, inUse := errors.AsType[*gpureset.InUseError](err)
	_, busy := errors.AsType[*gpureset.BusyError](err)
	switch {
	case inUse:
		return reset.WaitProcesses
	case busy:
		return reset.WaitTurn
	default:
		return reset.WaitUnread
	}
}
