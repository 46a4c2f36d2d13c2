package kube

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/agent/kube/kubestatus"
	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/eviction"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/operator/metrics"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// servesDRA reports whether this node has anything of the API dra: by the settings, GPUs that are assigned to it, or claims of pods that
// end only when they are unprepared.
func servesDRA(s config.Kubernetes) bool {
	dir := s.Health.StateDir
	return s.Core.API == inventory.DRA || dir != "" && (ownership.Needs(dir, inventory.DRA) || dra.HasClaims(dir))
}

// checkAPI reports what settings that need Kubernetes' API need of others and of the environment: those of a file alone may be valid without it.
func checkAPI(s config.Kubernetes) error {
	if s.Core.API != inventory.DRA && !s.ReadsNode() && !s.Operations.NodeFeatureAPI && !s.HandOver.Enabled {
		return nil
	}
	var err error
	if _, invalid := kubeapi.New(kubeAPIOptions(s)); invalid != nil {
		err = &setting.Error{Key: "--kube-api", Value: s.DRA.API.Address, Remedy: invalid.Error()}
	}
	return errors.Join(s.CheckNode(), err)
}

// draDriver is a DRA driver with what surrounds it: the device plugins of the same process, the ResourceSlices, and whether containers of the node
// can get devices at all.
type draDriver struct {
	driver      *dra.Adapter
	durations   metrics.Durations             // that it reports
	plugins     *deviceplugin.Plugins         // set before anything runs
	lock        sync.Mutex                    // held while either finds a device free and records that it has given it out
	current     func() *inventory.Allocatable // the latest
	publisher   *publisher.Publisher
	desired     *watch.Value[[]kubeapi.Device]      // the devices of the driver; nil = not known yet
	devices     *watch.Value[[]kubeapi.Device]      // those that are published; nil = nothing is
	known       *watch.Value[bool]                  // the Node was read, and refused is true of it
	evicted     *watch.Value[map[gpu.DeviceID]bool] // broken GPUs of which Kubernetes may delete the pods
	evictions   *eviction.Evictions                 // which decides that; nil = none are evicted
	refused     *watch.Value[string]                // why containers of this node never get a device; "" = they may
	runtime     func(context.Context) cdi.Runtime
	lastRuntime cdi.Runtime // what runtime answered last; of the goroutine of followNode
	folder      string      // of the CDI specifications
	boot        string      // ID of the present boot
	watchdog    *watchdog.Registry
	log         *slog.Logger
}

// newDRA returns a driver that is not running.
func (r *run) newDRA(a *agent.Agent) *draDriver {
	s, specifications := r.settings, cdiOptions(r.settings)
	boot, _ := history.BootID(s.Core.Roots.Proc) // the history's problems have the error
	d := &draDriver{
		devices: watch.NewValue[[]kubeapi.Device](nil), known: watch.NewValue(false), refused: watch.NewValue(""), evicted: watch.NewValue(map[gpu.DeviceID]bool{}),
		durations: kubestatus.NewClaimDurations(), current: a.Current, runtime: specifications.Runtime, folder: specifications.Folder, boot: boot, watchdog: a.Watchdog(), log: r.log,
	}
	shares := watch.NewValue(false)
	o := dra.Options{
		Node: s.DRA.Node, KubeletDir: s.DRA.KubeletDir, StateDir: s.Health.StateDir, BootID: boot, API: r.api,
		CDIFolder: specifications.Folder, CDIVendor: specifications.Vendor, MPSRoot: s.MPSRoot, SharesAsDevices: shares, Evict: s.DRA.Evict,
		Check: d.check(a.CheckReservation), Reserved: a.Reserved, Limits: a, Observe: d.durations.Observe, Lock: &d.lock, PluginHolders: d.pluginHolders,
		Watchdog: a.Watchdog(), Log: r.log,
	}
	if s.PodResourcesSocket != "" {
		o.PodClaims = d.podClaims
	}
	d.driver = dra.New(a.Monitor, o)
	d.desired = d.driver.Desired()
	if s.DRA.Evict {
		d.evictions = eviction.New(eviction.Options{
			Devices: d.desired, Checks: func() uint64 { return a.Monitor.Stats().Checks }, PerHour: s.DRA.EvictionsPerHour,
			File: filepath.Join(s.Health.StateDir, "dra", "evictions.json"), Watchdog: a.Watchdog(), Log: r.log,
		})
		d.evicted = d.evictions.GPUs()
	}
	d.publisher = publisher.New(publisher.Options{
		API: r.api, Node: s.DRA.Node, Driver: resourceslice.Driver, Devices: d.devices, DropsShares: shares, Watchdog: a.Watchdog(), Log: r.log,
	})
	return d
}

// tasks run until their context ends.
func (d *draDriver) tasks() []func(context.Context) error {
	all := []func(context.Context) error{d.driver.Run, d.publisher.Run, d.followNode, d.publish}
	if d.evictions != nil {
		all = append(all, d.evictions.Run)
	}
	return all
}

// previousResources are the extended resources of units that device plugins have offered on this node. A kubelet up to 1.37.1 starts no
// container that requests such a name while no plugin has it registered.
func (d *draDriver) previousResources() (names []string) {
	capacity := d.publisher.Node().Load().Status.Capacity
	for _, name := range poolResources(d.current()) {
		if _, ok := capacity[name]; ok {
			names = append(names, name)
		}
	}
	return names
}

// poolResources are the extended resources of an inventory, nvidia.com/gpu among them, sorted.
func poolResources(inv *inventory.Allocatable) []string {
	names := []string{kubeadapter.GPUResource}
	for u := range inv.Devices() {
		names = append(names, kubeadapter.ResourceOf(u))
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// status is the driver on a node as operators see it, with the device plugins beside it.
func (d *draDriver) status(node string, plugins kubestatus.DevicePlugins) kubestatus.DRA {
	return kubestatus.DRA{
		Name: resourceslice.Driver, Node: node, BootID: d.boot, Driver: d.driver, Slices: d.publisher, Plugins: plugins,
		Durations: d.durations, Devices: d.tainted, Refused: d.refused.Load,
	}
}

func (d *draDriver) problems() []problem.Problem {
	all := d.driver.Problems()
	if d.evictions != nil {
		all = append(all, d.evictions.Problems()...)
	}
	if s := d.publisher.Published(); s.DropsTaints {
		all = append(all, problem.Problem{Code: problem.DroppedTaints,
			Text: "Kubernetes' API drops the taints of devices (feature gate DRADeviceTaints): unhealthy devices leave the slices, unless a claim has them"})
	}
	return all
}

// podClaims asks the kubelet which devices pods have through claims.
func (d *draDriver) podClaims(ctx context.Context) (dra.PodClaims, error) {
	listed, complete, err := d.plugins.PodClaims(ctx)
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

// pluginHolders are the pods that have devices through device plugins.
func (d *draDriver) pluginHolders() []holders.Holder {
	return pluginHolders(d.plugins.Holders(), d.plugins.ListsPods(), d.current())
}
