package publisher

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeapi"
)

// parallelCreates is how many slices are created at the same time: with one after the other, those of a large node take as many answers of
// the server as there are slices.
const parallelCreates = 4

// together returns how many of the writes are sent at the same time, the first ones; 0 = not before pause is over.
func (p *Publisher) together(writes []write) (n int, pause time.Duration) {
	if writes[0].verb != create {
		return 1, 0
	}
	for n < min(len(writes), parallelCreates) && writes[n].verb == create {
		if pause = p.creates.take(time.Now()); pause > 0 {
			break
		}
		n++
	}
	return n, pause
}

// prepare does what comes before the writes of a plan: the Node's UID for the owner of what is created, and a dry run of a layout whose
// refusal would leave the pool incomplete. It reports whether there has to be another plan.
func (p *Publisher) prepare(ctx context.Context, l layout, todo plan) (again bool, err error) {
	for _, w := range todo.writes {
		if w.verb == create && time.Since(p.nodeRead) > nodeFresh {
			owner := p.owner
			if err := p.readNode(ctx); err != nil {
				return false, err
			}
			if p.owner != owner {
				return true, nil
			}
			break
		}
	}
	if !todo.rewrite || len(l) == 1 {
		return false, nil
	}
	for _, w := range todo.writes {
		p.task.Heartbeat(callTimeout)
		switch w.verb {
		case create:
			_, err = p.opts.API.CreateSlice(ctx, w.slice, kubeapi.DryRun)
		case update:
			_, err = p.opts.API.UpdateSlice(ctx, w.slice, kubeapi.DryRun)
		case remove:
			continue
		}
		if errors.Is(err, kubeapi.ErrInvalid) {
			p.refuse(l, err)
			return true, nil
		}
		if err != nil {
			return p.recover(ctx, w, err)
		}
	}
	return false, nil
}

// refuse records that the server refuses a layout, and logs that once. The next plan has something else to publish.
func (p *Publisher) refuse(l layout, err error) {
	p.refused[fingerprintOf(l)] = err
	if p.refusal == err.Error() {
		return
	}
	p.refusal = err.Error()
	p.logged = p.refusal // once
	p.log.Error("resource slices refused as invalid: the latest good ones stay, with the present taints", "error", err)
}

// write does the writes of a plan. It reports whether another plan has to follow at once.
func (p *Publisher) write(ctx context.Context, todo plan, observations <-chan observation) (again bool, err error) {
	var firstErr error
	p.creates.limitCreates(todo.slices)
	for rest := todo.writes; len(rest) > 0; {
		n, pause := p.together(rest)
		if n == 0 {
			p.at(time.Now().Add(pause))
			return false, firstErr
		}
		p.task.Heartbeat(callTimeout)
		for i, err := range p.send(ctx, rest[:n]) {
			w := rest[i]
			switch {
			case err == nil:
			case w.foreign:
				firstErr = cmpErr(firstErr, err) // the own slices have a higher generation
			case errors.Is(err, kubeapi.ErrInvalid) && w.verb != remove:
				l, _ := p.layout()
				if _, known := p.refused[fingerprintOf(l)]; known {
					return false, err
				}
				p.refuse(l, err)
				return true, nil
			default:
				return p.recover(ctx, w, err)
			}
		}
		if !rest[0].foreign && p.interrupted(observations) {
			return true, nil
		}
		rest = rest[n:]
	}
	return firstErr == nil, firstErr
}

func cmpErr(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// send sends writes at the same time, and takes their answers.
func (p *Publisher) send(ctx context.Context, writes []write) []error {
	got, errs := make([]kubeapi.ResourceSlice, len(writes)), make([]error, len(writes))
	var sent sync.WaitGroup
	for i, w := range writes {
		if w.foreign {
			p.rivals.deleted(time.Now())
			p.log.Warn("slice of another driver of this name deleted: it is not published by this agent", "slice", w.slice.Metadata.Name)
		}
		sent.Go(func() { got[i], errs[i] = request(ctx, p.opts.API, w) })
	}
	sent.Wait()
	for i, w := range writes {
		p.writes.count(w.verb, errs[i])
		if errs[i] == nil {
			p.current.LastWrite = time.Now()
			p.took(w, got[i])
		}
	}
	return errs
}

// request sends a write and returns the slice as the server stored it.
func request(ctx context.Context, api *kubeapi.Client, w write) (kubeapi.ResourceSlice, error) {
	switch w.verb {
	case create:
		return api.CreateSlice(ctx, w.slice, kubeapi.Store)
	case update:
		return api.UpdateSlice(ctx, w.slice, kubeapi.Store)
	case remove:
		err := api.DeleteSlice(ctx, w.slice.Metadata.Name, w.slice.Metadata.UID)
		if errors.Is(err, kubeapi.ErrNotFound) {
			err = nil
		}
		return kubeapi.ResourceSlice{}, err
	}
	return kubeapi.ResourceSlice{}, nil
}

// took takes the answer to a write.
func (p *Publisher) took(w write, got kubeapi.ResourceSlice) {
	name := w.slice.Metadata.Name
	if w.verb == remove {
		p.seen.gone(name)
		return
	}
	p.compareAnswer(w.slice.Spec, got.Spec)
	if equalDevices(w.slice.Spec.Devices, got.Spec.Devices) {
		got.Spec.Devices = w.slice.Spec.Devices // one copy in memory
	} else {
		p.stored[name] = newAnswered(w.slice.Spec, got.Spec)
	}
	p.seen.wrote(got)
}
