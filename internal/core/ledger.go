package core

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Ledger is the memory of what is wrong, and of what is needed to tell when it no longer is. The zero
// value is an empty ledger. It is immutable: Apply, Clear and Ignore return another.
type Ledger struct {
	conditions []Condition              // sorted
	histories  map[DeviceID]*GPUHistory // by GPU; a chart is never changed, only replaced
	driver     string                   // its version: "570.124.06"
}

// Lost are the devices of GPUs that the driver does not list any more.
func (l Ledger) Lost(devices []Device) map[DeviceID]bool {
	var lost map[DeviceID]bool
	for _, c := range l.conditions {
		if c.Reason != ReasonLost || c.State != GPULost {
			continue
		}
		for _, d := range devices {
			if c.At.Covers(d.At) {
				if lost == nil {
					lost = map[DeviceID]bool{}
				}
				lost[d.ID] = true
			}
		}
	}
	return lost
}

// Conditions returns the standing conditions in canonical order, noted ones (State Healthy) included.
func (l Ledger) Conditions() []Condition { return slices.Clone(l.conditions) }

// History is what is remembered of a GPU.
func (l Ledger) History(id DeviceID) (GPUHistory, bool) {
	c, ok := l.histories[id]
	if !ok {
		return GPUHistory{}, false
	}
	return *c, true
}

// NeedsTick reports whether something stands that time alone can change: Apply now and then.
func (l Ledger) NeedsTick() bool { return len(l.conditions) > 0 }

// Health is the worst standing condition that covers the placement; among equals the one that began
// first, so that what follows from a fault does not take its place, but a rehearsal hides no fault.
func (l Ledger) Health(at Placement) Health {
	var worst Condition
	for _, c := range l.conditions {
		if c.isEffective() && c.At.Covers(at) && (c.State > worst.State ||
			c.State == worst.State && c.Simulated == worst.Simulated && c.Since.Before(worst.Since)) {
			worst = c
		}
	}
	var h Health
	if worst.State > Healthy {
		h = worst.health()
	}
	if history := l.histories[at.GPU]; history != nil {
		h.Limitations = history.Sample.limits(at)
		if h.State > Healthy {
			h.RecoveryAction = history.Sample.RecoveryAction
		}
	}
	return h
}

// ForMode is what counts in a mode: conditions of before it was switched off are remembered, and no more.
func (l Ledger) ForMode(m HealthMode) Ledger {
	if m != ModeOff {
		return l
	}
	l.conditions = slices.DeleteFunc(l.Conditions(), func(c Condition) bool {
		return c.At != Node && !c.Reason.isUnresponsive()
	})
	return l
}

// Apply folds observations into a new ledger, and lets the time pass until now: without observations it
// does only that.
func (l Ledger) Apply(p HealthPolicy, now time.Time, obs ...Observation) Ledger {
	if len(obs) == 0 && !l.NeedsTick() {
		return l
	}
	d := l.builder(p, now)
	for _, o := range obs {
		if o.Kind == Checked {
			d.history(o.At.GPU) // before the first is judged, so that it knows whether it is alone
		}
	}
	for _, o := range obs {
		d.observe(o)
	}
	d.advance()
	return d.ledger()
}

// Relocate moves what stands against a MIG instance that is gone to its GPU, as degraded: taking an instance
// away repairs nothing, and the next one in its place did nothing wrong. That it did not answer is over. What is
// remembered of a GPU that is gone for good goes with it.
func (l Ledger) Relocate(s Snapshot) Ledger {
	there := map[Placement]bool{Node: true}
	for _, d := range s.Devices {
		there[d.At], there[Placement{d.At.GPU, d.At.GI, Whole}], there[WholeGPU(d.At.GPU)] = true, true, true
	}
	for _, e := range s.Excluded {
		there[WholeGPU(e.At.GPU)] = true
	}
	moved := slices.Clone(l.conditions)
	histories := l.histories
	if s.Driver.State == DriverReady {
		moved = slices.DeleteFunc(moved, func(c Condition) bool { return !there[WholeGPU(c.At.GPU)] })
		histories = maps.Clone(l.histories)
		maps.DeleteFunc(histories, func(id DeviceID, _ *GPUHistory) bool { return !there[WholeGPU(id)] })
	}
	moved = slices.DeleteFunc(moved, func(c Condition) bool { return !there[c.At] && c.At.GI != Whole && c.Reason.isUnresponsive() })
	for i, c := range moved {
		if c.At.GPU != "" && !there[c.At] && c.At.GI != Whole {
			moved[i].At, moved[i].FromRemovedInstance = WholeGPU(c.At.GPU), true
		}
	}
	return Ledger{merged(moved), histories, l.driver}
}

