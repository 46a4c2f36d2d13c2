package kube

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/agent/kube/kubestatus"
	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/eviction"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// kubeAPIOptions are what the settings mean for the client of Kubernetes' API.
func kubeAPIOptions(s settings, version string) kubeapi.Options {
	return kubeapi.Options{
		Address: s.DRA.API.Address, TokenFile: s.DRA.API.TokenFile, CAFile: s.DRA.API.CAFile, Agent: Name + "/" + version,
	}
}

// newKubeAPI returns a client of Kubernetes' API; nil if the settings need none. With device plugins only an operator's explicit settings of
// the API ask for one.
func newKubeAPI(s settings, version string, log *slog.Logger) (*kubeapi.Client, error) {
	wanted := servesDRA(s) || s.DRA.API.Configured()
	if !wanted || s.DRA.Node == "" {
		return nil, nil
	}
	o := kubeAPIOptions(s, version)
	o.Log = log
	api, err := kubeapi.New(o)
	if err != nil && s.Core.API != inventory.DRA { // see newAdapters
		log.Warn("Kubernetes' API can't be called", "error", err)
		return nil, nil
	}
	return api, err
}

// draAttributes are what the log has of the API dra.
func draAttributes(s settings) []any {
	if s.Core.API != inventory.DRA {
		return nil
	}
	return []any{"api", s.Core.API, "node", s.DRA.Node, "kubelet-dir", s.DRA.KubeletDir}
}

// removeSlices deletes the ResourceSlices that an earlier run with the API dra has left: a device must not be offered through both APIs. It
// returns when there is none, or ctx ends.
func removeSlices(ctx context.Context, api *kubeapi.Client, node string, log *slog.Logger) {
	retry := backoff.NewExponentialBackOff()
	retry.MaxInterval = time.Minute
	for logged := ""; ; {
		n, err := publisher.Remove(ctx, api, node, resourceslice.Driver)
		switch {
		case n > 0:
			log.Info("resource slices of an earlier run deleted: the API is device-plugin", "slices", n)
		case err == nil:
			return
		}
		if err != nil && ctx.Err() == nil && err.Error() != logged {
			logged = err.Error()
			log.Warn("resource slices of an earlier run can't be deleted, retrying", "error", err)
		}
		if !watch.Sleep(ctx, retry.NextBackOff()) {
			return
		}
	}
}

// checkDRA reports what the API dra needs of the settings and of the environment: those of a file alone may be valid without it.
func checkDRA(s settings) error {
	if s.Core.API != inventory.DRA {
		return nil
	}
	var err error
	if _, invalid := kubeapi.New(kubeAPIOptions(s, "")); invalid != nil {
		err = &setting.Error{Key: "--kube-api", Value: s.DRA.API.Address, Remedy: invalid.Error()}
	}
	return errors.Join(s.CheckNode(), err)
}

// draRuntime is the agent's DRA driver with what surrounds it: the ResourceSlices, and whether containers of the node can get devices at all.
type draRuntime struct {
	driver    *dra.Adapter
	publisher *publisher.Publisher
	desired   *watch.Value[[]kubeapi.Device]      // the devices of the driver; nil = not known yet
	devices   *watch.Value[[]kubeapi.Device]      // those that are published; nil = nothing is
	known     *watch.Value[bool]                  // the Node was read, and refused is true of it
	evicted   *watch.Value[map[gpu.DeviceID]bool] // broken GPUs of which Kubernetes may delete the pods
	evictions *eviction.Evictions                 // which decides that; nil = none are evicted
	refused   *watch.Value[string]                // why containers of this node never get a device; "" = they may
	runtime   func(context.Context) cdi.Runtime
	asked     cdi.Runtime // what runtime answered last; of the goroutine of followNode
	folder    string      // of the CDI specifications
	boot      string      // ID of the present boot
	refresh   func()      // see besides
	watchdog  *watchdog.Registry
	log       *slog.Logger
}

// besides are the device plugins of the same process, as a DRA driver needs them.
type besides struct {
	lock    sync.Locker // held while either side gives a device out
	holder  func(gpu.Placement) (pod string, held bool)
	refresh func() // the resources that the kubelet must know may be others
	claims  func(context.Context) (claims []podresources.Claim, complete bool, err error)
}

