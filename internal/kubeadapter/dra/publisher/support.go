package publisher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// support is what an API server does with the fields of devices.
type support struct {
	dropsShares bool // feature gate DRAConsumableCapacity
	dropsTaints bool // feature gate DRADeviceTaints
	refusesNone bool // taints with the effect None, which 1.34 does not know
	noDryRuns   bool // dry runs are refused, whatever they have
}

// listable returns the devices that a server without taints may list: one that must not get new work can only be left out. A device that a
// claim has stays: its capacity would count as free. Where the effect None is refused, taints that keep nothing away are left out.
func (s support) listable(devices []kubeapi.Device) []kubeapi.Device {
	if s.dropsTaints {
		return slices.DeleteFunc(slices.Clone(devices), func(d kubeapi.Device) bool { return !d.Held && slices.ContainsFunc(d.Taints, blocks) })
	}
	if !s.refusesNone {
		return devices
	}
	devices = slices.Clone(devices)
	for i, d := range devices {
		devices[i].Taints = slices.DeleteFunc(slices.Clone(d.Taints), func(t kubeapi.DeviceTaint) bool { return !blocks(t) })
	}
	return devices
}

const detectWithin = time.Hour // after a break of the connection, since the server may be another one

// detectSupport finds out by a dry run what the server does with fields. To find that out by a real write would publish, for a moment, a device for one
// claim under the name of one for many.
func (p *Publisher) detectSupport(ctx context.Context) error {
	found := p.support
	got, err := p.dryRun(ctx, []kubeapi.Device{testDevice(p.opts.Driver, kubeapi.NoSchedule, kubeapi.NoEffect)})
	found.refusesNone = errors.Is(err, kubeapi.ErrInvalid)
	if found.refusesNone {
		got, err = p.dryRun(ctx, []kubeapi.Device{testDevice(p.opts.Driver, kubeapi.NoSchedule)})
	}
	found.noDryRuns = errors.Is(err, kubeapi.ErrInvalid)
	switch {
	case found.noDryRuns: // the answers to real writes show it
		found.refusesNone = false
		if !p.support.noDryRuns {
			p.log.Warn("the API server refuses dry runs, and so does not answer which fields it supports", "error", err)
		}
	case err != nil:
		return err
	case len(got) != 1:
		return fmt.Errorf("the API server dropped the device of a dry run")
	default:
		found.dropsShares, found.dropsTaints = !got[0].AllowMultipleAllocations, len(got[0].Taints) == 0
	}
	p.setSupport(found)
	p.supportKnown, p.reconnected, p.detectAt = true, false, time.Time{}
	return nil
}

// testDevice is a device with the fields that a server may not support.
func testDevice(driver string, effects ...kubeapi.TaintEffect) kubeapi.Device {
	one := "1"
	d := kubeapi.Device{
		Name: "dry-run", AllowMultipleAllocations: true,
		Capacity: map[string]kubeapi.DeviceCapacity{"shares": {
			Value: "2", RequestPolicy: &kubeapi.CapacityRequestPolicy{Default: one, ValidRange: &kubeapi.CapacityRequestPolicyRange{Min: one, Step: one}},
		}},
	}
	for _, e := range effects {
		d.Taints = append(d.Taints, kubeapi.DeviceTaint{
			Key: driver + "/dry-run", Value: strings.ToLower(string(e)), Effect: e, TimeAdded: time.Now().UTC().Truncate(time.Second),
		})
	}
	return d
}

// dryRun returns devices as the server would store them in a slice of their own.
func (p *Publisher) dryRun(ctx context.Context, devices []kubeapi.Device) ([]kubeapi.Device, error) {
	slice := p.view().slice(0, 1, 1, devices)
	for {
		slice.Metadata.Name = p.dryRunName
		got, err := answer(ctx, p, func() (kubeapi.ResourceSlice, error) { return p.opts.API.CreateSlice(ctx, slice, kubeapi.DryRun) })
		if !errors.Is(err, kubeapi.ErrExists) {
			return got.Spec.Devices, err
		}
		p.dryRunName = p.names.alternative(0) // another client has the name
	}
}

// setSupport sets what the server supports, and logs what changed.
func (p *Publisher) setSupport(s support) {
	before := p.support
	p.support = s
	if s.dropsShares != p.dropShares.Load() {
		p.log.Info("consumable capacity in the API server (feature gate DRAConsumableCapacity)", "supported", !s.dropsShares)
		p.dropShares.Store(s.dropsShares)
	}
	if s.dropsTaints && !before.dropsTaints {
		p.log.Warn("the API server drops the taints of devices: enable its feature gate DRADeviceTaints. Unhealthy devices that no claim has are not listed")
	} else if !s.dropsTaints && before.dropsTaints {
		p.log.Info("the API server keeps the taints of devices now")
	}
	if s.refusesNone && !before.refusesNone {
		p.log.Info("the API server does not have the effect None of taints: what only degrades a device is not in its slice")
	}
	if s.dropsTaints != before.dropsTaints || s.refusesNone != before.refusesNone {
		p.derived = false
	}
	p.current.DropsTaints = s.dropsTaints
}

// compareAnswer finds fields that the server dropped from a write.
func (p *Publisher) compareAnswer(sent, got kubeapi.ResourceSliceSpec) {
	s := p.support
	s.dropsShares = s.dropsShares || usesShares(sent.Devices) && !usesShares(got.Devices)
	s.dropsTaints = s.dropsTaints || usesTaints(sent.Devices) && !usesTaints(got.Devices)
	p.setSupport(s)
}

func usesShares(devices []kubeapi.Device) bool {
	return slices.ContainsFunc(devices, func(d kubeapi.Device) bool { return d.AllowMultipleAllocations })
}

func usesTaints(devices []kubeapi.Device) bool {
	return slices.ContainsFunc(devices, func(d kubeapi.Device) bool { return len(d.Taints) > 0 })
}
