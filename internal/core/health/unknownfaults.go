package health

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// VerdictBranch is the first driver whose recovery action covers every XID that the recovery action of any driver
// covers. From it on, the recovery action None shows that the driver has no fault on record.
const VerdictBranch = 575

// UnknownFaults returns the condition of a GPU whose earlier faults are not known. The GPU takes no new work until
// something shows that it works: the recovery action None, a reset, a reboot, a proof that passes or an operator.
func UnknownFaults(id gpu.DeviceID, now time.Time, why string) Condition {
	now = now.UTC().Truncate(time.Millisecond)
	return Condition{
		At: gpu.WholeGPU(id), Reason: ReasonFaultUnknown, State: ReasonFaultUnknown.meaning().state, Detail: why,
		Since: now, Last: now, Count: 1,
	}
}

// UnknownFaultsEnd reports whether more than an operator ends unknown faults.
func UnknownFaultsEnd(p Policy) bool {
	return Condition{Reason: ReasonFaultUnknown}.clearedBy(p) != 0
}

// WithUnknownFaults records that earlier faults of GPUs are not known.
func (l Ledger) WithUnknownFaults(p Policy, now time.Time, ids ...gpu.DeviceID) Ledger {
	if len(ids) == 0 {
		return l
	}
	b := l.builder(p, now)
	for _, id := range ids {
		if c := UnknownFaults(id, now, ""); b.find(c) == nil {
			b.add(c)
		}
		b.history(id)
	}
	b.advance()
	return b.ledger()
}

// WithKnownFaults records that the kernel log has every XID since the driver was loaded. So the faults of all GPUs
// are known, except on GPUs that have a condition of a kind that this version does not know.
func (l Ledger) WithKnownFaults(p Policy, now time.Time) Ledger {
	over := func(c Condition) bool {
		return c.Reason == ReasonFaultUnknown && c.Detail == "" && c.clearedBy(p) != 0
	}
	if !slices.ContainsFunc(l.conditions, over) {
		return l
	}
	b := l.builder(p, now)
	for id := range b.conditions {
		b.remove(id, over)
	}
	b.advance()
	return b.ledger()
}
