package publisher

import (
	"context"
	"errors"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeapi"
)

// pauseOf returns how long the create of a slice has to wait: one that somebody deletes again and again is not created without a pause.
func (p *Publisher) pauseOf(w write) time.Duration {
	if w.verb != create {
		return 0
	}
	limit := p.recreate[w.slice.Metadata.Name]
	if limit == nil {
		limit = &bucket{size: 20, every: time.Second}
		p.recreate[w.slice.Metadata.Name] = limit
	}
	return limit.take(time.Now())
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
	for _, w := range todo.writes {
		if pause := p.pauseOf(w); pause > 0 {
			p.at(time.Now().Add(pause))
			return false, firstErr
		}
		p.task.Heartbeat(callTimeout)
		err := p.one(ctx, w)
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
		if !w.foreign && p.interrupted(observations) {
			return true, nil
		}
	}
	return firstErr == nil, firstErr
}

func cmpErr(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// one does one write and takes its answer.
func (p *Publisher) one(ctx context.Context, w write) error {
	name := w.slice.Metadata.Name
	var got kubeapi.ResourceSlice
	var err error
	switch w.verb {
	case create:
		got, err = p.opts.API.CreateSlice(ctx, w.slice, kubeapi.Store)
	case update:
		got, err = p.opts.API.UpdateSlice(ctx, w.slice, kubeapi.Store)
	case remove:
		if w.foreign {
			p.rivals.deleted(time.Now())
			p.log.Warn("slice of another driver of this name deleted: it is not published by this agent", "slice", name)
		}
		if err = p.opts.API.DeleteSlice(ctx, name, w.slice.Metadata.UID); err == nil || errors.Is(err, kubeapi.ErrNotFound) {
			p.writes.count(w.verb, nil)
			p.seen.gone(name)
			return nil
		}
	}
	p.writes.count(w.verb, err)
	if err != nil {
		return err
	}
	p.compareAnswer(w.slice.Spec, got.Spec)
	if equalDevices(w.slice.Spec.Devices, got.Spec.Devices) {
		got.Spec.Devices = w.slice.Spec.Devices // one copy in memory
	} else {
		p.stored[name] = newAnswered(w.slice.Spec, got.Spec)
	}
	p.seen.wrote(got)
	return nil
}
