package publisher

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/draadapter/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeapi"
)

// names are those of the publisher's own slices: <node>-<driver>-<i>.
type names struct{ prefix string }

const maxName = 253 // bytes of an object's name: a DNS subdomain

// newNames puts a hash in the place of a node's name that is too long.
func newNames(node, driver string) names {
	if longest := len(node) + len(driver) + len("--99999"); longest > maxName {
		sum := sha256.Sum256([]byte(node))
		node = fmt.Sprintf("%x", sum[:16])
	}
	return names{node + "-" + driver + "-"}
}

func (n names) of(i int) string { return n.prefix + strconv.Itoa(i) }

// index returns the number of a slice, and false for a slice of another client.
func (n names) index(name string) (int, bool) {
	number, ok := strings.CutPrefix(name, n.prefix)
	if !ok {
		return 0, false
	}
	i, err := strconv.Atoi(number)
	return i, err == nil && i >= 0 && strconv.Itoa(i) == number
}

func (n names) own(name string) bool { _, ok := n.index(name); return ok }

// layout is the distribution of devices to slices.
type layout [][]kubeapi.Device

// newLayout returns that of devices: at least one slice, which says that there are none.
func newLayout(devices []kubeapi.Device) layout {
	if len(devices) == 0 {
		return layout{nil}
	}
	return resourceslice.Chunk(devices)
}

// withTaints returns the layout with the taints that its devices have among latest.
func (l layout) withTaints(latest []kubeapi.Device) layout {
	tainted := make(layout, len(l))
	for i, devices := range l {
		tainted[i] = taintsOnly(devices, latest)
	}
	return tainted
}

type verb string

const (
	create verb = "create"
	update verb = "update"
	remove verb = "delete"
)

// write is one request. Of a delete only name and UID matter.
type write struct {
	verb    verb
	slice   kubeapi.ResourceSlice
	urgent  bool // it adds a taint that keeps pods away
	foreign bool // it deletes a slice of another client
}

// plan is what has to be written, in this order. With rewrite, all slices get a new generation: until the last one is written, the
// scheduler uses none of the pool.
type plan struct {
	writes  []write
	slices  int // of the layout
	rewrite bool
}

// view is what a plan depends on.
type view struct {
	names        names
	node, driver string
	owner        string                           // UID of the Node
	slices       map[string]kubeapi.ResourceSlice // observed, of driver and node
	highest      int64                            // generation that the pool had
	stored       map[string]answered
	dropsTaints  bool // the server has no taints: none is urgent
}

// answered is what the latest write of a slice sent, and what the server made of it: a difference that the server makes is no reason to
// write again.
type answered struct{ sent, got fingerprint }

func newAnswered(sent, got kubeapi.ResourceSliceSpec) answered {
	return answered{fingerprintOf([]any{sent, sent.Unknown}), fingerprintOf([]any{got, got.Unknown})}
}

// upToDate reports whether a slice needs no write.
func (v view) upToDate(is, want kubeapi.ResourceSlice) bool {
	if !slices.EqualFunc(is.Metadata.OwnerReferences, want.Metadata.OwnerReferences, sameOwner) {
		return false
	}
	if equalSpec(is.Spec, want.Spec) {
		return true
	}
	a, ok := v.stored[want.Metadata.Name]
	return ok && a == newAnswered(want.Spec, is.Spec)
}

func sameOwner(a, b kubeapi.OwnerReference) bool {
	return a.Kind == b.Kind && a.Name == b.Name && a.UID == b.UID && equal(a.Controller, b.Controller)
}

// slice returns the slice of a number.
func (v view) slice(i, count int, generation int64, devices []kubeapi.Device) kubeapi.ResourceSlice {
	controller := true
	return kubeapi.ResourceSlice{
		Metadata: kubeapi.ObjectMeta{
			Name:            v.names.of(i),
			OwnerReferences: []kubeapi.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: v.node, UID: v.owner, Controller: &controller}},
		},
		Spec: kubeapi.ResourceSliceSpec{
			Driver: v.driver, NodeName: v.node, Devices: devices,
			Pool: kubeapi.ResourcePool{Name: v.node, Generation: generation, ResourceSliceCount: int64(count)},
		},
	}
}

// plan compares the layout with the observed slices. See docs/adr/0023 for when the generation changes.
func (v view) plan(l layout) plan {
	p := plan{slices: len(l)}
	latest := int64(0) // generation of the own slices
	for _, name := range slices.Sorted(maps.Keys(v.slices)) {
		s := v.slices[name]
		if !v.names.own(name) || s.Spec.Pool.Name != v.node {
			p.writes = append(p.writes, write{verb: remove, slice: s, foreign: !v.names.own(name)})
		} else {
			latest = max(latest, s.Spec.Pool.Generation)
		}
	}
	generation := max(1, v.highest)
	if latest == v.highest && latest > 0 {
		p.rewrite = v.needsGeneration(l, latest)
	} else if latest > 0 || len(p.writes) > 0 { // another client's slices have a higher one
		p.rewrite = true
	}
	if p.rewrite {
		generation++
	}
	var updates, creates []write
	for i, devices := range l {
		want := v.slice(i, len(l), generation, devices)
		is, exists := v.slices[want.Metadata.Name]
		if !exists || is.Spec.Pool.Name != v.node { // the name of the pool can't be changed
			creates = append(creates, write{verb: create, slice: want})
			continue
		}
		if v.upToDate(is, want) {
			continue
		}
		w := write{verb: update, slice: is, urgent: !v.dropsTaints && addsTaint(devices, byName(is.Spec.Devices))}
		w.slice.Spec, w.slice.Metadata.OwnerReferences = want.Spec, want.Metadata.OwnerReferences
		updates = append(updates, w)
	}
	slices.SortStableFunc(updates, func(a, b write) int { // those that add taints first
		switch {
		case a.urgent == b.urgent:
			return 0
		case a.urgent:
			return -1
		}
		return 1
	})
	p.writes = slices.Concat(p.writes, updates, creates, v.surplus(len(l)))
	return p
}

// surplus returns deletes of own slices that a shorter layout does not have.
func (v view) surplus(count int) []write {
	var all []write
	for _, name := range slices.Sorted(maps.Keys(v.slices)) {
		s := v.slices[name]
		if i, own := v.names.index(name); own && i >= count && s.Spec.Pool.Name == v.node {
			all = append(all, write{verb: remove, slice: s})
		}
	}
	return all
}

// needsGeneration reports whether a layout has to get a new generation, so that the scheduler never sees a mixture with the present one:
// if the number of slices changes, or a device moves from one slice to another. Slices that are missing are created in the present one.
func (v view) needsGeneration(l layout, latest int64) bool {
	slice := map[string]string{} // of each device in the present generation
	for name, s := range v.slices {
		if !v.names.own(name) || s.Spec.Pool.Generation != latest || s.Spec.Pool.Name != v.node {
			continue
		}
		if s.Spec.Pool.ResourceSliceCount != int64(len(l)) {
			return true
		}
		for _, d := range s.Spec.Devices {
			slice[d.Name] = name
		}
	}
	for i, devices := range l {
		for _, d := range devices {
			if was, ok := slice[d.Name]; ok && was != v.names.of(i) {
				return true
			}
		}
	}
	return false
}

func byName(devices []kubeapi.Device) map[string]kubeapi.Device {
	all := make(map[string]kubeapi.Device, len(devices))
	for _, d := range devices {
		all[d.Name] = d
	}
	return all
}
