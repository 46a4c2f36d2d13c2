package kube

import (
	"context"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/agent/kube/kubestatus"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/node/assignment"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/operator/status"
)

// adapters are how an agent offers its devices: by device plugins and, with the API dra, by a DRA driver beside them.
type adapters struct {
	plugins *deviceplugin.Adapter
	dra     *draRuntime // nil = device plugins only
	tasks   []func(context.Context) error
	view    view
	apis    []inventory.API // that of the settings first
	readers assignment.Readers
	extend  func(report.Report) report.Report // nil = nothing is added to a report
	notes   []string                          // warnings that do not change
}

// view is what the HTTP server and the debug view show.
type view interface {
	status.Adapter
	Endpoints() []report.Endpoint
}

// newAdapters returns adapters that are not running. api is nil if Kubernetes' API is not called.
func (r *Agent) newAdapters(a *agent.Agent, s settings, api *kubeapi.Client, log *slog.Logger) adapters {
	o := deviceplugin.Options{
		KubeletSocket: s.KubeletSocket, DevRoot: s.DevRoot, MPSRoot: s.MPSRoot, Lists: deviceLists(s), Log: log,
		Check: a.CheckReservation, Reserved: a.Reserved, Watchdog: a.Watchdog(), PodResourcesSocket: s.PodResourcesSocket,
		Uptime: func() (time.Duration, bool) { return history.Uptime(s.Core.Roots.Proc) }, InPod: inPod(), AllocationStore: allocationStore(s, log), Handover: &r.kubelet,
	}
	notes := leftoversOf(s).warnings()
	for _, note := range notes {
		log.Error(note)
	}
	if servesDRA(s) && api != nil && s.DRA.Node != "" {
		made := newBoth(a, s, api, o)
		made.notes = notes
		return made
	}
	plugins := deviceplugin.New(a.Monitor, o)
	made := adapters{
		plugins: plugins, view: kubestatus.DevicePlugins{Plugin: plugins}, tasks: []func(context.Context) error{plugins.Run},
		apis: []inventory.API{inventory.DevicePlugin}, readers: readers(plugins, nil, a.Current), notes: notes,
	}
	if api != nil && s.DRA.API.Configured() && !servesDRA(s) {
		made.tasks = append(made.tasks, func(ctx context.Context) error { removeSlices(ctx, api, s.DRA.Node, log); return nil })
	}
	return made
}

// inPod reports whether this process is in a container of a pod: the kubelet sets the variable in each, with enableServiceLinks or without.
func inPod() bool {
	_, ok := os.LookupEnv("KUBERNETES_SERVICE_HOST")
	return ok
}

// newBoth returns a DRA driver, and device plugins beside it: for GPUs that have not moved, and for names that the kubelet must know.
func newBoth(a *agent.Agent, s settings, api *kubeapi.Client, o deviceplugin.Options) adapters {
	var lock sync.Mutex // while either side finds a device free and records that it has given it out
	var plugins *deviceplugin.Adapter
	d := newDRA(a, s, api, besides{
		lock: &lock, refresh: func() { plugins.Refresh() },
		holder: func(at gpu.Placement) (string, bool) {
			return pluginHolder(plugins.Holder, plugins.ListsPods(), a.Current(), at)
		},
		claims: func(ctx context.Context) ([]podresources.Claim, bool, error) { return plugins.PodClaims(ctx) },
	}, o.Log)
	o.Lock, o.DRAHolder, o.Empty = &lock, d.driver.Holder, func() []string { return d.pastResources(a.Current()) }
	plugins = deviceplugin.New(a.Monitor, o)
	other := inventory.DevicePlugin
	if s.Core.API == other {
		other = inventory.DRA
	}
	v := d.view(s, kubestatus.DevicePlugins{Plugin: plugins, OnlyOffered: s.Core.API == inventory.DRA})
	return adapters{
		plugins: plugins, dra: d, view: v, extend: v.Describe, tasks: append(d.tasks(), plugins.Run),
		apis: []inventory.API{s.Core.API, other}, readers: readers(plugins, d.held, a.Current),
	}
}

// servesDRA reports whether this node has anything of the API dra: by the settings, GPUs that are assigned to it, or claims of pods that
// end only when they are unprepared.
func servesDRA(s settings) bool {
	dir := s.Health.StateDir
	return s.Core.API == inventory.DRA || dir != "" && (assignment.Needs(dir, inventory.DRA) || dra.HasClaims(dir))
}

// warnings are one line each.
func (m adapters) warnings() []string {
	if m.dra == nil {
		return slices.Concat(m.notes, m.plugins.Warnings())
	}
	return slices.Concat(m.notes, m.dra.warnings(), m.plugins.Warnings())
}
