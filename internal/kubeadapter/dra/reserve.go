package dra

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/deviceconfig"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// request is what a claim is to get.
type request struct {
	claimRef
	results []kubeapi.DeviceRequestAllocationResult // of this driver
	users   []kubeapi.ClaimConsumerReference        // that may use the claim
	configs deviceconfig.Configs
}

// newRequest returns what an allocation has of this driver.
func (a *Adapter) newRequest(ref claimRef, claim kubeapi.ResourceClaim) (request, error) {
	r := request{claimRef: ref, users: claim.Status.ReservedFor}
	var errs []error
	for _, one := range claim.Status.Allocation.Devices.Results {
		if one.Driver != resourceslice.Driver {
			continue
		}
		if one.Pool != a.opts.Node {
			errs = append(errs, &PoolError{one.Device, one.Pool, a.opts.Node})
		}
		r.results = append(r.results, one)
	}
	if len(r.results) == 0 {
		return r, ErrNoDevices
	}
	var err error
	if r.configs, err = deviceconfig.Parse(claim.Status.Allocation.Devices.Config, resourceslice.Driver); err != nil {
		errs = append(errs, err)
	}
	return r, join(errs)
}

// planned is one result of a request that can be fulfilled.
type planned struct {
	want
	unit inventory.Unit
	plan inventory.Plan
}

// reservation is what a claim has got.
type reservation struct {
	claim   prepared.Claim // "started"
	wants   []want         // of the results
	devices []gpu.Device
}

// tryReserve reserves the devices of a request, if all are available now. wait reports that none of the errors lasts. The lock makes checks and
// record one step: what another API of this process gives out is seen here, or sees this. The inventory is read with the lock held, so
// that a device which is withdrawn before the lock was free is not given out.
func (a *Adapter) tryReserve(r request, store *prepared.Store) (got reservation, wait bool, err error) {
	a.lock.Lock()
	defer a.lock.Unlock()
	now := a.admission.Load()
	if text := now.textFor(r.namespace); text != "" {
		return got, now.pending, &CordonedError{text}
	}
	inv, unread := a.src.Current(), store.Unread()
	claims := heldBy(claimsBeside(r.uid, a.opts.BootID, store.All()))
	held := holders.NewSet(claims, a.pluginHolders(), now.lostBeside(r.claimRef))
	c := prepared.Claim{BootID: a.opts.BootID, Namespace: r.namespace, Name: r.name, UID: r.uid, State: prepared.Started}
	if before, ok := store.Get(r.uid); ok {
		c.Unknown = before.Unknown
	}
	var errs []error
	var all []planned
	wait = true
	for i := range r.results {
		p, err := a.plan(inv, r, i)
		if err == nil {
			err = conflict(p.want, held, holders.NewSet(c.Holders())) // the results of a claim add up
		}
		if err == nil {
			err = a.conflictsUnread(p.want, r.claimRef, unread)
		}
		if err != nil {
			errs = append(errs, err)
			wait = wait && isTransient(inv, err)
			continue
		}
		all = append(all, p)
		c.Results = append(c.Results, p.Result)
		got.wants, got.devices = append(got.wants, p.want), append(got.devices, p.plan.Devices...)
	}
	if len(errs) == 0 {
		errs = append(errs, onePerRequest(r, all)...)
		if c.Pod, err = a.podToLimit(r.users, c); err != nil {
			errs = append(errs, err)
		}
		wait = false
	}
	if err := join(errs); err != nil {
		return got, wait, err
	}
	if err := a.check(all); err != nil {
		return got, false, err
	}
	store.Reserve(c)
	got.claim = c
	return got, false, nil
}

// plan returns what the i-th result of a request gets, apart from what others hold.
func (a *Adapter) plan(inv *inventory.Allocatable, r request, i int) (planned, error) {
	one := r.results[i]
	offered, ok := resourceslice.Resolve(inv, one.Device)
	if !ok {
		return planned{}, unknownDevice(inv, one.Device)
	}
	u, err := asAllocated(one, offered)
	if err != nil {
		return planned{}, err
	}
	sharing, err := r.configs.For(one.Request, u)
	if err != nil && !one.AdminAccess {
		return planned{}, err
	}
	plan, err := inv.ReserveTolerated(func(inventory.Unit, health.Health) bool { return tolerated(a.device(inv, one.Device), one.Tolerations) }, offered.ID)
	if err != nil {
		if unhealthy, ok := errors.AsType[*inventory.UnhealthyUnitsError](err); ok {
			return planned{}, &HealthError{Device: one.Device, Unit: unhealthy.Units[0]}
		}
		return planned{}, fmt.Errorf("device %s: %w", one.Device, err)
	}
	if len(plan.CDI) == 0 {
		return planned{}, &NoCDIError{one.Device}
	}
	request, _, _ := strings.Cut(one.Request, "/") // the kubelet knows requests by their name without the subrequest
	p := planned{unit: u, plan: plan, want: want{Result: prepared.Result{
		Request: request, Pool: one.Pool, Device: one.Device, ShareID: one.ShareID, Admin: one.AdminAccess,
		Unit: u.ID, At: u.Device.At, Exclusive: u.Sharing.Mode == inventory.Exclusive, CDI: slices.Clone(plan.CDI),
		Published: a.published(inv, one.Device, u),
	}}}
	if !p.Exclusive {
		p.replicas = u.Sharing.Replicas
		if err := setShare(&p.Result, one, u); err != nil {
			return planned{}, err
		}
	}
	if plan.MPS != "" && !p.Exclusive && !one.AdminAccess {
		p.MPS = &prepared.MPS{Pool: plan.MPS}
		for _, e := range sharing.MPSLimits() {
			p.MPS.Env = append(p.MPS.Env, e.Name+"="+e.Value)
		}
		p.CDI = slices.Insert(p.CDI, 1, a.specs.name(r.uid, i)) // the first name identifies the device in the status of the pod
	}
	return p, nil
}

