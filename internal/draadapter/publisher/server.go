package publisher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeapi"
)

// readNode reads the Node, whose UID is the owner of slices: a Node that is deleted takes them with it, and one of the same name that is
// created later has another UID.
func (p *Publisher) readNode(ctx context.Context) error {
	p.task.Heartbeat(callTimeout)
	node, err := p.opts.API.Node(ctx, p.opts.Node)
	if errors.Is(err, kubeapi.ErrNotFound) {
		p.owner = ""
		return fmt.Errorf("the Node does not exist (so far), and slices belong to it; is %q the name of this node's object? %w", p.opts.Node, err)
	}
	if err != nil {
		return err
	}
	p.owner, p.nodeRead = node.Metadata.UID, time.Now()
	p.node.Store(node)
	return nil
}

// probe asks the server by a dry run which fields it drops because of disabled feature gates. To find that out by a real write would
// publish, for a moment, a device for one claim under the name of one for many.
func (p *Publisher) probe(ctx context.Context) error {
	one := "1"
	v := p.view()
	probe := v.slice(0, 1, 1, []kubeapi.Device{{
		Name: "dry-run", AllowMultipleAllocations: true,
		Capacity: map[string]kubeapi.DeviceCapacity{"shares": {
			Value: "2", RequestPolicy: &kubeapi.CapacityRequestPolicy{Default: one, ValidRange: &kubeapi.CapacityRequestPolicyRange{Min: one, Step: one}},
		}},
		Taints: []kubeapi.DeviceTaint{{Key: p.opts.Driver + "/dry-run", Effect: kubeapi.NoSchedule, TimeAdded: time.Now().UTC().Truncate(time.Second)}},
	}})
	probe.Metadata.Name = p.names.prefix + "dry-run"
	got, err := p.opts.API.CreateSlice(ctx, probe, kubeapi.DryRun)
	switch {
	case errors.Is(err, kubeapi.ErrInvalid), errors.Is(err, kubeapi.ErrExists): // the answers to real writes show it
		p.log.Warn("the API server does not answer which fields it supports", "error", err)
	case err != nil:
		return err
	case len(got.Spec.Devices) != 1:
		return fmt.Errorf("the API server dropped the device of a dry run")
	default:
		d := got.Spec.Devices[0]
		p.setDrops(!d.AllowMultipleAllocations, len(d.Taints) == 0)
	}
	p.probed = true
	return nil
}

// setDrops takes which fields the server drops, and logs it when it changes.
func (p *Publisher) setDrops(shares, taints bool) {
	if shares != p.dropShares.Load() {
		p.log.Info("consumable capacity in the API server (feature gate DRAConsumableCapacity)", "supported", !shares)
		p.dropShares.Store(shares)
	}
	if taints && !p.current.DropsTaints {
		p.log.Warn("the API server drops the taints of devices: enable its feature gate DRADeviceTaints, or unhealthy GPUs are given to new pods")
	} else if !taints && p.current.DropsTaints {
		p.log.Info("the API server keeps the taints of devices now")
	}
	p.current.DropsTaints = taints
}

// compareAnswer finds fields that the server dropped from a write.
func (p *Publisher) compareAnswer(sent, got kubeapi.ResourceSliceSpec) {
	shares := p.dropShares.Load() || usesShares(sent.Devices) && !usesShares(got.Devices)
	taints := p.current.DropsTaints || usesTaints(sent.Devices) && !usesTaints(got.Devices)
	p.setDrops(shares, taints)
}

func usesShares(devices []kubeapi.Device) bool {
	return slices.ContainsFunc(devices, func(d kubeapi.Device) bool { return d.AllowMultipleAllocations })
}

func usesTaints(devices []kubeapi.Device) bool {
	return slices.ContainsFunc(devices, func(d kubeapi.Device) bool { return len(d.Taints) > 0 })
}

// foreign is how many slices of the driver and node another client made.
func (p *Publisher) foreign() int {
	n := 0
	for name := range p.seen.slices {
		if !p.names.own(name) {
			n++
		}
	}
	return n
}
