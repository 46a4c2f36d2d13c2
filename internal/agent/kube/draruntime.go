package kube

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
)

const (
	runtimeEvery  = 5 * time.Minute  // between two looks at the container runtime without a change of the Node: it may have been upgraded
	refusedEvery  = 10 * time.Second // the same while containers can't get devices: an operator is about to mend that
	nodeEvery     = time.Minute      // between two reads of the Node while only that has what is known of the runtime, and that is not enough
	runtimeAtMost = 10 * time.Second // for an answer: more than containerruntime waits
	nodeAtMost    = 20 * time.Second // for the Node: more than kubeapi waits
)

// check adds to the check of a claim that containers of the node can get devices: without CDI they would start without one.
func (d *draDriver) check(next func([]inventory.Unit) ([]inventory.Finding, error)) func([]inventory.Unit) ([]inventory.Finding, error) {
	return func(units []inventory.Unit) ([]inventory.Finding, error) {
		if why := d.refused.Load(); why != "" {
			return nil, errors.New("containers of this node would get no device: " + why)
		}
		return next(units)
	}
}

// publish publishes what the driver has, after each change of that or of whether containers of the node can get devices. It never waits for
// the container runtime: a taint must not.
func (d *draDriver) publish(ctx context.Context) error {
	task := d.watchdog.Register("devices to publish")
	defer task.Done()
	untilStarted := func() <-chan struct{} { // later the publisher's status has nothing new
		if d.devices.Load() != nil {
			return nil
		}
		return d.publisher.Status().Changed()
	}
	reconcile.Loop{
		On: []reconcile.Source{d.desired.Changed, d.known.Changed, d.refused.Changed, d.evicted.Changed, untilStarted}, Task: task,
	}.Run(ctx, func(context.Context, reconcile.Cause) time.Duration {
		started := d.devices.Load() != nil || d.publisher.Status().Load().Slices > 0
		if d.known.Load() && (d.refused.Load() == "" || started) {
			d.devices.Store(d.tainted())
		}
		return reconcile.Never
	})
	return nil
}

// tainted returns the devices of the driver as they are to be published. The pods of a broken GPU stay unless it may be evicted. While
// containers of the node can't get devices, each has a taint with the reason: a device that a claim holds must not leave the slices, and
// none may be given out. A node without slices gets none then.
func (d *draDriver) tainted() []kubeapi.Device {
	devices := resourceslice.EvictOnly(d.desired.Load(), d.evicted.Load())
	if why := d.refused.Load(); why != "" {
		reason, _, _ := strings.Cut(why, ": ") // a label's value has no room for the remedy
		return resourceslice.Cordon(devices, reason)
	}
	return devices
}

// followNode finds out whether containers of the node can get devices, and which names the kubelet must know: after each change of the
// Node, and regularly, as the container runtime may have been upgraded or configured.
func (d *draDriver) followNode(ctx context.Context) error {
	task := d.watchdog.Register("node")
	defer task.Done()
	var previous []string
	var read time.Time // when the Node was read for the sake of the runtime
	reconcile.Loop{
		On: []reconcile.Source{d.publisher.Node().Changed}, Task: task, Limit: runtimeAtMost + nodeAtMost,
	}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		if node := d.publisher.Node().Load(); node.Metadata.Name != "" {
			d.setRefused(d.unsupported(ctx, node))
			d.known.Store(true)
			if now := slices.Sorted(maps.Keys(node.Status.Capacity)); !slices.Equal(now, previous) {
				previous = now
				d.plugins.Refresh()
			}
		}
		if d.refused.Load() == "" {
			return runtimeEvery
		}
		if d.lastRuntime.Version == "" && time.Since(read) >= nodeEvery {
			read = time.Now()
			_ = d.publisher.RefreshNode(ctx) // or the next time
		}
		return refusedEvery
	})
	return nil
}

func (d *draDriver) setRefused(why string) {
	before := d.refused.Load()
	if before == why {
		return
	}
	d.refused.Store(why)
	if why != "" {
		d.log.Error("no device takes new work: containers of this node would get none", "reason", why)
	} else {
		d.log.Info("containers of this node can get devices again", "before", before)
	}
}

// unsupported is why containers of a node never get a device by CDI; "" if they may. What the runtime itself reports counts first. One that
// does not answer, as during its restart, is as it was, unless the Node has another one.
func (d *draDriver) unsupported(ctx context.Context, n kubeapi.Node) string {
	node := cdi.ParseRuntime(n.Status.NodeInfo.ContainerRuntimeVersion)
	if d.runtime != nil {
		r := d.runtime(ctx)
		if !r.LacksSettingsOf(d.lastRuntime) {
			d.lastRuntime = r
		} else if r.Version == "" && node.Version != "" && node.Version != d.lastRuntime.Version {
			d.lastRuntime = cdi.Runtime{}
		}
	}
	if d.lastRuntime.Version != "" {
		return d.lastRuntime.Unsupported(d.folder)
	}
	return node.Unsupported(d.folder)
}