func unknownDevice(inv *inventory.Allocatable, name string) error {
	e := &UnknownDeviceError{Device: name, Driver: driverProblem(inv)}
	for u := range inv.Devices() {
		if whole := resourceslice.DeviceName(u); name == whole || strings.HasPrefix(name, whole+"-s") {
			e.API = u.API
		}
	}
	return e
}

// driverProblem returns why an inventory may have no devices; "" if the driver works.
func driverProblem(inv *inventory.Allocatable) string {
	switch d := inv.Driver(); d.State {
	case gpu.DriverPending:
		return "the driver has not answered yet"
	case gpu.DriverAbsent, gpu.DriverFailed:
		return "the driver is not usable: " + d.Reason
	case gpu.DriverReleased:
		return d.Reason
	case gpu.DriverReady:
	}
	return ""
}

// isTransient reports whether an error is expected to end without a change of claims or of the policy.
func isTransient(inv *inventory.Allocatable, err error) bool {
	if e, ok := errors.AsType[*UnknownDeviceError](err); ok && e.API == "" {
		return inv.Provisional() || inv.Driver().State != gpu.DriverReady
	}
	if _, ok := errors.AsType[*UnreadError](err); ok {
		return true // the record is made again soon, if a pod has the claim
	}
	if e, ok := errors.AsType[*HealthError](err); ok {
		switch e.Unit.Health.Reason {
		case health.ReasonMaintenance, health.ReasonDriver, health.ReasonUnchecked, health.ReasonNoCDI, health.ReasonMoving, health.ReasonProving, health.ReasonResetting:
			return true
		case health.ReasonNoLimit:
			return inv.AwaitsLimit(e.Unit)
		default:
		}
	}
	return false
}

// device returns a device as it is in the slice that follows from an inventory, with its taints; the zero value if it is not there.
func (a *Adapter) device(inv *inventory.Allocatable, name string) kubeapi.Device {
	if v := a.view.Load(); v.allocatable == inv {
		return v.devices[name]
	}
	in, known := a.input()
	if !known {
		return kubeapi.Device{}
	}
	in.Allocatable = inv
	return resourceslice.ByName(resourceslice.Devices(in))[name]
}

// published returns the device of a result as slices have it, or had it when it was allocated in another form.
func (a *Adapter) published(inv *inventory.Allocatable, name string, u inventory.Unit) json.RawMessage {
	now := a.device(inv, name)
	if now.Name == "" || now.AllowMultipleAllocations && u.Sharing.Mode == inventory.Exclusive {
		in := resourceslice.Input{Allocatable: inv, LastDriver: *a.lastDriver.Load(), SharesAsDevices: name != resourceslice.DeviceName(u)}
		now = in.Device(u)
	}
	return resourceslice.Published(now)
}

// tolerated reports whether all taints of a device that keep new work away are tolerated, by the rules of the scheduler. One with the effect
// NoExecute has NoSchedule in the slice while its GPU is not evicted (resourceslice.EvictOnly): a toleration of either is enough.
func tolerated(d kubeapi.Device, tolerations []kubeapi.DeviceToleration) bool {
	if d.Name == "" {
		return false
	}
	return !slices.ContainsFunc(d.Taints, func(t kubeapi.DeviceTaint) bool {
		published := t
		if resourceslice.IsNoExecute(t) {
			published.Effect = kubeapi.NoSchedule
		}
		return t.Effect != kubeapi.NoEffect &&
			!slices.ContainsFunc(tolerations, func(o kubeapi.DeviceToleration) bool { return tolerates(o, t) || tolerates(o, published) })
	})
}

// tolerates is resource.k8s.io's ToleratesTaint (k8s.io/dynamic-resource-allocation/resourceclaim).
func tolerates(o kubeapi.DeviceToleration, t kubeapi.DeviceTaint) bool {
	if o.Effect != "" && o.Effect != t.Effect || o.Key != "" && o.Key != t.Key {
		return false
	}
	switch o.Operator {
	case "", "Equal":
		return o.Value == t.Value
	case "Exists":
		return true
	}
	return false
}

// pluginHolders are the pods that have devices through device plugins.
func (a *Adapter) pluginHolders() []holders.Holder {
	if a.opts.PluginHolders == nil {
		return nil
	}
	return a.opts.PluginHolders()
}

// onePerRequest returns an error for each request with several shares of a pool that gives one a request. With consumable capacity the
// scheduler does not allocate that.
func onePerRequest(r request, all []planned) (errs []error) {
	type key struct{ request, pool string }
	n := map[key]int{}
	for i, p := range all {
		if !p.unit.Sharing.OnePerRequest || p.Admin {
			continue
		}
		k := key{r.results[i].Request, p.unit.Pool}
		if n[k]++; n[k] == 2 {
			errs = append(errs, fmt.Errorf("request %s: %w", k.request, &inventory.SharedUnitsError{Pool: k.pool, N: 2}))
		}
	}
	return errs
}

// check calls Options.Check, and logs what it has found.
func (a *Adapter) check(all []planned) error {
	if a.opts.Check == nil {
		return nil
	}
	var units []inventory.Unit
	for _, p := range all {
		if !p.Admin {
			units = append(units, p.unit)
		}
	}
	findings, err := a.opts.Check(units)
	for _, f := range findings {
		a.opts.Log.Warn("device prepared despite the reservation check", "id", f.Device.ID, "pci", f.Device.PCI, "reason", f.Reason())
	}
	return err
}
