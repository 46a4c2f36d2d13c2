package publisher

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// addTaints writes the taints that keep pods from devices into the slices as they are, under the present generation: each such write is a
// valid state of the pool. It waits for nothing else that the publisher does, because each moment without the taint may give the device
// out. It returns when it has to be called again.
func (p *Publisher) addTaints(ctx context.Context) (again time.Duration) {
	if p.addingTaints || p.wanted == nil || !p.cache.listed || p.support.dropsTaints {
		return resync
	}
	p.addingTaints = true
	defer func() { p.addingTaints = false }()
	for {
		p.deriveDevices()
		writes := p.view().taints(p.desired())
		if len(writes) == 0 || ctx.Err() != nil {
			return resync
		}
		if wait := time.Until(p.taintsNotBefore); wait > 0 {
			return wait
		}
		if err := p.writeTaints(ctx, writes); err != nil {
			p.report(err)
			wait := p.taintRetry.next(err)
			p.taintsNotBefore = time.Now().Add(wait)
			switch {
			case errors.Is(err, kubeapi.ErrUnavailable): // nothing else would work
				p.pause(wait)
			case errors.Is(err, kubeapi.ErrInvalid): // perhaps because of what the slice has already: a comparison writes it anew
				p.compareAt(time.Now())
			}
		} else {
			p.taintRetry.reset()
		}
	}
}

// writeTaints writes slices, four at the same time. It returns the first failure after which nothing is known that another try needs.
func (p *Publisher) writeTaints(ctx context.Context, writes []write) (first error) {
	for some := range slices.Chunk(writes, parallelWrites) {
		for i, err := range p.send(ctx, some) {
			switch {
			case err == nil:
			case errors.Is(err, kubeapi.ErrInvalid):
				first = cmp.Or(first, p.findRefused(ctx, some[i].slice.Spec.Devices, err))
			default:
				_, err := p.handleFailure(ctx, some[i], err)
				first = cmp.Or(first, err)
			}
		}
	}
	return first
}

// taints returns the writes that add taints which keep pods away, and change nothing else.
func (v view) taints(devices []kubeapi.Device) (all []write) {
	wanted := resourceslice.ByName(devices)
	for _, name := range slices.Sorted(maps.Keys(v.slices)) {
		s := v.slices[name]
		if !v.names.own(name) || s.Spec.Pool.Name != v.node || !addsTaint(devices, resourceslice.ByName(s.Spec.Devices)) {
			continue
		}
		w := write{verb: update, slice: s}
		w.slice.Spec.Devices = withBlockingTaints(s.Spec.Devices, wanted)
		if a, ok := v.altered[name]; !ok || a != newSentAndStored(w.slice.Spec, s.Spec) {
			all = append(all, w)
		}
	}
	return all
}

// withBlockingTaints returns published devices with what the wanted ones have of taints that keep pods away, before their own.
func withBlockingTaints(published []kubeapi.Device, wanted map[string]kubeapi.Device) []kubeapi.Device {
	all := slices.Clone(published)
	for i, d := range all {
		var taints []kubeapi.DeviceTaint
		for _, t := range wanted[d.Name].Taints {
			if blocks(t) && !hasTaint(d, t) {
				taints = append(taints, t)
			}
		}
		if len(taints) == 0 {
			continue
		}
		for _, t := range d.Taints {
			if !slices.ContainsFunc(taints, func(n kubeapi.DeviceTaint) bool { return n.Key == t.Key && n.Value == t.Value }) {
				taints = append(taints, t)
			}
		}
		all[i].Taints = taints[:min(len(taints), resourceslice.MaxTaints)]
	}
	return all
}

// await waits for a request, and publishes taints meanwhile: its answer may take 15 s. The request is sent by another goroutine, and must not
// touch what Run has.
//
//	request ------------------------------------> answer
//	    new devices --> addTaints --> slice i+1
func (p *Publisher) await(ctx context.Context, request func() error) error {
	p.task.Heartbeat(callTimeout)
	done := make(chan error, 1)
	go func() { done <- request() }()
	if p.addingTaints {
		return <-done
	}
	for {
		changed := p.takeDevices()
		again := time.NewTimer(p.addTaints(ctx))
		p.task.Heartbeat(callTimeout)
		select {
		case err := <-done:
			again.Stop()
			return err
		case <-changed:
		case <-again.C:
		}
		again.Stop()
	}
}

// answer waits for a request as await does, and returns its answer.
func answer[T any](ctx context.Context, p *Publisher, request func() (T, error)) (got T, err error) {
	err = p.await(ctx, func() (err error) {
		got, err = request()
		return err
	})
	return got, err
}
