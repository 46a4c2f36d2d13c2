package publisher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeapi"
)

// otherDriverError is why nothing is written while another driver of the same name publishes for the node.
type otherDriverError struct{ driver string }

// Error has the reason and the remedy.
func (e otherDriverError) Error() string {
	return fmt.Sprintf("another driver %s publishes for this node: its slices were deleted and are back; remove that driver from the node", e.driver)
}

// waitError is why nothing is published for now, without a failure.
type waitError string

const notListed = waitError("the API server has not answered yet")

// Error returns the reason.
func (e waitError) Error() string { return string(e) }

// reconcile compares and writes until nothing is left to do, a request fails, or something changed that asks for another plan.
func (p *Publisher) reconcile(ctx context.Context, observations <-chan observation) {
	again, err := p.round(ctx, observations)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		p.failed(err)
	case again:
		p.at(time.Now())
	}
}

// round does one plan. It reports whether another one has to follow at once.
func (p *Publisher) round(ctx context.Context, observations <-chan observation) (again bool, err error) {
	if !p.seen.listed {
		return false, notListed
	}
	if p.owner == "" || p.nodeRead.Add(resync).Before(time.Now()) {
		if err := p.readNode(ctx); err != nil {
			return false, err
		}
	}
	if !p.probed {
		p.task.Heartbeat(callTimeout)
		if err := p.probe(ctx); err != nil {
			return false, err
		}
	}
	if p.wanted == nil {
		return false, waitError("the devices of the node are not known yet")
	}
	if p.dropShares.Load() && usesShares(p.wanted) {
		return false, waitError("waiting for the devices with each share as a device of its own: the API server drops allowMultipleAllocations")
	}
	p.stamp()
	l, err := p.layout()
	todo, retry := p.rivals.limit(p.view().plan(l), time.Now())
	if retry > 0 {
		p.at(time.Now().Add(retry))
	}
	if len(todo.writes) == 0 {
		p.rivals.quiet(p.foreign(), time.Now())
		return false, p.done(l, err)
	}
	if wait := p.throttle(todo); wait > 0 {
		p.at(time.Now().Add(wait))
		return false, nil
	}
	if again, err := p.prepare(ctx, l, todo); again || err != nil {
		return again, err
	}
	return p.write(ctx, todo, observations)
}

// stamp gives the desired taints their times: those that they have already, in the API after a restart.
func (p *Publisher) stamp() {
	if p.stamped {
		return
	}
	p.stamped = true
	before := p.devices
	if before == nil {
		before = p.seen.devices(p.names.own)
	}
	p.devices = stamped(p.wanted, before, time.Now())
}

// layout returns what to publish: the latest good layout with the present taints if the server refused the desired one as invalid.
func (p *Publisher) layout() (layout, error) {
	desired := newLayout(p.devices)
	if len(p.refused) == 0 {
		return desired, nil
	}
	reason, bad := p.refused[fingerprintOf(desired)]
	if !bad {
		return desired, nil
	}
	good := p.good
	if good == nil {
		return desired, reason
	}
	tainted := good.withTaints(p.devices)
	if _, bad := p.refused[fingerprintOf(tainted)]; bad {
		return good, reason
	}
	return tainted, reason
}

func (p *Publisher) view() view {
	return view{
		names: p.names, node: p.opts.Node, driver: p.opts.Driver, owner: p.owner,
		slices: p.seen.slices, highest: p.seen.highest, stored: p.stored, dropsTaints: p.current.DropsTaints,
	}
}

// done records that the API has what is to be published. refusal is why that is not what is desired.
func (p *Publisher) done(l layout, refusal error) error {
	if p.rivals.contested() {
		return otherDriverError{p.opts.Driver}
	}
	if refusal != nil {
		return refusal
	}
	p.good = l
	if p.logged != "" || !p.current.Announced {
		p.log.Info("resource slices published", "slices", len(l), "devices", len(p.devices), "generation", p.seen.highest)
	}
	p.logged, p.surprises = "", 0
	p.problem("")
	p.reached()
	p.retry.Reset()
	return nil
}

// throttle returns how long a plan has to wait: writes that only take taints away, or change what keeps no pod away, do not follow a value
// that flaps.
func (p *Publisher) throttle(todo plan) time.Duration {
	for _, w := range todo.writes {
		if w.urgent || w.verb == create {
			return 0
		}
	}
	return p.minor.take(time.Now())
}

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
