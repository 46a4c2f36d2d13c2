package publisher

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// form is what is published of a device that the server refuses as invalid.
type form int

// The forms, each for when the one before is refused. A device that was never published is left out in their place: it is new.
const (
	wanted   form = iota
	kept          // as the server has it, with the wanted taints
	cordoned      // as the server has it with its taints that keep pods away, and the taint "withdrawn": a claim may have it, and nothing new gets it
	omitted       // left out, since it would keep the others of its slice as they are. Nothing else is offered on its hardware
)

// refusal is why a device has another form than the wanted one.
type refusal struct {
	form form
	err  error
}

const (
	maxDryRuns   = 40 // dry runs of one search, after which it is not refined
	refusedValue = "refused by the API server"
)

// desired returns the devices to publish, each in its form.
func (p *Publisher) desired() []kubeapi.Device {
	if len(p.refused) == 0 {
		return p.devices
	}
	published := p.publishedDevices()
	var all []kubeapi.Device
	for _, d := range p.devices {
		if d, ok := inForm(d, p.refused[d.Name].form, published); ok {
			all = append(all, d)
		}
	}
	return all
}

// inForm returns a device in a form; false if it is left out. published are the devices as the server has them, or had them last.
func inForm(d kubeapi.Device, f form, published map[string]kubeapi.Device) (kubeapi.Device, bool) {
	if f == wanted {
		return d, true
	}
	as, ok := published[d.Name]
	if !ok || f == omitted {
		return d, false
	}
	if f == kept {
		as.Taints = d.Taints
		return as, true
	}
	as.Taints = slices.DeleteFunc(slices.Clone(as.Taints), func(t kubeapi.DeviceTaint) bool { return !blocks(t) })
	one := []kubeapi.Device{as}
	return resourceslice.Stamp(resourceslice.Cordon(one, refusedValue), one, time.Now())[0], true
}

// publishedDevices are the devices as the server has them, or had them when all was published last.
func (p *Publisher) publishedDevices() map[string]kubeapi.Device {
	all := resourceslice.ByName(slices.Concat(p.lastPublished...))
	maps.Copy(all, resourceslice.ByName(p.cache.devices(p.names.own)))
	return all
}

// findRefused finds by dry runs which devices of a slice the server refuses, after it has refused the slice with err, and gives them other forms. It
// fails with err if it is none of them: a webhook that fails, or a refusal that is over. First a server that may be another one than was asked,
// or refused dry runs then, is asked what it supports.
func (p *Publisher) findRefused(ctx context.Context, slice []kubeapi.Device, err error) error {
	if !p.supportKnown || p.reconnected || p.support.noDryRuns {
		before := p.support
		if err := p.detectSupport(ctx); err != nil {
			return err
		}
		if p.support != before {
			return nil
		}
	}
	var names []string
	for _, d := range slice {
		names = append(names, d.Name)
	}
	found, other := p.bisect(ctx, names, maps.Clone(p.refused))
	if other != nil {
		return other
	}
	if !found {
		return err
	}
	p.recheck.Reset()
	p.recheckAt = time.Now().Add(p.recheck.NextBackOff())
	return nil
}

// recheckRefused tries the refused devices again in the wanted form.
func (p *Publisher) recheckRefused(ctx context.Context) error {
	if len(p.refused) == 0 || time.Now().Before(p.recheckAt) {
		return nil
	}
	p.recheckAt = time.Now().Add(p.recheck.NextBackOff())
	_, err := p.bisect(ctx, slices.Sorted(maps.Keys(p.refused)), map[string]refusal{})
	return err
}

// bisect finds which of the devices of these names the server refuses in the forms that they have in refused, which becomes what is known. It
// reports whether one was refused, and changes nothing if the server refuses all slices.
func (p *Publisher) bisect(ctx context.Context, names []string, refused map[string]refusal) (found bool, err error) {
	if p.support.noDryRuns || p.bisecting {
		return false, nil
	}
	p.bisecting = true
	defer func() { p.bisecting = false }()
	if _, err := p.dryRun(ctx, nil); err != nil {
		if errors.Is(err, kubeapi.ErrInvalid) {
			return false, nil
		}
		return false, err
	}
	s := bisection{Publisher: p, devices: resourceslice.ByName(p.devices), published: p.publishedDevices(), refused: refused, dryRuns: maxDryRuns}
	names = slices.DeleteFunc(names, func(name string) bool { _, ok := s.devices[name]; return !ok })
	for some := range slices.Chunk(names, resourceslice.MaxDevices) {
		if err := s.check(ctx, some); err != nil {
			return false, err
		}
	}
	p.refused = s.refused
	return s.found, nil
}

// forget drops the refusals of devices that are not wanted any more, and of those that have changed: that is another try.
func (p *Publisher) forget(before []kubeapi.Device) {
	was, is := resourceslice.ByName(before), resourceslice.ByName(p.devices)
	maps.DeleteFunc(p.refused, func(name string, _ refusal) bool {
		d, ok := is[name]
		return !ok || !equalButTaints(was[name], d)
	})
}

// equalButTaints compares without taints.
func equalButTaints(a, b kubeapi.Device) bool {
	a.Taints, b.Taints = nil, nil
	return equalDevice(a, b)
}

// refusal is why the API does not have all devices as they are wanted; nil = it does.
func (p *Publisher) refusal() error {
	names := slices.Sorted(maps.Keys(p.refused))
	if len(names) == 0 {
		return nil
	}
	more := ""
	if len(names) > 1 {
		more = fmt.Sprintf(" and %d more", len(names)-1)
	}
	err := fmt.Errorf("device %s%s refused as invalid by the API server, and not published as the node has it: %w", names[0], more, p.refused[names[0]].err)
	return partialError{err, p.recheckAt}
}

// bisection is one search for the devices that the server refuses, by halves.
type bisection struct {
	*Publisher
	devices   map[string]kubeapi.Device // wanted
	published map[string]kubeapi.Device
	refused   map[string]refusal
	dryRuns   int // that are left; after them devices that are not told apart get the same form
	found     bool
}

// check searches the devices of these names in their present forms.
func (s *bisection) check(ctx context.Context, names []string) error {
	var devices []kubeapi.Device
	for _, name := range names {
		if d, ok := inForm(s.devices[name], s.refused[name].form, s.published); ok {
			devices = append(devices, d)
		}
	}
	if len(devices) == 0 {
		return nil
	}
	s.dryRuns--
	_, err := s.dryRun(ctx, devices)
	switch {
	case err == nil, !errors.Is(err, kubeapi.ErrInvalid):
		return err
	case len(names) > 1 && s.dryRuns > 0:
		half := len(names) / 2
		if err := s.check(ctx, names[:half]); err != nil {
			return err
		}
		return s.check(ctx, names[half:])
	}
	s.found = true
	for _, name := range names {
		s.refused[name] = refusal{min(s.refused[name].form+1, omitted), err}
	}
	return s.check(ctx, names)
}
