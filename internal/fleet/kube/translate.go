package kube

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// objects are those of a cluster at one time. A translation of them is pure.
type objects struct {
	nodes   []*node
	pods    []*pod
	jobs    map[named]*job
	claims  map[named]*claim
	classes map[named]*class
	slices  []*slice
	reports reports

	volumeClaims map[named]*volumeClaim
	volumes      map[named]*volume

	controllers []string        // further kinds of owners that replace their pods on other nodes
	followed    map[string]bool // UIDs of pods whose pools are needed
}

// translation is one pass over objects.
type translation struct {
	objects
	now    time.Time
	byName map[string]*node
	onNode map[string][]*pod
	dra    dra
	used   map[string]amounts // what the pods of a node request
}

// translate returns the cluster that objects show, without its name, mode and problem.
//
// The API server does not list devices with IDs, but for DRA. So a node has two sorts of devices:
//
//   - one for each GPU resource, with as many units as the node has healthy ones. Each pod holds of it what it requests: so its free units are those that
//     the scheduler counts;
//   - those with an ID, of pods' statuses, claims and faults. They have no kind, for nothing requests them, and show which work has faulty hardware.
func translate(o objects, now time.Time) rescue.Cluster {
	t := translation{objects: o, now: now, byName: map[string]*node{}, onNode: map[string][]*pod{}, used: map[string]amounts{}}
	for _, p := range o.pods {
		if p.node != "" {
			t.onNode[p.node] = append(t.onNode[p.node], p)
		}
	}
	for _, n := range o.nodes {
		t.byName[n.name] = n
	}
	t.dra = newDRA(&t.objects)
	c := rescue.Cluster{AgentReports: true, Pools: map[string][]string{}}
	for _, n := range o.nodes {
		if t.hasGPUs(n) {
			t.addNode(&c, n)
		}
	}
	slices.SortFunc(c.Nodes, func(a, b rescue.Node) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(c.Work, func(a, b rescue.Work) int { return strings.Compare(a.ID, b.ID) })
	t.addPools(&c)
	return c
}

func (t *translation) hasGPUs(n *node) bool {
	return n.offers || n.report != "" || len(t.dra.onNode[n.name]) > 0
}

// addNode adds a node, with the pods on it that have GPUs.
func (t *translation) addNode(c *rescue.Cluster, n *node) {
	r := t.reports[n.name]
	one := rescue.Node{
		Name: n.name, Hardware: n.labels[corev1.LabelHostname], Ready: n.ready, Draining: n.leaving, Schedulable: !n.cordoned,
		ReportedAt: r.reportedAt(t.now), Faults: r.faults,
	}
	d := newDevices(t, n, r)
	for _, p := range t.onNode[n.name] {
		if p.withGPU() {
			c.Work = append(c.Work, t.work(p, n, d))
		}
	}
	one.Devices = d.list()
	c.Nodes = append(c.Nodes, one)
}

// work is a pod, with the devices that it holds.
func (t *translation) work(p *pod, n *node, d *devices) rescue.Work {
	w := rescue.Work{
		ID: p.uid, Namespace: p.namespace, Name: p.name, Node: p.node, Phase: p.phaseOn(n), EndsWithin: p.ends,
		Controller: t.controller(p), LosesAttempt: t.losesAttempt(p),
	}
	w.Needs = t.needs(p)
	if w.Phase != rescue.Ended {
		w.Holds = d.holds(p)
	}
	return w
}

func (p *pod) phaseOn(n *node) rescue.Phase {
	switch {
	case p.ended():
		return rescue.Ended
	case p.deleting:
		return rescue.Ending
	case p.phase == corev1.PodPending:
		return rescue.Pending
	case p.phase == corev1.PodRunning && n.ready:
		return rescue.Running
	}
	return rescue.Unknown
}

const jobKind = "Job.batch"

// replacing are the kinds of owners that start another pod elsewhere when one is evicted.
var replacing = map[string]rescue.Controller{
	"ReplicaSet.apps": rescue.Service, "StatefulSet.apps": rescue.Service, "ReplicationController": rescue.Service,
	jobKind: rescue.Batch, "DaemonSet.apps": rescue.System, "Node": rescue.Static,
}

func (t *translation) controller(p *pod) rescue.Controller {
	if p.static {
		return rescue.Static
	}
	if kind, ok := replacing[p.owner.kind]; ok {
		return kind
	}
	if slices.Contains(t.controllers, p.owner.kind) {
		return rescue.Service
	}
	return rescue.Unmanaged
}

// losesAttempt reports whether an eviction is a failure of the pod to its Job. That of a Job that is not there is, for it is not known.
func (t *translation) losesAttempt(p *pod) bool {
	if p.owner.kind != jobKind {
		return false
	}
	j := t.jobs[named{p.namespace, p.owner.name}]
	return j == nil || j.loses
}

// needs are the devices that the replacement of a pod asks for; none = not known.
func (t *translation) needs(p *pod) (all []rescue.Need) {
	for kind, n := range p.requests.gpus {
		if n > 0 {
			all = append(all, rescue.Need{Kind: kind, Units: n})
		}
	}
	for _, ref := range p.claims {
		if ref.resources != nil {
			continue // its requests are those of the pod
		}
		asks, ok := t.dra.asks(t.claims[named{p.namespace, ref.name}], ref)
		if !ok {
			return nil
		}
		for _, a := range asks {
			all = append(all, rescue.Need{Kind: a.kind, Units: a.count})
		}
	}
	return sum(all)
}

// sum returns one need for each kind, in order.
func sum(all []rescue.Need) []rescue.Need {
	units := map[string]int{}
	for _, n := range all {
		units[n.Kind] += n.Units
	}
	all = all[:0]
	for _, kind := range slices.Sorted(maps.Keys(units)) {
		all = append(all, rescue.Need{Kind: kind, Units: units[kind]})
	}
	return all
}
