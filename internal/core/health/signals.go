package health

import (
	"fmt"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

const (
	windowSpan = 10 * time.Minute

	// throttleShare is the share of a window for which a GPU may be throttled without a condition.
	throttleShare = 0.6

	// minReplayLimit is the number of PCIe replays per minute that is allowed on every link.
	minReplayLimit = 8

	// lossOfReset is for how long a GPU without an energy counter must have been lost to count as reset when it responds
	// again. A GPU that one reading does not list is read again within a minute by default.
	lossOfReset = 2 * time.Minute

	// weakSignSpan is how far apart two weak signs of a reset may be: counters are read at different times.
	weakSignSpan = 5 * time.Minute
)

// level reports whether the latest sample shows the state of a reason. For a reason that is no persistent state it is
// NotReported.
func (h *GPUHistory) level(r Reason) Tristate {
	v := h.Sample
	is := func(reported, present bool) Tristate {
		if !reported {
			return NotReported
		}
		return TristateOf(present)
	}
	switch r {
	case ReasonRecoveryAction:
		action := h.recoveryAction()
		return is(action != RecoveryUnknown, action != RecoveryNone)
	case ReasonRemapFailed:
		return v.RemapFailed
	case ReasonUnrepairable:
		return v.Unrepairable
	case ReasonSRAM:
		return v.SRAMThreshold
	case ReasonRemapPending:
		return max(v.RemapPending, v.BankRemapPending) // pending if one of them is
	case ReasonRetirement:
		return v.RetirementPending
	case ReasonRepair:
		return v.RepairPending
	case ReasonInfoROM:
		return v.InfoROMCorrupt
	case ReasonFabricWait: // a single GPU that is passed through to a virtual machine may never join a fabric, and needs none
		return is(v.Fabric != FabricNotReported, v.Fabric == FabricStarting && (h.JoinedFabric || !h.onlyGPU))
	case ReasonFabric:
		return is(v.Fabric > FabricStarting, v.Fabric >= FabricUnhealthy)
	case ReasonFabricLimits:
		return is(v.Fabric > FabricStarting, v.Fabric == FabricLimited)
	case ReasonNVLinksDown:
		return is(v.LinksUp.OK, v.LinksUp.Value < h.MaxNVLinks)
	case ReasonThermal:
		return h.exceeded.thermal
	case ReasonPowerBrake:
		return h.exceeded.brake
	case ReasonReplays:
		return h.exceeded.replays
	case ReasonPCIeWidth: // an idle link uses fewer lanes to save power
		return is(v.Busy && v.PCIeWidth > 0 && v.PCIeMaxWidth > 0, v.PCIeWidth < v.PCIeMaxWidth)
	default:
		return NotReported
	}
}

// levelCleared reports whether the latest sample shows that the state which clears an XID is gone.
func (h *GPUHistory) levelCleared(l xid.Level) bool {
	switch l {
	case xid.LevelMemoryRepair:
		return max(h.Sample.RemapPending, h.Sample.BankRemapPending, h.Sample.RetirementPending) == No // none that the GPU supports is pending
	case xid.LevelResourceRepair:
		return h.Sample.RepairPending == No
	case xid.LevelLinks:
		return h.level(ReasonNVLinksDown) == No
	default:
		return false
	}
}

// check applies the sample of a health check.
func (b *ledgerBuilder) check(id gpu.DeviceID, v Sample) {
	history := b.history(id)
	old := history.Sample
	if history.wasReset(v, b.now) {
		history.recordReset(b.now)
	}
	if v.RecoveryAction != RecoveryUnknown {
		history.LoggedAction = RecoveryUnknown
	}
	history.Sample, history.responding = v, true
	history.lostSince, history.reloading, history.driverAbsent = time.Time{}, false, false
	history.onlyGPU, history.JoinedFabric = len(b.histories) == 1, history.JoinedFabric || v.Fabric > FabricStarting
	history.countNVLinks(old.LinksUp, v.LinksUp)
	history.updateWindow(b.now)
	at := gpu.WholeGPU(id)
	b.remove(id, func(c Condition) bool { return c.At == at && c.Reason == ReasonProbe && c.State == Healthy })
	unchecked := history.checked.IsZero() || b.find(Condition{At: at, Reason: ReasonUnchecked}) != nil
	if b.countCleanCheck(id, !v.Partial); v.Partial {
		history.completeChecks = 0
	} else {
		history.completeChecks, history.checked = min(history.completeChecks+1, b.policy.CleanChecks), b.now
	}
	if b.policy.Mode == ModeOff {
		b.endUnchecked(at, v)
		return
	}
	if old.Uncorrectable.OK && v.Uncorrectable.Value > old.Uncorrectable.Value && !history.faultWithin(b.now, time.Minute) {
		b.recordEvent(Condition{At: at, Reason: ReasonECC}).State = b.policy.state(xid.Degrades)
	}
	for r := range Reason(len(meanings)) {
		b.applyLevel(at, r, history)
	}
	if !unchecked || !b.withholdUnconfirmed(at) {
		b.endUnchecked(at, v)
	}
}

// countNVLinks raises the maximum of NVLinks by two counts, one after the other: one that is too high may be wrong.
func (h *GPUHistory) countNVLinks(old, now gpu.OptionalUint64) {
	switch {
	case h.MaxNVLinks == 0 && now.OK:
		h.MaxNVLinks = now.Value
	case old.OK && now.OK:
		h.MaxNVLinks = max(h.MaxNVLinks, min(old.Value, now.Value))
	}
}

// endUnchecked records that a check of a GPU was complete.
func (b *ledgerBuilder) endUnchecked(at gpu.Placement, v Sample) {
	if !v.Partial {
		b.remove(at.GPU, func(c Condition) bool { return c.At == at && c.Reason == ReasonUnchecked })
	}
}

// withholdUnconfirmed reports whether the first check of a GPU since the driver was available shows a state that makes it unhealthy
// if the next checks show it too, and makes its health unknown until then. A GPU that was healthy stays so, because one reading may
// be wrong; of this one nothing is known, and after maintenance or a start such a state is more likely to be real.
func (b *ledgerBuilder) withholdUnconfirmed(at gpu.Placement) bool {
	for _, c := range b.conditions[at.GPU] {
		if c.At == at && c.State == Healthy && c.IgnoredUntil.IsZero() && b.levelState(c.Reason) >= Unhealthy {
			b.setLevel(Condition{At: at, Reason: ReasonUnchecked, State: Unknown, Detail: c.health().cause() + ", not confirmed"}, 1)
			return true
		}
	}
	return false
}

// levelState returns the health state that a persistent state results in; Healthy for a reason that is none.
func (b *ledgerBuilder) levelState(r Reason) State {
	if s := r.meaning().state; s != Degraded {
		return s
	}
	return b.policy.state(xid.Degrades)
}

// countCleanCheck counts consecutive complete checks for conditions whose evidence holds. An incomplete check
// starts the count again.
func (b *ledgerBuilder) countCleanCheck(id gpu.DeviceID, complete bool) {
	of := b.conditions[id]
	for i := range of {
		switch c := &of[i]; {
		case c.ClearingSince.IsZero():
		case complete:
			c.CleanChecks++
		default:
			c.CleanChecks = 0
		}
	}
}

// applyLevel records or removes the condition of one persistent state. A condition without effect, or one that
// only waits, is removed as soon as the state is gone.
func (b *ledgerBuilder) applyLevel(at gpu.Placement, r Reason, history *GPUHistory) {
	c := Condition{At: at, Reason: r, State: b.levelState(r)}
	checks := max(r.meaning().checks, 1)
	switch r {
	case ReasonRecoveryAction:
		action := history.recoveryAction()
		c.Code, c.Detail = uint64(action), action.String()
		if history.Sample.RecoveryAction == RecoveryUnknown {
			c.Detail += " (kernel log)"
		}
		if action == RecoveryDrainP2P || action == RecoveryIMEX {
			checks = 2
		}
	case ReasonRemapPending:
		if v := history.Sample; v.BankRemapPending == Yes && v.RemapPending != Yes {
			c.Detail = "memory bank"
		}
	case ReasonFabric:
		if history.Sample.Fabric == FabricMisconfigured {
			c.Detail = "incorrect configuration"
		}
	default:
	}
	switch history.level(r) {
	case Yes:
		b.setLevel(c, checks)
	case No:
		b.remove(at.GPU, func(o Condition) bool {
			return o.same(c) && (o.State == Healthy || o.State == Unknown || !o.IgnoredUntil.IsZero())
		})
	case NotReported: // unchanged
	}
}

// wasReset reports whether v, compared with the latest sample, shows that the GPU was reset: by one strong sign,
// or by two weak ones. A weak sign is a counter that decreased, which one counter can do for other reasons.
// Counters also decrease when the driver is loaded again, which is not a reset.
func (h *GPUHistory) wasReset(v Sample, now time.Time) bool {
	old := h.Sample
	cleared := func(before, after Tristate) bool { return before == Yes && after == No }
	wanted := old.RecoveryAction == RecoveryReset || old.RecoveryAction == RecoveryDrainAndReset || old.RecoveryAction == RecoveryReboot
	switch {
	case h.resetWhileLost(v, now),
		wanted && v.RecoveryAction == RecoveryNone,
		h.reloading && v.RecoveryAction == RecoveryNone,
		cleared(old.RemapPending, v.RemapPending), cleared(old.RetirementPending, v.RetirementPending), cleared(old.RepairPending, v.RepairPending):
		h.weakResetSigns = [3]time.Time{}
		return true
	}
	signs := 0
	for i, counter := range [3][2]gpu.OptionalUint64{{old.Energy, v.Energy}, {old.Replays, v.Replays}, {old.Uncorrectable, v.Uncorrectable}} {
		if counter[0].OK && counter[1].OK && counter[1].Value < counter[0].Value && !h.reloading && !h.driverAbsent {
			h.weakResetSigns[i] = now
		}
		if !h.weakResetSigns[i].IsZero() && now.Sub(h.weakResetSigns[i]) <= weakSignSpan {
			signs++
		}
	}
	if signs < 2 {
		return false
	}
	h.weakResetSigns = [3]time.Time{}
	return true
}

// resetWhileLost reports whether a GPU that was lost was reset before it responded again: its energy counter is less,
// or it had no such counter and was lost for long. The driver may fail to list a GPU once although nothing has happened
// to it.
func (h *GPUHistory) resetWhileLost(v Sample, now time.Time) bool {
	old := h.Sample.Energy
	switch {
	case h.lostSince.IsZero():
		return false
	case old.OK:
		return v.Energy.OK && v.Energy.Value < old.Value
	}
	return now.Sub(h.lostSince) >= lossOfReset
}

// updateWindow compares the counters at the end of each window with those at its beginning.
func (h *GPUHistory) updateWindow(now time.Time) {
	w, v := h.window, h.Sample
	if passed := now.Sub(w.since); !w.since.IsZero() && passed < windowSpan {
		return
	} else if !w.since.IsZero() {
		throttled := func(from, to gpu.OptionalUint64) Tristate {
			if !from.OK || !to.OK || to.Value < from.Value {
				return NotReported
			}
			return TristateOf(float64(to.Value-from.Value) > throttleShare*float64(passed))
		}
		h.exceeded = windowResult{thermal: throttled(w.thermal, v.ThermalSlowdown), brake: throttled(w.brake, v.PowerBrake)}
		if w.replays.OK && v.Replays.OK && v.Replays.Value >= w.replays.Value {
			perMinute := float64(v.Replays.Value-w.replays.Value) / passed.Minutes()
			h.exceeded.replays = TristateOf(perMinute > replayLimit(v.PCIeGen, v.PCIeMaxWidth))
		}
	}
	h.window = window{now, v.ThermalSlowdown, v.PowerBrake, v.Replays}
}

// replayLimit returns the number of PCIe replays per minute that a sound link may have. The allowed bit error
// ratio is 1 in 10^12 (PCI Express Base Specification), and each error costs a replay.
func replayLimit(gen, width int) float64 {
	gigatransfers := [...]float64{0, 2.5, 5, 8, 16, 32, 64}
	if gen < 0 || gen >= len(gigatransfers) {
		return minReplayLimit
	}
	return max(minReplayLimit, gigatransfers[gen]*1e9*float64(width)*60*1e-12)
}

// WithoutKernelLog is what an agent that does not read the kernel log does not see.
const WithoutKernelLog = "XIDs that NVML does not report, such as 62, 79, 119 and 120, are missed"

// RecoveryActionBranch is the first driver that reports a recovery action.
const RecoveryActionBranch = 565

// DriverLimits is what the driver's version reports of no GPU; "" = nothing is missing, or the version is unknown.
func (l Ledger) DriverLimits() string {
	if !ReportsRecoveryAction(l.driver) {
		return fmt.Sprintf("driver %s reports no recovery action, which drivers from %d on do", l.driver, RecoveryActionBranch)
	}
	return ""
}

// ReportsRecoveryAction reports whether a driver of that version reports a recovery action; also if the version is not known.
func ReportsRecoveryAction(version string) bool {
	b := gpu.Branch(version)
	return b == 0 || b >= RecoveryActionBranch
}

// limits returns what can't be monitored on a GPU or MIG instance, apart from what the driver reports of none.
func (l Ledger) limits(v Sample, at gpu.Placement) string {
	if v == (Sample{}) {
		return "" // not checked yet
	}
	var limits []string
	if v.Events == No {
		limits = append(limits, "no XID events")
	}
	if v.RecoveryAction == RecoveryUnknown && l.DriverLimits() == "" {
		limits = append(limits, "recovery action not reported")
	}
	if at.GI != gpu.Whole && v.RemapPending == NotReported {
		limits = append(limits, "row remapping not visible under MIG")
	}
	return strings.Join(limits, ", ")
}
