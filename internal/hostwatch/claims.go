package hostwatch

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// offer is what an agent wants to claim.
type offer struct {
	at []core.Placement // of the devices of its units, each once

	numbering core.Numbering

	// unsure reports whether the agent may offer something though it is not in at: nobody could read it. What was
	// claimed stays claimed, as workloads may be running on it.
	unsure func(core.Placement) bool
}

// offerOf is what an inventory offers.
func offerOf(inv *core.Inventory) offer {
	o := offer{numbering: inv.Proposed()}
	seen, silent, nameless := map[core.DeviceID]bool{}, map[core.DeviceID]bool{}, false
	for u := range inv.Units() {
		seen[u.Device.At.GPU] = true
		if u.Health.Reason != core.ReasonWithdrawn { // it is listed for a moment, and not offered any more
			o.at = append(o.at, u.Device.At)
		}
	}
	slices.SortFunc(o.at, comparePlacements)
	o.at = slices.Compact(o.at)
	for _, e := range inv.Excluded() {
		switch {
		case e.Failure == core.NotFailed: // by intent
			seen[e.At.GPU] = true
		case e.At.GPU == "":
			nameless = true
		default:
			silent[e.At.GPU] = true
		}
	}
	ready := inv.Driver().State == core.DriverReady
	o.unsure = func(p core.Placement) bool { return !ready || silent[p.GPU] || nameless && !seen[p.GPU] }
	return o
}

// before reports whether the claim c of agent a was made before d of agent b. Turns are given out in a critical
// section and never twice; equal ones come from files that somebody has copied.
func before(c claim, a string, d claim, b string) bool {
	if c.turn != d.turn {
		return c.turn < d.turn
	}
	return a < b
}

// settle is what an agent claims after it has seen what it and the others claim. What it claims already keeps its
// turn, also when a GPU is cut up: its instances were claimed with it. With refuse it leaves alone what another has
// claimed before it.
func settle(mine entry, others []entry, o offer, refuse bool, now time.Time) []claim {
	turn := uint64(0)
	for _, e := range append(slices.Clone(others), mine) {
		for _, c := range e.claims {
			turn = max(turn, c.turn)
		}
	}
	turn = min(turn+1, maxTurn)
	var next []claim
	for _, c := range mine.claims {
		if o.unsure(c.at) {
			next = append(next, c)
		}
	}
	for _, p := range o.at {
		c := claim{at: p, turn: turn, since: now.UTC()}
		if old := mine.on(p); old != nil {
			c.turn, c.since = old.turn, old.since
		}
		next = append(next, c)
	}
	if refuse {
		next = slices.DeleteFunc(next, func(c claim) bool { return preceded(c, mine.agent, others) })
	}
	return sorted(next)
}

// preceded reports whether another agent has claimed the hardware of a claim before.
func preceded(c claim, agent string, others []entry) bool {
	for _, e := range others {
		if slices.ContainsFunc(e.claims, func(d claim) bool { return c.at.Overlaps(d.at) && before(d, e.agent, c, agent) }) {
			return true
		}
	}
	return false
}

// on is the oldest claim that covers a placement; nil if there is none.
func (e entry) on(p core.Placement) (oldest *claim) {
	for i, c := range e.claims {
		if c.at.Covers(p) && (oldest == nil || c.turn < oldest.turn) {
			oldest = &e.claims[i]
		}
	}
	return oldest
}

// own are the placements that an agent claims or wants to, each once.
func own(mine entry, o offer) []core.Placement {
	all := slices.Clone(o.at)
	for _, c := range mine.claims {
		all = append(all, c.at)
	}
	slices.SortFunc(all, comparePlacements)
	return slices.Compact(all)
}

// contested counts the placements of an agent that another one claims, too.
func contested(mine, other entry, o offer) (n int) {
	for _, p := range own(mine, o) {
		if slices.ContainsFunc(other.claims, func(c claim) bool { return p.Overlaps(c.at) }) {
			n++
		}
	}
	return n
}

// against is what the others' claims mean to an agent: for each placement that it claims or wants, as which of two
// claims came first differs from one to the next; and for hardware that it may learn of later. That it has not
// claimed, so there the others were first.
func against(mine entry, others []entry, o offer) (claims []core.Claim) {
	ours := own(mine, o)
	for _, e := range others {
		for _, c := range e.claims {
			met := false
			for _, p := range ours {
				if p.Overlaps(c.at) {
					m := mine.on(p)
					claims = append(claims, core.Claim{Agent: e.agent, At: p, Prior: m == nil || before(c, e.agent, *m, mine.agent)})
					met = true
				}
			}
			if !met {
				claims = append(claims, core.Claim{Agent: e.agent, At: c.at, Prior: true})
			}
		}
	}
	return claims
}

// numberingOf is what agents have numbered, at the highest generation. Where two differ the first one counts.
func numberingOf(entries []entry) core.Numbering {
	generation := 0
	var numbers []core.Number
	for _, e := range entries {
		if e.numbering.Generation > generation {
			generation, numbers = e.numbering.Generation, nil
		}
		if e.numbering.Generation == generation {
			numbers = append(numbers, e.numbering.Numbers...)
		}
	}
	return core.SharedNumbering(generation, numbers)
}

// agreed is a numbering as it may be written: a device that another agent has numbered first has that number, and a number
// that another device has got meanwhile is not given again.
func agreed(n, written core.Numbering, others []entry) core.Numbering {
	shared := numberingOf(others)
	if shared.Generation != n.Generation {
		return n
	}
	taken := map[core.DeviceIndex]bool{}
	for _, each := range shared.Numbers {
		taken[each.Index] = true
	}
	var numbers []core.Number
	for _, each := range n.Numbers {
		at, theirs := shared.Of(each.ID)
		was, ours := written.Of(each.ID)
		switch {
		case theirs:
			numbers = append(numbers, core.Number{ID: each.ID, Index: at})
		case !taken[each.Index], ours && written.Generation == n.Generation && was == each.Index:
			numbers = append(numbers, each)
		}
	}
	return core.NewNumbering(n.Generation, numbers)
}
