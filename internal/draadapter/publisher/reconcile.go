package publisher

import (
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
	return p.minor.take(time.Now())
}
