package health

import (
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// The kernel log has more of some XIDs than their number, which is all that NVML reports: the severity of a fault of
// NVLink 5, and the recovery action of XID 154.

// text returns the driver's text of a line, without a MIG instance before it; "" if the kernel log is not the source.
func (o Observation) text() string {
	if !o.FromKernelLog {
		return ""
	}
	return strings.TrimSpace(o.Detail[strings.LastIndex(o.Detail, ", ")+1:])
}

// Severity returns the severity that the kernel log names for an XID; "" if it names none.
func (o Observation) Severity() xid.Severity { return xid.SeverityOf(o.Code, o.text()) }

// recoveryAction returns the recovery action to which XID 154 is a change; RecoveryUnknown if the text does not name
// one. The driver writes "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)". The numbers are
// those of NVML. The words differ between drivers.
func (o Observation) recoveryAction() RecoveryAction {
	if o.Code != xid.RecoveryActionChanged {
		return RecoveryUnknown
	}
	change, ok := strings.CutPrefix(o.text(), "GPU recovery action changed from 0x")
	if !ok {
		return RecoveryUnknown
	}
	_, to, ok := strings.Cut(change, ") to 0x")
	if !ok {
		return RecoveryUnknown
	}
	number, _, ok := strings.Cut(to, " (")
	if !ok {
		return RecoveryUnknown
	}
	n, err := strconv.ParseUint(number, 16, 32)
	if err != nil {
		return RecoveryUnknown
	}
	return recoveryActionOf(n + uint64(RecoveryNone))
}

// recordLoggedAction records the recovery action that the kernel log names. A later reset may have ended it.
func (b *ledgerBuilder) recordLoggedAction(o Observation, seen Occurrence) {
	action := o.recoveryAction()
	if action == RecoveryUnknown {
		return
	}
	history, at := b.history(o.At.GPU), gpu.WholeGPU(o.At.GPU)
	history.LoggedAction = action
	if seen.Latest.Before(history.LastReset) {
		history.resetLoggedAction()
	}
	if history.Sample.RecoveryAction != RecoveryUnknown || history.checked.IsZero() {
		return // the next check shows whether the driver reports the action
	}
	if old := b.find(Condition{At: at, Reason: ReasonRecoveryAction}); old != nil && history.LoggedAction != RecoveryNone {
		old.Last, old.IgnoredUntil = b.now, time.Time{} // it occurred again
	}
	b.applyLevel(at, ReasonRecoveryAction, history)
}

// endLoggedAction ends the action of the kernel log.
func (h *GPUHistory) endLoggedAction() {
	if h.LoggedAction != RecoveryUnknown {
		h.LoggedAction = RecoveryNone
	}
}

// recoveryAction returns the recovery action that the driver reports, or else the one in the kernel log.
func (h *GPUHistory) recoveryAction() RecoveryAction {
	if h.Sample.RecoveryAction == RecoveryUnknown {
		return h.LoggedAction
	}
	return h.Sample.RecoveryAction
}

// recordReset records a reset.
func (h *GPUHistory) recordReset(now time.Time) {
	h.LastReset = now
	h.resetLoggedAction()
}

// resetLoggedAction records that a reset has ended the action of the kernel log, unless that is more than a reset. The
// driver finds out the action anew, and writes no line about that.
func (h *GPUHistory) resetLoggedAction() {
	if repair := h.LoggedAction.repair(); repair != Reboot && repair != BusReset {
		h.endLoggedAction()
	}
}

// refineFault records the severity that the kernel log names for a fault which another source reported before. A fault
// that was cleared since stays cleared.
func (b *ledgerBuilder) refineFault(o Observation, rule xid.Rule) {
	fault := Condition{At: gpu.WholeGPU(o.At.GPU), Reason: ReasonXID, Code: o.Code}
	c, severity := b.find(fault), o.Severity()
	if c == nil || severity == "" || c.Unnamed == 0 && severity != xid.Fatal {
		return
	}
	before := c.Severity
	c.addSeverity(severity)
	c.Unnamed = max(c.Unnamed-1-o.Repeats, 0)
	if c.Severity != before {
		c.Detail = detailOf(rule, o)
	}
	if c.rule(b.policy).IsNote() {
		b.remove(o.At.GPU, func(other Condition) bool { return other.same(fault) })
	}
}

// severity returns the worst severity of the occurrences of an XID.
func (c Condition) severity() xid.Severity {
	if c.Unnamed > 0 {
		return c.Severity.Worse("")
	}
	return c.Severity
}

// addSeverity records the severity of an occurrence of an XID.
func (c *Condition) addSeverity(s xid.Severity) {
	switch {
	case !xid.HasSeverity(c.Code):
	case s == "":
		c.Unnamed++
	case c.Count == 1 || c.Severity == "" && c.Unnamed > 0:
		c.Severity = s
	default:
		c.Severity = c.Severity.Worse(s)
	}
}