// newDRA returns a driver that is not running.
func newDRA(a *agent.Agent, s settings, client *kubeapi.Client, plugins besides, log *slog.Logger) *draRuntime {
	boot, _ := history.BootID(s.Core.Roots.Proc) // the history's warnings have the error
	d := &draRuntime{
		devices: watch.NewValue[[]kubeapi.Device](nil), known: watch.NewValue(false), refused: watch.NewValue(""), runtime: askRuntime(s.CDI.CRISocket), folder: s.CDI.Folder,
		boot: boot, refresh: plugins.refresh, watchdog: a.Watchdog(), log: log, evicted: watch.NewValue(map[gpu.DeviceID]bool{}),
	}
	shares := watch.NewValue(false)
	cdiOptions := cdiOptions(s)
	d.driver = dra.New(a.Monitor, dra.Options{
		Node: s.DRA.Node, KubeletDir: s.DRA.KubeletDir, StateDir: s.Health.StateDir, BootID: boot, API: client,
		CDIFolder: cdiOptions.Folder, CDIVendor: cdiOptions.Vendor, MPSRoot: s.MPSRoot, SharesAsDevices: shares, Evict: s.DRA.Evict,
		Check: d.check(a.CheckReservation), Reserved: a.Reserved, Lock: plugins.lock, DevicePluginHolder: plugins.holder,
		PodClaims: podClaims(s.PodResourcesSocket, plugins.claims), Watchdog: a.Watchdog(), Log: log,
	})
	d.desired = d.driver.Desired()
	if s.DRA.Evict {
		d.evictions = eviction.New(eviction.Options{
			Devices: d.desired, Checks: func() uint64 { return a.Monitor.Stats().Checks }, PerHour: s.DRA.EvictionsPerHour,
			File: filepath.Join(s.Health.StateDir, "dra", "evictions.json"), Watchdog: a.Watchdog(), Log: log,
		})
		d.evicted = d.evictions.GPUs()
	}
	d.publisher = publisher.New(publisher.Options{
		API: client, Node: s.DRA.Node, Driver: resourceslice.Driver, Devices: d.devices, DropsShares: shares, Watchdog: a.Watchdog(), Log: log,
	})
	return d
}

// tasks run until their context ends.
func (d *draRuntime) tasks() []func(context.Context) error {
	all := []func(context.Context) error{d.driver.Run, d.publisher.Run, d.followNode, d.admit}
	if d.evictions != nil {
		all = append(all, d.evictions.Run)
	}
	return all
}

// held returns the claims that hold devices in this boot; nil until they are read. One whose record can't be read has all GPUs that it may have.
func (d *draRuntime) held() []prepared.Claim {
	all, unread := d.driver.Prepared(), d.driver.Unread()
	if all == nil && unread == nil {
		return nil
	}
	held := slices.DeleteFunc(append([]prepared.Claim{}, all...), func(c prepared.Claim) bool { return !c.Holds(d.boot) })
	for _, u := range unread {
		held = append(held, unknownClaim(u, d.driver.MayHaveClaims()))
	}
	return held
}

// unknownClaim is a claim of which no more is known than the file of its record, and which GPUs it may have.
func unknownClaim(u prepared.Unread, gpus []gpu.DeviceID) prepared.Claim {
	c := prepared.Claim{Namespace: "?", Name: "? (" + u.String() + ")", UID: u.UID}
	for _, id := range gpus {
		c.Results = append(c.Results, prepared.Result{At: gpu.WholeGPU(id)})
	}
	return c
}

// pastResources are the extended resources of units that device plugins have offered on this node. A kubelet up to 1.37.1 starts no
// container that requests such a name while no plugin has it registered.
func (d *draRuntime) pastResources(inv *inventory.Inventory) (names []string) {
	capacity := d.publisher.Node().Load().Status.Capacity
	for _, name := range poolResources(inv) {
		if _, ok := capacity[name]; ok {
			names = append(names, name)
		}
	}
	return names
}

// poolResources are the extended resources of an inventory, nvidia.com/gpu among them, sorted.
func poolResources(inv *inventory.Inventory) []string {
	names := []string{deviceplugin.GPUResource}
	for u := range inv.Devices() {
		names = append(names, deviceplugin.ResourceOf(u))
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// view is the driver as operators see it, with the device plugins beside it.
func (d *draRuntime) view(s settings, plugins kubestatus.Plugins) kubestatus.DRA {
	return kubestatus.DRA{
		Name: resourceslice.Driver, Node: s.DRA.Node, BootID: d.boot, Driver: d.driver, Slices: d.publisher, Plugin: plugins,
		Devices: d.tainted, Refused: d.refused.Load,
	}
}

// warnings are one line each.
func (d *draRuntime) warnings() []string {
	lines := d.driver.Warnings()
	if s := d.publisher.Published(); s.DropsTaints {
		lines = append(lines, "Kubernetes' API drops the taints of devices (feature gate DRADeviceTaints): unhealthy devices leave the slices, unless a claim has them")
	}
	return lines
}

// podClaims returns a function that asks the kubelet which devices pods have through claims; nil without a socket.
func podClaims(socket string, read func(context.Context) ([]podresources.Claim, bool, error)) func(context.Context) (dra.PodClaims, error) {
	if socket == "" {
		return nil
	}
	return func(ctx context.Context) (dra.PodClaims, error) {
		listed, complete, err := read(ctx)
		if err != nil {
			return dra.PodClaims{}, err
		}
		claims := dra.PodClaims{Partial: !complete}
		for _, c := range listed {
			claims.Claims = append(claims.Claims, dra.PodClaim{
				Pod: c.Pod, Namespace: c.Namespace, Name: c.Name, Driver: c.Driver, Pool: c.Pool, Device: c.Device, CDI: c.CDI,
			})
		}
		return claims, nil
	}
}
