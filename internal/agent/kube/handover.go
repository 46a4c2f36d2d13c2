package kube

import (
	"context"
	"path/filepath"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/handover"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// handOver is what reports faults in Kubernetes' API, and removes the report of earlier settings. Without either it has no client.
type handOver struct {
	api    *kubeapi.Client
	record *handover.Record
	back   *handover.TakeBack
}

// newHandOver returns what the settings, and those before them, make necessary.
func (r *run) newHandOver() (h handOver, err error) {
	s := r.settings
	if dir := s.Health.StateDir; dir != "" {
		h.record = &handover.Record{Path: filepath.Join(dir, Name+".hand-over.json")}
	}
	h.back = &handover.TakeBack{Node: s.DRA.Node, Record: h.record}
	if s.HandOver.Enabled {
		h.back.Keep = []string{s.HandOver.Condition, s.HandOver.Second}
	} else if len(h.back.Stale()) == 0 {
		return h, nil
	}
	o := kubeAPIOptions(s)
	o.Agent, o.Log = userAgent(r.opts.Version), r.log
	h.api, err = kubeapi.New(o)
	if err != nil && !s.HandOver.Enabled {
		r.log.Warn("the Node may have conditions of earlier settings: Kubernetes' API can't be called", "conditions", h.back.Stale(), "error", err)
		return h, nil
	}
	h.back.API = h.api
	return h, err
}

// handOverTasks are the tasks of the hand-over beside an adapter, and its problems.
func (r *run) handOverTasks(a *agent.Agent, made agent.Adapter) (tasks []func(context.Context) error, problems func() []problem.Problem) {
	s, h := r.settings, r.handOver
	if h.api == nil {
		return nil, func() []problem.Problem { return nil }
	}
	tasks = append(tasks, func(ctx context.Context) error { h.back.Run(ctx, r.log); return nil })
	if !s.HandOver.Enabled {
		return tasks, h.back.Problems
	}
	boot, _ := history.BootID(s.Core.Roots.Proc) // the history's problems have the error
	reports := handover.New(handover.Options{
		API: h.api, Node: s.DRA.Node, Condition: s.HandOver.Condition, Second: s.HandOver.Second, Events: s.HandOver.Events, Boot: boot,
		Mode: s.Core.Health.Mode, Checks: func() uint64 { return checksFolded(a.Stats(), time.Now()) },
		Devices: deviceplugin.Schedulable,
		Holders: func(ctx context.Context, inv *inventory.Allocatable) (holders.Record, error) {
			return r.podsWithDevices(ctx, inv, made)
		},
		Record: h.record, Log: r.log,
	})
	tasks = append(tasks, func(ctx context.Context) error { reports.Run(ctx, a.Monitor); return nil })
	return tasks, func() []problem.Problem { return slices.Concat(reports.Problems(), h.back.Problems()) }
}

// checksFolded is the number of rounds of checks whose results are in the state for certain: one is counted a moment before that.
func checksFolded(s monitor.Stats, now time.Time) uint64 {
	if s.Checks > 0 && now.Sub(s.LastCheck) < time.Second {
		return s.Checks - 1
	}
	return s.Checks
}

// podsAtMost is the time to find out which pods have devices.
const podsAtMost = 3 * time.Second

// podsWithDevices reads which pods have devices, through any API of the kubelet.
func (r *run) podsWithDevices(ctx context.Context, inv *inventory.Allocatable, made agent.Adapter) (holders.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, podsAtMost)
	defer cancel()
	record, err := made.Holders(ctx, inv)
	if err != nil {
		return record, err
	}
	claims := made.Readers[inventory.DRA]()
	return r.withUIDs(ctx, withoutUnlisted(record, claims)), nil
}

// withoutUnlisted returns a record that is complete only if the pods of all claims that have devices are known. A claim whose pod is about to start or
// has ended is prepared, and the kubelet does not list it.
func withoutUnlisted(record, claims holders.Record) holders.Record {
	listed := map[[2]string]bool{}
	for _, h := range record.Holders {
		listed[[2]string{h.Work.Namespace, h.Work.Claim}] = true
	}
	for _, h := range claims.Holders {
		if !listed[[2]string{h.Work.Namespace, h.Work.Claim}] {
			record.Complete = false
		}
	}
	record.Complete = record.Complete && claims.Complete
	return record
}

// withUIDs returns a record with the UIDs of pods that have devices through claims: a claim names the pods that it is reserved for. Those of other
// pods are in the kubelet's checkpoint.
func (r *run) withUIDs(ctx context.Context, record holders.Record) holders.Record {
	if r.api == nil {
		return record
	}
	record.Holders = slices.Clone(record.Holders)
	read := map[[2]string]kubeapi.ResourceClaim{}
	for i := range record.Holders {
		w := &record.Holders[i].Work
		if w.ID != "" || w.Claim == "" {
			continue
		}
		name := [2]string{w.Namespace, w.Claim}
		if _, ok := read[name]; !ok {
			read[name], _ = r.api.Claim(ctx, w.Namespace, w.Claim) // without an answer the UID is not known
		}
		for _, pod := range read[name].Status.ReservedFor {
			if pod.Resource == "pods" && pod.Name == w.Name {
				w.ID = pod.UID
			}
		}
	}
	return record
}
