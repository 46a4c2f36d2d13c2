package health

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Ledger holds the conditions of all GPUs, and the history that is needed to detect recovery. The zero value is an
// empty ledger. It is immutable: Apply, Clear and Ignore return another.
type Ledger struct {
	conditions []Condition                  // sorted
	histories  map[gpu.DeviceID]*GPUHistory // by GPU; a history is never changed, only replaced
	driver     string                       // version: "570.124.06"
}

// Lost returns those of the devices whose GPU the driver does not list any more.
func (l Ledger) Lost(devices []gpu.Device) map[gpu.DeviceID]bool {
	var lost map[gpu.DeviceID]bool
	for _, c := range l.conditions {
		if c.Reason != ReasonLost || c.State != GPULost {
			continue
		}
		for _, d := range devices {
			if c.At.Covers(d.At) {
				if lost == nil {
					lost = map[gpu.DeviceID]bool{}
				}
				lost[d.ID] = true
			}
		}
	}
	return lost
}

// WithUnlisted records which GPUs the driver does not list at a time, and that it lists all others.
func (l Ledger) WithUnlisted(now time.Time, unlisted map[gpu.DeviceID]bool) Ledger {
	now = now.UTC().Truncate(time.Millisecond)
	histories := maps.Clone(l.histories)
	for id := range unlisted {
		if histories[id] == nil || histories[id].UnlistedSince.IsZero() {
			if histories == nil {
				histories = map[gpu.DeviceID]*GPUHistory{}
			}
			histories[id] = histories[id].clone()
			histories[id].UnlistedSince = now
		}
	}
	for id, h := range histories {
		if !unlisted[id] && !h.UnlistedSince.IsZero() {
			histories[id] = h.clone()
			histories[id].UnlistedSince = time.Time{}
		}
	}
	l.histories = histories
	return l
}

// WithTaken records which GPUs the agent has for itself from now on: no workload runs on these.
func (l Ledger) WithTaken(now time.Time, taken []gpu.DeviceID) Ledger {
	b := l.builder(Policy{}, now)
	for id, h := range l.histories {
		if h.taken() && !slices.Contains(taken, id) {
			b.history(id).takenUntil = b.now
		}
	}
	for _, id := range taken {
		if h := b.history(id); !h.taken() {
			h.takenSince = b.now
			h.takenUntil = time.Time{}
		}
	}
	return b.ledger()
}

// Paused returns the ledger of a time in which no GPU is checked, on purpose and briefly. Conditions stay, but no evidence against them counts until
// the next check: it begins anew then.
func (l Ledger) Paused(now time.Time) Ledger {
	b := l.builder(Policy{}, now)
	for id, h := range l.histories {
		if h.responding {
			b.history(id).responding = false
		}
	}
	for _, of := range b.conditions {
		for i := range of {
			of[i].ClearingSince, of[i].CleanChecks = time.Time{}, 0
		}
	}
	return b.ledger()
}

// UnlistedSince returns since when the driver has not listed a GPU; zero if it does.
func (l Ledger) UnlistedSince(id gpu.DeviceID) time.Time {
	if h := l.histories[id]; h != nil {
		return h.UnlistedSince
	}
	return time.Time{}
}

// LoadedDriver returns the version of the driver that was ready last; "" if it may have been loaded again since.
func (l Ledger) LoadedDriver() string {
	for _, h := range l.histories {
		if h.UnlistedSince.IsZero() && (h.reloading || h.driverAbsent) {
			return ""
		}
	}
	return l.driver
}

// Conditions returns the conditions in canonical order, including those without effect (State Healthy).
func (l Ledger) Conditions() []Condition { return slices.Clone(l.conditions) }

// History returns the history of a GPU; false if there is none.
func (l Ledger) History(id gpu.DeviceID) (GPUHistory, bool) {
	c, ok := l.histories[id]
	if !ok {
		return GPUHistory{}, false
	}
	return *c, true
}

// NeedsTick reports whether the passage of time can change a condition. If so, call Apply periodically.
func (l Ledger) NeedsTick() bool { return len(l.conditions) > 0 }

// Health returns the health of a placement: the worst condition that covers it. Of equally bad conditions the one
// that is hardest to clear counts, as no other is worth clearing before; of those the first one, because later ones
// may be consequences. A simulated condition does not hide a real one.
func (l Ledger) Health(at gpu.Placement) Health {
	var worst Condition
	for _, c := range l.conditions {
		if c.State > Healthy && c.isEffective() && c.At.Covers(at) && (worst.State == Healthy || compareSeverity(c, worst) < 0) {
			worst = c
		}
	}
	return l.healthOf(worst, at)
}

