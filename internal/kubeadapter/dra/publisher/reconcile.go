package publisher

import (
	"cmp"
	"context"
	"fmt"
	"time"
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
func (p *Publisher) reconcile(ctx context.Context, changes <-chan change) {
	again, err := p.reconcileOnce(ctx, changes)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		p.failed(err)
	case again:
		p.compareAt(time.Now())
	}
}

// reconcileOnce does one plan. It reports whether another one has to follow at once.
func (p *Publisher) reconcileOnce(ctx context.Context, changes <-chan change) (again bool, err error) {
	if !p.cache.listed {
		return false, notListed
	}
	nodeErr := p.refreshNode(ctx)
	if p.node.uid == "" {
		return false, nodeErr
	}
	if !p.supportKnown || p.reconnected && time.Now().After(p.detectAt) {
		if err := p.detectSupport(ctx); err != nil {
			return false, err
		}
	}
	if p.wanted == nil {
		return false, waitError("the devices of the node are not known yet")
	}
	if p.dropShares.Load() && usesShares(p.wanted) {
		return false, waitError("waiting for the devices with each share as a device of its own: the API server drops allowMultipleAllocations")
	}
	p.deriveDevices()
	if err := p.recheckRefused(ctx); err != nil {
		return false, err
	}
	l := newLayout(p.desired())
	todo, retry := p.other.limit(p.view().plan(l), time.Now())
	if retry > 0 {
		p.compareAt(time.Now().Add(retry))
	}
	if len(todo.writes) == 0 {
		p.other.noWrites(p.foreign(), time.Now())
		return false, p.done(l, nodeErr)
	}
	if p.reconnected { // it may be another server
		return true, p.detectSupport(ctx)
	}
	if wait := p.throttle(todo); wait > 0 {
		p.compareAt(time.Now().Add(wait))
		return false, nil
	}
	return p.execute(ctx, l, todo, changes)
}

// execute prepares a plan and does its writes.
func (p *Publisher) execute(ctx context.Context, l layout, todo plan, changes <-chan change) (again bool, err error) {
	todo, later, err := p.readOwner(ctx, todo)
	if err != nil {
		return false, err
	}
	if todo.rewrite && len(l) != 1 && !p.support.noDryRuns {
		if again, err := p.dryRunPlan(ctx, todo); again || err != nil {
			return again, err
		}
	}
	again, err = p.write(ctx, todo, changes)
	if err == nil && later != nil {
		return false, later
	}
	return again, err
}

// deriveDevices derives the devices from the wanted ones. Their taints get the times that they have already, in the API after a restart.
func (p *Publisher) deriveDevices() {
	if p.derived {
		return
	}
	p.derived = true
	before := p.devices
	if before == nil {
		before = p.cache.devices(p.names.own)
	}
	p.devices = withTaintTimes(p.support.listable(p.wanted), before, time.Now())
	p.forget(before)
}

func (p *Publisher) view() view {
	return view{
		names: p.names, node: p.opts.Node, driver: p.opts.Driver, owner: p.node.uid, slices: p.cache.slices, highest: p.cache.highest,
		altered: p.altered, otherNames: p.otherNames, dropsTaints: p.support.dropsTaints,
	}
}

// done records that the API has what is to be published. nodeErr is why the Node could not be read.
func (p *Publisher) done(l layout, nodeErr error) error {
	if p.other.conflicts() {
		return otherDriverError{p.opts.Driver}
	}
	p.lastPublished, p.staleWrites = l, 0
	if err := cmp.Or(p.refusal(), nodeErr, p.other.err); err != nil {
		return err
	}
	if len(p.lasting.List()) > 0 || !p.current.Announced {
		p.log.Info("resource slices published", "slices", len(l), "devices", len(p.devices), "generation", p.cache.highest)
	}
	p.lasting.Replace("", "")
	p.setProblem("")
	p.setReachable()
	p.retry.reset()
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
	return p.minorWrites.take(time.Now())
}

// foreign is how many slices of the driver and node another client made.
func (p *Publisher) foreign() int {
	n := 0
	for name := range p.cache.slices {
		if !p.names.own(name) {
			n++
		}
	}
	return n
}
