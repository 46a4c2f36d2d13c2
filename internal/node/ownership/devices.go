package ownership

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// localDevices are what this agent offers, and is to record.
type localDevices struct {
	at []gpu.Placement // of the devices of its units, each once

	numbering   inventory.Numbering
	allocatable *inventory.Allocatable

	// unsure reports whether the agent may offer a placement that is not in at because it could not be read, or whether work may have it. An
	// earlier record of it stays.
	unsure func(gpu.Placement) bool

	excluded []gpu.Placement // that exist, and that this agent does not offer

	// held reports whether work has a GPU from this agent. nil = that is not known.
	held func(gpu.DeviceID) bool

	ready bool // the GPUs were read
}

// localDevicesOf is what this agent offers in a state.
func localDevicesOf(s core.State) localDevices {
	inv := s.Allocatable
	o := localDevices{numbering: s.ProposedNumbering(), allocatable: inv}
	identified, unreadable, unidentified := map[gpu.DeviceID]bool{}, map[gpu.DeviceID]bool{}, false
	for u := range inv.Units() {
		identified[u.Device.At.GPU] = true
		if u.Health.Reason != health.ReasonWithdrawn { // such a unit is listed for a moment, but not offered
			o.at = append(o.at, u.Device.At)
		}
	}
	o.at = sortedPlacements(o.at)
	for _, e := range inv.Excluded() {
		if e.At.GPU != "" {
			o.excluded = append(o.excluded, e.At)
		}
		switch {
		case e.Failure == gpu.NotFailed: // excluded by the configuration
			identified[e.At.GPU] = true
		case e.At.GPU == "":
			unidentified = true
		default:
			unreadable[e.At.GPU] = true
		}
	}
	o.ready = inv.Driver().State == gpu.DriverReady
	o.unsure = func(p gpu.Placement) bool { return !o.ready || unreadable[p.GPU] || unidentified && !identified[p.GPU] }
	return o
}

// sortedPlacements sorts placements and removes duplicates.
func sortedPlacements(at []gpu.Placement) []gpu.Placement {
	slices.SortFunc(at, comparePlacements)
	return slices.Compact(at)
}

// before reports whether device c of agent a was recorded before device d of agent b. The order is given under the lock and is
// unique; equal ones come from a copied file.
func before(c device, a string, d device, b string) bool {
	if c.order != d.order {
		return c.order < d.order
	}
	return a < b
}

// nextDevices are the devices that an agent records, given its present ones and those of the others. A present one keeps its order, also
// for MIG instances of a recorded GPU. With refuse it leaves out what another agent has recorded before, and adds none that
// another agent may offer, unless work of this agent has it.
func nextDevices(mine agentFile, others []agentFile, o localDevices, refuse bool, now time.Time) []device {
	order := nextOrder(append(slices.Clone(others), mine))
	next := slices.DeleteFunc(slices.Clone(mine.devices), func(c device) bool { return !o.unsure(c.at) })
	for _, p := range o.at {
		c := device{at: p, order: order, since: now.UTC()}
		if old := mine.oldestOver(p); old != nil {
			c.order, c.since = old.order, old.since
		} else if refuse && slices.ContainsFunc(others, func(f agentFile) bool { return f.mayOffer(p.GPU) }) &&
			(o.held == nil || !o.held(p.GPU)) {
			continue
		}
		next = append(next, c)
	}
	if refuse {
		next = slices.DeleteFunc(next, func(c device) bool { return recordedBefore(c, mine.agent, others) })
	}
	return normalized(next)
}

// nextOrder returns the order of devices that are recorded next.
func nextOrder(files []agentFile) uint64 {
	order := uint64(0)
	for _, f := range files {
		for _, c := range f.devices {
			order = max(order, c.order)
		}
	}
	return min(order+1, maxOrder)
}

// recordedBefore reports whether another agent has recorded the hardware of an agent's device before it.
func recordedBefore(c device, agent string, others []agentFile) bool {
	for _, f := range others {
		if slices.ContainsFunc(f.devices, func(d device) bool { return c.at.Overlaps(d.at) && before(d, f.agent, c, agent) }) {
			return true
		}
	}
	return false
}

// oldestOver is the first recorded device that covers a placement; nil if there is none.
func (f agentFile) oldestOver(p gpu.Placement) (oldest *device) {
	for i, c := range f.devices {
		if c.at.Covers(p) && (oldest == nil || c.order < oldest.order) {
			oldest = &f.devices[i]
		}
	}
	return oldest
}

// placementsOf are the placements that an agent has recorded or offers, each once.
func placementsOf(mine agentFile, o localDevices) []gpu.Placement {
	all := slices.Clone(o.at)
	for _, c := range mine.devices {
		all = append(all, c.at)
	}
	return sortedPlacements(all)
}

// countOverlaps counts the placements of an agent that another one offers, too.
func countOverlaps(mine, other agentFile, o localDevices) (n int) {
	for _, p := range placementsOf(mine, o) {
		if slices.ContainsFunc(other.devices, func(c device) bool { return p.Overlaps(c.at) }) {
			n++
		}
	}
	return n
}

// overlapsOf are the devices of the others as the core applies them: one for each overlap with a placement that this agent has recorded
// or offers, as it differs from one to the next which is older; and one for each device without an overlap, in case this
// agent reads that hardware later. It has none there, so the other one is prior.
func overlapsOf(mine agentFile, others []agentFile, o localDevices) (all []inventory.PeerDevice) {
	ours := placementsOf(mine, o)
	for _, f := range others {
		for _, c := range f.devices {
			overlaps := false
			for _, p := range ours {
				if p.Overlaps(c.at) {
					m := mine.oldestOver(p)
					all = append(all, inventory.PeerDevice{Agent: f.agent, At: p, Earlier: m == nil || before(c, f.agent, *m, mine.agent)})
					overlaps = true
				}
			}
			if !overlaps {
				all = append(all, inventory.PeerDevice{Agent: f.agent, At: c.at, Earlier: true})
			}
		}
	}
	return all
}

// numberingOf is the numbering in files at the highest generation. Where two files differ the first one counts.
func numberingOf(files []agentFile) inventory.Numbering {
	generation := 0
	var numbers []inventory.Number
	for _, f := range files {
		if f.numbering.Generation > generation {
			generation, numbers = f.numbering.Generation, nil
		}
		if f.numbering.Generation == generation {
			numbers = append(numbers, f.numbering.Numbers...)
		}
	}
	return inventory.SharedNumbering(generation, numbers)
}

// mergeNumbering is a numbering as it may be written: a device that another agent has numbered first, or this one in its file, keeps that number,
// as the numbering may be older than the files. A number that another device has by now is left out.
func mergeNumbering(n, written inventory.Numbering, others []agentFile) inventory.Numbering {
	shared := numberingOf(others)
	if shared.Generation != n.Generation {
		shared = inventory.Numbering{}
	}
	if written.Generation != n.Generation {
		written = inventory.Numbering{}
	}
	taken := map[gpu.DeviceIndex]bool{}
	for _, each := range shared.Numbers {
		taken[each.Index] = true
	}
	var kept, added []inventory.Number
	for _, each := range n.Numbers {
		if at, ok := shared.Of(each.ID); ok {
			kept = append(kept, inventory.Number{ID: each.ID, Index: at})
		} else if at, ok := written.Of(each.ID); ok {
			kept = append(kept, inventory.Number{ID: each.ID, Index: at})
		} else if !taken[each.Index] {
			added = append(added, each)
		}
	}
	return inventory.NewNumbering(n.Generation, append(kept, added...)) // of two devices with one number the first has it
}