// All returns the health that each condition of a placement alone results in, the worst first: the first one is Health. It is nil
// without a condition that has an effect.
func (l Ledger) All(at gpu.Placement) []Health {
	var found []Condition
	for _, c := range l.conditions {
		if c.State > Healthy && c.isEffective() && c.At.Covers(at) {
			found = append(found, c)
		}
	}
	slices.SortStableFunc(found, compareSeverity)
	var all []Health
	for _, c := range found {
		all = append(all, l.healthOf(c, at))
	}
	return all
}

// compareSeverity is the order of conditions from the worst: by state, real ones before simulated ones, the hardest to clear first, the
// earliest first.
func compareSeverity(a, b Condition) int {
	return cmp.Or(cmp.Compare(b.State, a.State), realFirst(a, b), cmp.Compare(b.Repair(), a.Repair()), a.Since.Compare(b.Since))
}

// healthOf returns the health of a placement with one condition; the zero Condition is none.
func (l Ledger) healthOf(c Condition, at gpu.Placement) (h Health) {
	if c.State > Healthy {
		h = c.health()
	}
	if history := l.histories[at.GPU]; history != nil {
		h.Limitations = l.limits(history.Sample, at)
		if h.State > Healthy {
			h.RecoveryAction = history.Sample.RecoveryAction
		}
	}
	return h
}

// ForMode returns the ledger as it counts in a mode. Under ModeOff only two kinds of conditions have an effect: those
// of the driver, and those that mean that a GPU does not respond. The others are kept without effect.
func (l Ledger) ForMode(m Mode) Ledger {
	if m != ModeOff {
		return l
	}
	l.conditions = slices.DeleteFunc(l.Conditions(), func(c Condition) bool {
		return c.At != gpu.Node && !c.Reason.isUnresponsive()
	})
	return l
}

// Apply returns a ledger with the observations, and with the passage of time until now. Without observations only
// time passes.
func (l Ledger) Apply(p Policy, now time.Time, obs ...Observation) Ledger {
	if len(obs) == 0 && !l.NeedsTick() {
		return l
	}
	b := l.builder(p, now)
	for _, o := range obs {
		if o.Kind == Checked {
			b.history(o.At.GPU) // before the first check is applied, so that it finds out whether other GPUs exist
		}
	}
	for _, o := range obs {
		b.observe(o)
	}
	b.advance()
	return b.ledger()
}

// Relocate moves the conditions of a removed MIG instance to its GPU, as degraded: removing an instance does not
// repair hardware, and the next instance at its place is not faulty. Conditions that mean "the instance does not
// respond" are dropped. The history of a GPU that is neither listed nor known is dropped too.
func (l Ledger) Relocate(s gpu.Snapshot) Ledger {
	there := map[gpu.Placement]bool{gpu.Node: true}
	for _, d := range s.Devices {
		there[d.At], there[gpu.Placement{GPU: d.At.GPU, GI: d.At.GI, CI: gpu.Whole}], there[gpu.WholeGPU(d.At.GPU)] = true, true, true
	}
	for _, e := range s.Excluded {
		there[gpu.WholeGPU(e.At.GPU)] = true
	}
	moved := slices.Clone(l.conditions)
	histories := l.histories
	if s.Driver.State == gpu.DriverReady {
		moved = slices.DeleteFunc(moved, func(c Condition) bool { return !there[gpu.WholeGPU(c.At.GPU)] })
		histories = maps.Clone(l.histories)
		maps.DeleteFunc(histories, func(id gpu.DeviceID, _ *GPUHistory) bool { return !there[gpu.WholeGPU(id)] })
	}
	moved = slices.DeleteFunc(moved, func(c Condition) bool { return !there[c.At] && c.At.GI != gpu.Whole && c.Reason.isUnresponsive() })
	for i, c := range moved {
		if c.At.GPU != "" && !there[c.At] && c.At.GI != gpu.Whole {
			moved[i].At, moved[i].FromRemovedInstance = gpu.WholeGPU(c.At.GPU), true
		}
	}
	return Ledger{merged(moved), histories, l.driver}
}

// ledgerBuilder is a mutable copy of a Ledger.
type ledgerBuilder struct {
	policy     Policy
	now        time.Time
	conditions map[gpu.DeviceID][]Condition // by GPU; "" = those of the node
	histories  map[gpu.DeviceID]*GPUHistory
	owned      map[gpu.DeviceID]bool // histories that were cloned for this builder
	driver     string
}