// ledgerBuilder is a ledger in the making.
type ledgerBuilder struct {
	policy     HealthPolicy
	now        time.Time
	conditions []Condition
	histories  map[DeviceID]*GPUHistory
	owned      map[DeviceID]bool // charts that are this draft's own
	driver     string
}

func (l Ledger) builder(p HealthPolicy, now time.Time) *ledgerBuilder {
	return &ledgerBuilder{
		policy: p, now: now.UTC().Truncate(time.Millisecond), // a second would order a reset before its own cause
		conditions: slices.Clone(l.conditions),
		histories:  maps.Clone(l.histories),
		owned:      map[DeviceID]bool{},
		driver:     l.driver,
	}
}

func (d *ledgerBuilder) ledger() Ledger {
	slices.SortStableFunc(d.conditions, compareConditions)
	return Ledger{d.conditions, d.histories, d.driver}
}

// history is the GPU's chart, to be changed.
func (d *ledgerBuilder) history(id DeviceID) *GPUHistory {
	if !d.owned[id] {
		if d.histories == nil {
			d.histories = map[DeviceID]*GPUHistory{}
		}
		d.histories[id], d.owned[id] = d.histories[id].clone(), true
	}
	return d.histories[id]
}

// readHistory is the GPU's chart, to be looked at; an empty one if there is none.
func (d *ledgerBuilder) readHistory(id DeviceID) *GPUHistory {
	if c := d.histories[id]; c != nil {
		return c
	}
	return &GPUHistory{}
}

// find is the standing condition of the same cause; nil if there is none.
func (d *ledgerBuilder) find(c Condition) *Condition {
	for i := range d.conditions {
		if d.conditions[i].same(c) {
			return &d.conditions[i]
		}
	}
	return nil
}

// remove removes conditions.
func (d *ledgerBuilder) remove(which func(Condition) bool) {
	d.conditions = slices.DeleteFunc(d.conditions, which)
}

// recordEvent enters that a cause came up, or came up again: whatever spoke for recovery no longer does, and
// an operator who disregards it knew nothing of this one. It keeps its first words, NewHealth each reading may
// meet a fault in another call and every new text is an update to an orchestrator.
func (d *ledgerBuilder) recordEvent(c Condition) *Condition {
	old := d.find(c)
	if old == nil {
		c.Since, c.Last, c.Count = d.now, d.now, 1
		d.conditions = append(d.conditions, c)
		return &d.conditions[len(d.conditions)-1]
	}
	old.Count++
	old.Last, old.ClearingSince, old.CleanChecks, old.IgnoredUntil, old.FromRemovedInstance = d.now, time.Time{}, 0, time.Time{}, false
	return old
}

// setLevel enters that a level is (still) there. Going on is nothing new: it changes neither Last nor what
// an operator disregards; a verdict that changed is, and silence after an answer. Below the number of checks
// that the reason wants it is only noted.
func (d *ledgerBuilder) setLevel(c Condition, checks int) {
	state := c.State
	if old := d.find(c); old != nil {
		if old.Count < checks {
			old.Count++
		}
		old.ClearingSince, old.CleanChecks, old.FromRemovedInstance = time.Time{}, 0, false
		answered := c.Reason.isUnresponsive() && c.At.GI == Whole && d.readHistory(c.At.GPU).checked.After(old.Last)
		if old.Code != c.Code || answered {
			old.Last, old.IgnoredUntil = d.now, time.Time{}
		}
		if old.Code != c.Code || c.Reason == ReasonDriver {
			old.Code, old.Detail = c.Code, c.Detail // a verdict, or why the driver is gone: the latest knows best
		}
		if old.Count >= checks {
			old.State = state
		}
		return
	}
	c.Since, c.Last, c.Count = d.now, d.now, 1
	if checks > 1 {
		c.State = Healthy
	}
	d.conditions = append(d.conditions, c)
}

// branchOf is the major number of a driver version such as "570.124.06"; 0 if there is none.
func branchOf(version string) int {
	major, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(major)
	if err != nil {
		return 0
	}
	return n
}
