package kube

import (
	"context"
	"os"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/agent/kube/kubestatus"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/node/usage"
	"github.com/tandem-gpu/tandem/internal/operator/metrics"
	"github.com/tandem-gpu/tandem/internal/operator/status"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// offer returns what offers the devices of an agent, and what the HTTP server shows of it: device plugins, and a DRA driver beside them if this node
// has anything of that API.
func (r *run) offer(a *agent.Agent) (agent.Adapter, status.Adapter) {
	if r.dra && r.api != nil {
		return r.offerByBoth(a)
	}
	durations := kubestatus.NewDurations()
	plugins := deviceplugin.New(a.Monitor, r.pluginOptions(a, durations))
	shown := kubestatus.DevicePlugins{Plugins: plugins, Durations: durations}
	made := agent.Adapter{
		Tasks: []func(context.Context) error{plugins.Run}, View: plugins.Withhold, Holders: r.holders(plugins, nil),
		APIs: []inventory.API{inventory.DevicePlugin}, Readers: readers(plugins, nil, a.Current),
		Endpoints: shown.Endpoints, Problems: plugins.Problems,
	}
	if !r.dra {
		made.Pods = func() ([]limit.Pod, bool) { return nil, true } // nothing is prepared
	}
	if r.api != nil {
		made.Tasks = append(made.Tasks, r.removeSlices)
	}
	return made, shown
}

// offerByBoth returns a DRA driver, and device plugins beside it: for GPUs that have not moved, and for names that the kubelet must know.
func (r *run) offerByBoth(a *agent.Agent) (agent.Adapter, status.Adapter) {
	d := r.newDRA(a)
	durations := kubestatus.NewDurations()
	o := r.pluginOptions(a, durations)
	o.Lock, o.ClaimHolders, o.Empty = &d.lock, d.driver.Record, d.previousResources
	plugins := deviceplugin.New(a.Monitor, o)
	d.plugins = plugins
	api, other := inventory.DRA, inventory.DevicePlugin
	if r.settings.Core.API == other {
		api, other = other, api
	}
	shown := d.status(r.settings.DRA.Node, kubestatus.DevicePlugins{Plugins: plugins, Durations: durations, OnlyOffered: api == inventory.DRA})
	return agent.Adapter{
		Tasks: append(d.tasks(), plugins.Run), View: plugins.Withhold, Holders: r.holders(plugins, d.driver.Record),
		Pods: d.driver.LimitedPods, Claims: d.driver.WatchPrepared().Changed,
		APIs: []inventory.API{api, other}, Readers: readers(plugins, d.driver.Record, a.Current),
		Endpoints: shown.Endpoints, Extend: shown.Extend, Problems: func() []problem.Problem { return slices.Concat(d.problems(), plugins.Problems()) },
	}, shown
}

func (r *run) pluginOptions(a *agent.Agent, durations metrics.Durations) deviceplugin.Options {
	s := r.settings
	o := ResponseOptions(s)
	o.KubeletSocket, o.PodResourcesSocket, o.InPod = s.KubeletSocket, s.PodResourcesSocket, inPod()
	o.Check, o.Reserved, o.Observe = a.CheckReservation, a.Reserved, durations.Observe
	o.AllocationStore, o.Handover = deviceplugin.OpenAllocations(s.Health.StateDir, Name, r.log), &r.kubelet
	o.Uptime = func() (time.Duration, bool) { return history.Uptime(s.Core.Roots.Proc) }
	o.Watchdog, o.Log = a.Watchdog(), r.log
	return o
}

// inPod reports whether this process is in a container of a pod: the kubelet sets the variable in each, with enableServiceLinks or without.
func inPod() bool {
	_, ok := os.LookupEnv("KUBERNETES_SERVICE_HOST")
	return ok
}

// holders returns a function that reads which pods have devices. The kubelet does not list since when: that is in what
// this agent has recorded of its Allocates, and of the claims that it has prepared (claims; nil = there is no DRA driver).
func (r *run) holders(plugins *deviceplugin.Plugins, claims func() holders.Record) usage.Holders {
	if r.settings.PodResourcesSocket == "" {
		return func(context.Context, *inventory.Allocatable) (holders.Record, error) {
			return holders.Record{Never: true, Missing: noPods.Reason, Remedy: noPods.Remedy}, nil
		}
	}
	return func(ctx context.Context, inv *inventory.Allocatable) (holders.Record, error) {
		record, err := plugins.UseRecord(ctx, inv, podresources.PodLogs)
		if err == nil && claims != nil {
			for device, at := range claims().HeldSince {
				record.Began(device, at)
			}
		}
		return record, err
	}
}
