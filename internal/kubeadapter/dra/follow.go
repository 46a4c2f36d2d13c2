package dra

import (
	"context"
	"reflect"
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// follow derives what slices and health streams have from inventory and prepared claims, until ctx ends.
func (a *Adapter) follow(ctx context.Context) {
	task := a.opts.Watchdog.Register("DRA devices")
	defer task.Done()
	due := make(chan struct{}, 1)
	var pumps sync.WaitGroup
	defer pumps.Wait()
	pumps.Go(func() {
		for range a.src.Watch(ctx) {
			watch.Notify(due)
		}
	})
	pumps.Go(func() { notifyEach(ctx, a.guard, due) })
	pumps.Go(func() { notifyEach(ctx, a.opts.SharesAsDevices, due) })
	pumps.Go(func() {
		select {
		case <-a.loaded:
			notifyEach(ctx, a.store.Load().Watch(), due)
		case <-ctx.Done():
		}
	})
	for {
		task.Heartbeat(0)
		select {
		case <-due:
			a.derive()
		case <-ctx.Done():
			return
		}
	}
}

func notifyEach[T any](ctx context.Context, v *watch.Value[T], due chan<- struct{}) {
	for range v.Watch(ctx) {
		watch.Notify(due)
	}
}

// input returns what slices are made from now; false while the prepared claims are not read, or pods may have claims that are not
// known yet: a device would be offered that is in use.
func (a *Adapter) input() (resourceslice.Input, bool) {
	guard := a.guard.Load()
	if !a.isLoaded() || guard.pending {
		return resourceslice.Input{}, false
	}
	inv := a.src.Current()
	if d := inv.Driver(); d.Version != "" {
		a.lastDriver.Store(&d)
	}
	return resourceslice.Input{
		Inventory: inv, LastDriver: *a.lastDriver.Load(), Prepared: a.store.Load().All(), BootID: a.opts.BootID,
		SharesAsDevices: a.opts.SharesAsDevices.Load(), Evict: a.opts.Evict, Withdrawn: guard.text(),
	}, true
}

// derive publishes what follows from the present input, as far as it differs.
func (a *Adapter) derive() {
	defer a.changed()
	if a.isLoaded() {
		if all := a.store.Load().All(); !sameClaims(all, a.claims.Load()) {
			a.claims.Store(all)
		}
	}
	in, known := a.input()
	if !known {
		return
	}
	devices := resourceslice.Devices(in)
	a.view.Store(&view{in.Inventory, byName(devices)})
	if !reflect.DeepEqual(devices, a.desired.Load()) {
		a.desired.Store(devices)
	}
	if health := resourceslice.Messages(in); !slices.Equal(health, a.health.Load()) {
		a.health.Store(health)
	}
}

// sameClaims reports whether two lists are one: a change makes a new one.
func sameClaims(a, b []prepared.Claim) bool {
	return a != nil && b != nil && len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

func byName(devices []kubeapi.Device) map[string]kubeapi.Device {
	all := make(map[string]kubeapi.Device, len(devices))
	for _, d := range devices {
		all[d.Name] = d
	}
	return all
}
