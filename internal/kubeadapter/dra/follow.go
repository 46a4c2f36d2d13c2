package dra

import (
	"context"
	"reflect"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
)

// follow derives what slices and health streams have from inventory and prepared claims, until ctx ends.
func (a *Adapter) follow(ctx context.Context) {
	task := a.opts.Watchdog.Register("DRA devices")
	defer task.Done()
	claims := func() <-chan struct{} {
		if !a.isLoaded() {
			return a.loaded
		}
		return a.store.Load().Watch().Changed()
	}
	reconcile.Loop{
		On: []reconcile.Source{a.src.Changed, a.admission.Changed, a.opts.SharesAsDevices.Changed, claims}, Task: task,
	}.Run(ctx, func(context.Context, reconcile.Cause) time.Duration {
		a.derive()
		return reconcile.Never
	})
}

// input returns what slices are made from now; false while the prepared claims are not read, or pods may have claims that are not
// known yet: a device would be offered that is in use.
func (a *Adapter) input() (resourceslice.Input, bool) {
	present := a.admission.Load()
	if !a.isLoaded() || present.pending {
		return resourceslice.Input{}, false
	}
	inv := a.src.Current()
	if d := inv.Driver(); d.Version != "" {
		a.lastDriver.Store(&d)
	}
	return resourceslice.Input{
		Allocatable: inv, LastDriver: *a.lastDriver.Load(), Prepared: a.store.Load().All(), BootID: a.opts.BootID,
		SharesAsDevices: a.opts.SharesAsDevices.Load(), Evict: a.opts.Evict, Cordoned: present.text(),
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
	a.view.Store(&view{in.Allocatable, resourceslice.ByName(devices)})
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
