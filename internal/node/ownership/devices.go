package ownership

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// offer is what an agent wants to claim.
type offer struct {
	at []gpu.Placement // of the devices of its units, each once

	numbering inventory.Numbering
	inventory *inventory.Inventory

	// unsure reports whether the agent may offer a placement that is not in at because it could not be read, or whether work may have it. An
	// earlier claim of it stays.
	unsure func(gpu.Placement) bool

	ready bool // the GPUs were read
}

// offerOf is what an inventory offers.
func offerOf(inv *inventory.Inventory) offer {
	o := offer{numbering: inv.Proposed(), inventory: inv}
	identified, unreadable, unidentified := map[gpu.DeviceID]bool{}, map[gpu.DeviceID]bool{}, false
	for u := range inv.Units() {
		identified[u.Device.At.GPU] = true
		if u.Health.Reason != health.ReasonWithdrawn { // such a unit is listed for a moment, but not offered
			o.at = append(o.at, u.Device.At)
		}
	}
	o.at = sortedPlacements(o.at)
	for _, e := range inv.Excluded() {
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

// before reports whether claim c of agent a was made before claim d of agent b. Turns are assigned under the lock and are
// unique; equal turns come from a copied file.
func before(c claim, a string, d claim, b string) bool {
	if c.turn != d.turn {
		return c.turn < d.turn
	}
	return a < b
}

// nextClaims are the claims of an agent, given its present ones and those of the others. A present claim keeps its turn, also
// for MIG instances of a claimed GPU. With refuse it leaves out what another agent has claimed before, and makes no new claim of what
// another agent may have claimed.
func nextClaims(mine claimFile, others []claimFile, o offer, refuse bool, now time.Time) []claim {
	turn := uint64(0)
	for _, f := range append(slices.Clone(others), mine) {
		for _, c := range f.claims {
			turn = max(turn, c.turn)
		}
	}
	turn = min(turn+1, maxTurns)
	next := slices.DeleteFunc(slices.Clone(mine.claims), func(c claim) bool { return !o.unsure(c.at) })
	for _, p := range o.at {
		c := claim{at: p, turn: turn, since: now.UTC()}
		if old := mine.oldestClaim(p); old != nil {
			c.turn, c.since = old.turn, old.since
		} else if refuse && slices.ContainsFunc(others, func(f claimFile) bool { return f.mayClaim(p.GPU) }) {
			continue
		}
		next = append(next, c)
	}
	if refuse {
		next = slices.DeleteFunc(next, func(c claim) bool { return claimedBefore(c, mine.agent, others) })
	}
	return normalized(next)
}

// claimedBefore reports whether another agent claimed the hardware of an agent's claim before it.
func claimedBefore(c claim, agent string, others []claimFile) bool {
	for _, f := range others {
		if slices.ContainsFunc(f.claims, func(d claim) bool { return c.at.Overlaps(d.at) && before(d, f.agent, c, agent) }) {
			return true
		}
	}
	return false
}

// oldestClaim is the oldest claim that covers a placement; nil if there is none.
func (f claimFile) oldestClaim(p gpu.Placement) (oldest *claim) {
	for i, c := range f.claims {
		if c.at.Covers(p) && (oldest == nil || c.turn < oldest.turn) {
			oldest = &f.claims[i]
		}
	}
	return oldest
}

// placementsOf are the placements that an agent claims or wants to claim, each once.
func placementsOf(mine claimFile, o offer) []gpu.Placement {
	all := slices.Clone(o.at)
	for _, c := range mine.claims {
		all = append(all, c.at)
	}
	return sortedPlacements(all)
}

// countOverlaps counts the placements of an agent that another one also claims.
func countOverlaps(mine, other claimFile, o offer) (n int) {
	for _, p := range placementsOf(mine, o) {
		if slices.ContainsFunc(other.claims, func(c claim) bool { return p.Overlaps(c.at) }) {
			n++
		}
	}
	return n
}

// coreClaims are the claims of the others as the core applies them: one for each overlap with a placement that this agent claims
// or wants, as it differs from one to the next which claim is older; and one for each claim without an overlap, in case this
// agent reads that hardware later. It has no claim there, so the other one is prior.
func coreClaims(mine claimFile, others []claimFile, o offer) (claims []inventory.Claim) {
	ours := placementsOf(mine, o)
	for _, f := range others {
		for _, c := range f.claims {
			overlaps := false
			for _, p := range ours {
				if p.Overlaps(c.at) {
					m := mine.oldestClaim(p)
					claims = append(claims, inventory.Claim{Agent: f.agent, At: p, Older: m == nil || before(c, f.agent, *m, mine.agent)})
					overlaps = true
				}
			}
			if !overlaps {
				claims = append(claims, inventory.Claim{Agent: f.agent, At: c.at, Older: true})
			}
		}
	}
	return claims
}

// numberingOf is the numbering in files at the highest generation. Where two files differ the first one counts.
func numberingOf(files []claimFile) inventory.Numbering {
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

// mergeNumbering is a numbering as it may be written: a device that another agent has numbered first keeps that number, and a
// number that another device has by now is left out.
func mergeNumbering(n, written inventory.Numbering, others []claimFile) inventory.Numbering {
	shared := numberingOf(others)
	if shared.Generation != n.Generation {
		return n
	}
	taken := map[gpu.DeviceIndex]bool{}
	for _, each := range shared.Numbers {
		taken[each.Index] = true
	}
	var numbers []inventory.Number
	for _, each := range n.Numbers {
		at, theirs := shared.Of(each.ID)
		was, ours := written.Of(each.ID)
		switch {
		case theirs:
			numbers = append(numbers, inventory.Number{ID: each.ID, Index: at})
		case !taken[each.Index], ours && written.Generation == n.Generation && was == each.Index:
			numbers = append(numbers, each)
		}
	}
	return inventory.NewNumbering(n.Generation, numbers)
}
