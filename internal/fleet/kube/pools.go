package kube

import (
	"encoding/json"
	"math"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// addPools finds the nodes that may take the replacements of the followed pods.
func (t *translation) addPools(c *rescue.Cluster) {
	if len(t.followed) == 0 {
		return
	}
	for _, n := range t.nodes {
		t.used[n.name] = usedBy(t.onNode[n.name])
	}
	pods := map[string]*pod{}
	for _, p := range t.pods {
		if t.followed[p.uid] && p.withGPU() {
			pods[p.uid] = p
		}
	}
	pools := map[string]pool{}
	for i := range c.Work {
		w := &c.Work[i]
		if p := pods[w.ID]; p != nil {
			t.setPool(c, pools, w, p)
		}
	}
}

// pool are the nodes that may take pods of the same requirements.
type pool struct {
	names  []string // with room for one, beside devices
	lowest int32    // priority of a pod on the nodes that they may use at all
}

func (t *translation) setPool(c *rescue.Cluster, pools map[string]pool, w *rescue.Work, p *pod) {
	key := p.poolKey()
	one, ok := pools[key]
	if !ok {
		one = t.pool(p)
		pools[key] = one
	}
	w.Preempts = p.preempts && p.priority > one.lowest
	w.PoolUnknown = t.unknown(p)
	w.Pool = key
	if home := t.byName[p.node]; home != nil && w.PoolUnknown == "" && !slices.Contains(one.names, p.node) && t.allow(p, home) && t.fits(p, home, p.requests, 1) {
		w.Pool = key + " on " + p.node // its end makes room there
		one.names = append(slices.Clone(one.names), p.node)
	}
	c.Pools[w.Pool] = one.names
}

func usedBy(all []*pod) (sum amounts) {
	sum.other = map[string]int64{}
	for _, p := range all {
		if !p.ended() {
			sum.add(p.requests)
			sum.other[string(corev1.ResourcePods)]++
		}
	}
	return sum
}

func (a *amounts) add(b amounts) {
	a.cpu += b.cpu
	a.memory += b.memory
	a.storage += b.storage
	for name, n := range b.other {
		a.other[name] += n
	}
}

// poolKey is the same for pods that may run on the same nodes.
func (p *pod) poolKey() string {
	namespace := ""
	if len(p.places.volumes) > 0 {
		namespace = p.namespace
	}
	key, err := json.Marshal([]any{
		namespace, p.places.volumes,
		p.places.selector, p.places.affinity, p.places.tolerations, p.places.unknown, p.requests.cpu, p.requests.memory, p.requests.storage,
		p.requests.other,
	})
	if err != nil {
		return p.uid
	}
	return string(key)
}

// pool finds the nodes for a pod. What is not known for certain is no place.
func (t *translation) pool(p *pod) (found pool) {
	found = pool{names: []string{}, lowest: math.MaxInt32}
	known := t.unknown(p) == ""
	for _, n := range t.nodes {
		if !t.hasGPUs(n) || !t.allow(p, n) {
			continue
		}
		for _, other := range t.onNode[n.name] {
			if !other.ended() {
				found.lowest = min(found.lowest, other.priority)
			}
		}
		if known && t.fits(p, n, amounts{}, 0) {
			found.names = append(found.names, n.name)
		}
	}
	return found
}

// fits reports whether a node has what a pod requests beside devices, if some amounts and a number of pods become free there.
func (t *translation) fits(p *pod, n *node, free amounts, pods int64) bool {
	has, asks, used := n.allocatable, p.requests, t.used[n.name]
	if used.cpu-free.cpu+asks.cpu > has.cpu || used.memory-free.memory+asks.memory > has.memory || used.storage-free.storage+asks.storage > has.storage {
		return false
	}
	if used.other[string(corev1.ResourcePods)]-pods+1 > has.other[string(corev1.ResourcePods)] {
		return false
	}
	for name, units := range asks.other {
		if used.other[name]-free.other[name]+units > has.other[name] {
			return false
		}
	}
	return true
}

// unknown is what a pod asks for that is not looked at, so that no node is certain; "" = all is.
func (t *translation) unknown(p *pod) string {
	for _, name := range p.places.volumes {
		switch v := t.volume(p, name); {
		case v == nil:
			return "persistent volume claim " + name + ", of which the volume is not known"
		case !v.shared:
			return "persistent volume claim " + name + ", which one node mounts at a time"
		}
	}
	return p.places.unknown
}

func (t *translation) volume(p *pod, name string) *volume {
	c := t.volumeClaims[named{p.namespace, name}]
	if c == nil {
		return nil
	}
	return t.volumes[named{name: c.volume}]
}

// allow reports whether a pod may run on a node, and its volumes may be mounted there.
func (t *translation) allow(p *pod, n *node) bool {
	for _, name := range p.places.volumes {
		if v := t.volume(p, name); v != nil && !matches(n, nil, v.affinity) {
			return false
		}
	}
	return p.places.allow(n)
}

// allow reports whether a node has the labels for a pod, and no taint that keeps it away.
func (p *places) allow(n *node) bool {
	if !matches(n, p.selector, p.affinity) {
		return false
	}
	for i := range n.taints {
		t := &n.taints[i]
		if t.Effect != corev1.TaintEffectPreferNoSchedule && !p.tolerates(t) {
			return false
		}
	}
	return true
}

// matches reports whether a node has labels, and is one of a selector; nil = of any.
func matches(n *node, labels map[string]string, nodes *corev1.NodeSelector) bool {
	o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: n.labels}}
	var affinity *corev1.Affinity
	if nodes != nil {
		affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: nodes}}
	}
	ok, err := nodeaffinity.NewRequiredNodeAffinity(labels, affinity).Match(o)
	return ok && err == nil
}

// tolerates reports whether a taint does not keep the pod from a node for good: one that is tolerated for some time ends the pod later.
func (p *places) tolerates(taint *corev1.Taint) bool {
	for i := range p.tolerations {
		one := &p.tolerations[i]
		if one.TolerationSeconds == nil && one.ToleratesTaint(logr.Discard(), taint, false) {
			return true
		}
	}
	return false
}