func (l Ledger) builder(p Policy, now time.Time) *ledgerBuilder {
	b := &ledgerBuilder{
		policy: p, now: now.UTC().Truncate(time.Millisecond), // in milliseconds: seconds would order a reset before its own cause
		conditions: map[gpu.DeviceID][]Condition{},
		histories:  maps.Clone(l.histories),
		owned:      map[gpu.DeviceID]bool{},
		driver:     l.driver,
	}
	all := slices.Clone(l.conditions)
	for i := 0; i < len(all); {
		first, id := i, all[i].At.GPU
		for i < len(all) && all[i].At.GPU == id {
			i++
		}
		if run := all[first:i:i]; b.conditions[id] == nil {
			b.conditions[id] = run
		} else { // simulated conditions are after all others
			b.conditions[id] = append(b.conditions[id], run...)
		}
	}
	return b
}

func (b *ledgerBuilder) ledger() Ledger {
	all := slices.Concat(slices.Collect(maps.Values(b.conditions))...)
	slices.SortStableFunc(all, compareConditions)
	return Ledger{all, b.histories, b.driver}
}

// history returns the GPU's history, for changes.
func (b *ledgerBuilder) history(id gpu.DeviceID) *GPUHistory {
	if !b.owned[id] {
		if b.histories == nil {
			b.histories = map[gpu.DeviceID]*GPUHistory{}
		}
		b.histories[id], b.owned[id] = b.histories[id].clone(), true
	}
	return b.histories[id]
}

// readHistory returns the GPU's history, for reading only; an empty one if there is none.
func (b *ledgerBuilder) readHistory(id gpu.DeviceID) *GPUHistory {
	if c := b.histories[id]; c != nil {
		return c
	}
	return &GPUHistory{}
}

// find returns the condition of the same cause; nil if there is none.
func (b *ledgerBuilder) find(c Condition) *Condition {
	of := b.conditions[c.At.GPU]
	for i := range of {
		if of[i].same(c) {
			return &of[i]
		}
	}
	return nil
}

// add adds a condition.
func (b *ledgerBuilder) add(c Condition) *Condition {
	b.conditions[c.At.GPU] = append(b.conditions[c.At.GPU], c)
	of := b.conditions[c.At.GPU]
	return &of[len(of)-1]
}

// remove removes conditions of a GPU; "" = of the node.
func (b *ledgerBuilder) remove(id gpu.DeviceID, which func(Condition) bool) {
	if of := b.conditions[id]; len(of) > 0 {
		b.conditions[id] = slices.DeleteFunc(of, which)
	}
}

// recordEvent records an occurrence of a cause, which ends a recovery in progress and a time for which an operator
// ignored the cause. The text of the first occurrence stays: snapshots may find a fault in different calls, and
// each new text would be published to an orchestrator.
// The time of the occurrence is c.Last; zero = now.
func (b *ledgerBuilder) recordEvent(c Condition) *Condition {
	if c.Last.IsZero() {
		c.Last = b.now
	}
	old := b.find(c)
	if old == nil {
		c.Since, c.Count = c.Last, 1
		return b.add(c)
	}
	old.Count++
	if c.Last.After(old.Last) {
		old.Last = c.Last
	}
	old.ClearingSince, old.CleanChecks, old.IgnoredUntil, old.FromRemovedInstance = time.Time{}, 0, time.Time{}, false
	return old
}

// setLevel records that a persistent state (a level, in contrast to an event) is present. As long as it stays
// present, neither Last nor IgnoredUntil changes, except if the recovery action changed, or if a GPU stopped
// responding again after a check. The condition has an effect from the given number of checks on.
func (b *ledgerBuilder) setLevel(c Condition, checks int) {
	if old := b.find(c); old != nil {
		if old.Count < checks {
			old.Count++
		}
		old.ClearingSince, old.CleanChecks, old.FromRemovedInstance = time.Time{}, 0, false
		answered := c.Reason.isUnresponsive() && c.At.GI == gpu.Whole && b.readHistory(c.At.GPU).checked.After(old.Last)
		if old.Code != c.Code || answered {
			old.Last, old.IgnoredUntil = b.now, time.Time{}
		}
		if old.Code != c.Code || c.Reason == ReasonDriver || c.Reason == ReasonMaintenance {
			old.Code, old.Detail = c.Code, c.Detail // the latest recovery action, or the latest reason why the driver is not called
		}
		if old.Count >= checks {
			old.State = c.State
		}
		return
	}
	c.Since, c.Last, c.Count = b.now, b.now, 1
	if checks > 1 {
		c.State = Healthy
	}
	b.add(c)
}
