package publisher

import (
	"cmp"
	"maps"
	"slices"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// layout is the distribution of devices to slices.
type layout [][]kubeapi.Device

// newLayout returns that of devices. No devices are no slice: most nodes of a cluster may have no GPU.
func newLayout(devices []kubeapi.Device) layout { return resourceslice.Chunk(devices) }

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
	slices       map[string]kubeapi.ResourceSlice // in the cache, of driver and node
	highest      int64                            // generation that the pool had
	altered      map[string]sentAndStored         // the latest write of each slice that the server stored with another content
	otherNames   map[int]string                   // of slices whose first name another client has
	dropsTaints  bool                             // the server has no taints: none is urgent
}

// name is that of the slice of a number: as it is in the API, also from an earlier run, or is to be made.
func (v view) name(i int) string {
	first := ""
	for name := range v.slices {
		if n, own := v.names.index(name); own && n == i && (first == "" || name < first) {
			first = name
		}
	}
	return cmp.Or(first, v.otherNames[i], v.names.of(i))
}

// sentAndStored is what the latest write of a slice sent, and what the server made of it: a difference that the server makes is no reason to
// write again.
type sentAndStored struct{ sent, stored fingerprint }

func newSentAndStored(sent, got kubeapi.ResourceSliceSpec) sentAndStored {
	return sentAndStored{fingerprintOf([]any{sent, sent.Unknown}), fingerprintOf([]any{got, got.Unknown})}
}

// upToDate reports whether a slice needs no write.
func (v view) upToDate(is, want kubeapi.ResourceSlice) bool {
	if !slices.EqualFunc(is.Metadata.OwnerReferences, want.Metadata.OwnerReferences, sameOwner) {
		return false
	}
	if equalSpec(is.Spec, want.Spec) {
		return true
	}
	a, ok := v.altered[want.Metadata.Name]
	return ok && a == newSentAndStored(want.Spec, is.Spec)
}

func sameOwner(a, b kubeapi.OwnerReference) bool {
	return a.Kind == b.Kind && a.Name == b.Name && a.UID == b.UID && equal(a.Controller, b.Controller)
}

// slice returns the slice of a number.
func (v view) slice(i, count int, generation int64, devices []kubeapi.Device) kubeapi.ResourceSlice {
	controller := true
	return kubeapi.ResourceSlice{
		Metadata: kubeapi.ObjectMeta{
			Name:            v.name(i),
			OwnerReferences: []kubeapi.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: v.node, UID: v.owner, Controller: &controller}},
		},
		Spec: kubeapi.ResourceSliceSpec{
			Driver: v.driver, NodeName: v.node, Devices: devices,
			Pool: kubeapi.ResourcePool{Name: v.node, Generation: generation, ResourceSliceCount: int64(count)},
		},
	}
}

// plan compares the layout with the cached slices. See docs/adr/0023 for when the generation changes.
func (v view) plan(l layout) plan {
	p := plan{slices: len(l)}
	latest := int64(0)  // generation of the own slices
	var foreign []write // last: the own slices have a higher generation until they are gone
	for _, name := range slices.Sorted(maps.Keys(v.slices)) {
		switch s := v.slices[name]; {
		case !v.names.own(name):
			foreign = append(foreign, write{verb: remove, slice: s, foreign: true})
		case s.Spec.Pool.Name != v.node:
			p.writes = append(p.writes, write{verb: remove, slice: s})
		default:
			latest = max(latest, s.Spec.Pool.Generation)
		}
	}
	generation := max(1, v.highest)
	if latest == v.highest && latest > 0 {
		p.rewrite = v.needsGeneration(l, latest)
	} else if latest > 0 || len(p.writes)+len(foreign) > 0 { // another client's slices have a higher one
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
		w := write{verb: update, slice: is, urgent: v.keepsPodsAway(is.Spec.Devices, devices)}
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
	p.writes = slices.Concat(p.writes, updates, creates, v.surplus(len(l)), foreign)
	return p
}

// keepsPodsAway reports whether a change of a slice keeps pods from a device, and so can't wait: by a taint, or where the server has none
// because the device leaves.
func (v view) keepsPodsAway(is, want []kubeapi.Device) bool {
	if !v.dropsTaints {
		return addsTaint(want, resourceslice.ByName(is))
	}
	listed := resourceslice.ByName(want)
	return slices.ContainsFunc(is, func(d kubeapi.Device) bool { _, ok := listed[d.Name]; return !ok })
}

// surplus returns deletes of own slices that a shorter layout does not have.
func (v view) surplus(count int) []write {
	var all []write
	for _, name := range slices.Sorted(maps.Keys(v.slices)) {
		s := v.slices[name]
		if i, own := v.names.index(name); own && (i >= count || name != v.name(i)) && s.Spec.Pool.Name == v.node {
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
		name := v.name(i)
		for _, d := range devices {
			if was, ok := slice[d.Name]; ok && was != name {
				return true
			}
		}
	}
	return false
}
