package core

import (
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

const (
	// echoSpan is the longest time between the reports of one XID by the kernel log and by NVML.
	echoSpan = 10 * time.Second

	// relapseSpan is the time after a reset within which the same XID puts the GPU out of service.
	relapseSpan = time.Hour

	// Application faults of suspectWorkloads different workloads within workloadSpan indicate a hardware fault, as
	// in NVIDIA's workflow for XID 13 and 31.
	workloadSpan     = time.Hour
	suspectWorkloads = 3

	// unidentifiedXID is the XID that NVML reports for a fault that it can't identify.
	unidentifiedXID = 999
)

// observe applies one observation.
func (d *ledgerBuilder) observe(o Observation) {
	id := o.At.GPU
	switch o.Kind {
	case XID:
		d.recordFault(o, ReasonXID, d.policy.xid(o.Code))
	case Event:
		if rule, ok := xid.Event(o.Code); ok {
			d.recordFault(o, ReasonEvent, rule)
		}
	case Lost:
		d.interruptRecovery(o.At)
		if o.At.GI == Whole {
			d.history(id).lost = true
		}
		d.setLevel(Condition{At: o.At, Reason: ReasonLost, State: GPULost, Detail: o.Detail}, 1)
	case ProbeFailed:
		d.interruptRecovery(o.At)
		d.setLevel(Condition{At: o.At, Reason: ReasonProbe, State: Unhealthy, Detail: o.Detail}, d.policy.ProbeFailures)
	case CallPending:
		d.interruptRecovery(o.At)
	case Unresponsive:
		d.interruptRecovery(o.At)
		state := Unhealthy
		if id == "" {
			state = Unknown
		}
		d.setLevel(Condition{At: o.At, Reason: ReasonUnresponsive, State: state, Detail: o.Detail}, 1)
	case InstanceRead:
		d.remove(func(c Condition) bool { return c.At == o.At && c.Reason.isUnresponsive() })
	case Checked:
		d.check(id, o.Sample)
	case DriverRebound:
		d.history(id).LastReset = d.now
	case DriverUnavailable:
		d.driverLost(o)
	case DriverUnloaded:
		d.markReloading()
	case DriverAvailable:
		d.driverAnswered(o)
	case Reserved:
		d.history(id).recordAllocation(o.At)
	case KernelLogRead: // State handles it
	}
}

// interruptRecovery records that a GPU did not respond: no recovery continues, and the health is unknown if no
// check completed since the agent started. A MIG instance that does not respond has no effect on its GPU.
func (d *ledgerBuilder) interruptRecovery(at Placement) {
	id := at.GPU
	if id == "" || at.GI != Whole {
		return
	}
	history := d.history(id)
	history.responding, history.completeChecks = false, 0
	if history.checked.IsZero() {
		d.setLevel(Condition{At: WholeGPU(id), Reason: ReasonUnchecked, State: Unknown}, 1)
	}
	for i := range d.conditions {
		if c := &d.conditions[i]; c.At.GPU == id {
			c.ClearingSince, c.CleanChecks = time.Time{}, 0
		}
	}
}

// driverAnswered records that the driver responds. If its version changed, it was loaded again.
func (d *ledgerBuilder) driverAnswered(o Observation) {
	if d.driver != "" && o.Detail != "" && o.Detail != d.driver {
		d.markReloading()
	}
	d.driver = o.Detail
	d.remove(func(c Condition) bool { return c.At == Node })
}

// markReloading records that the driver was, or is being, loaded again before it reports the next recovery action.
func (d *ledgerBuilder) markReloading() {
	for id := range d.histories {
		d.history(id).reloading = true
	}
}

// driverLost records that the driver can't be called. The same driver may respond later, also if its library was
// missing: that it was unloaded is the separate observation DriverUnloaded.
func (d *ledgerBuilder) driverLost(o Observation) {
	reason, other := ReasonDriver, ReasonMaintenance
	if DriverState(o.Code) == DriverReleased {
		reason, other = other, reason
	}
	d.remove(func(c Condition) bool { return c.At == Node && c.Reason == other })
	d.setLevel(Condition{At: Node, Reason: reason, State: Unknown, Detail: o.Detail}, 1)
	for id := range d.histories {
		history := d.history(id)
		history.responding, history.completeChecks, history.checked = false, 0, time.Time{}
		history.driverAbsent = history.driverAbsent || DriverState(o.Code) == DriverAbsent
	}
}

// recordFault records an XID or another NVML event.
func (d *ledgerBuilder) recordFault(o Observation, reason Reason, rule xid.Rule) {
	if d.policy.Mode == ModeOff {
		return
	}
	before := time.Time{}
	if !o.Simulated {
		history := d.history(o.At.GPU)
		if rule.Name == "" && history.countsFull(o.Code) {
			o.Code, rule = unidentifiedXID, d.policy.xid(unidentifiedXID)
		}
		if t := history.faultCount(reason, o.Code); t != nil && t.isEcho(o, d.now) {
			t.BothSources = true
			return // the other source reported this occurrence before
		}
		before = history.countFault(reason, o.Code, o.FromKernelLog, d.now)
	}
	if rule.Class == xid.Application && !o.Simulated {
		d.recordApplicationFault(o)
	}
	if rule.Effect == xid.None && rule.SettledEffect == xid.None && rule.RepeatWindow == 0 {
		return
	}
	at := o.At
	if rule.WholeGPU() {
		at = WholeGPU(at.GPU)
	}
	c := d.recordEvent(Condition{At: at, Reason: reason, Code: o.Code, Detail: detailOf(rule, o), Simulated: o.Simulated})
	c.Repeated = c.Repeated || c.Count > 1 && rule.RepeatWindow > 0 && !before.IsZero() && d.now.Sub(before) <= rule.RepeatWindow
	if c.severe(d.policy) && reason == ReasonXID {
		for _, m := range d.readHistory(at.GPU).ClearedByReset {
			if m.Code == o.Code && d.now.Sub(m.At) <= relapseSpan {
				d.requireService(at.GPU, fmt.Sprintf("XID %d again within an hour of a reset", o.Code))
			}
		}
	}
}

// detailOf returns the meaning of a fault from the table, with the text of the kernel log if there is one.
func detailOf(rule xid.Rule, o Observation) string {
	if o.Detail == "" {
		return rule.Meaning
	}
	return rule.Meaning + " (" + truncated(o.Detail, 60) + ")"
}

// recordApplicationFault records an application fault. Repeated faults of one workload do not indicate a fault of
// the GPU.
func (d *ledgerBuilder) recordApplicationFault(o Observation) {
	history := d.history(o.At.GPU)
	n := history.recordAppFault(history.workload(o.At), d.now, workloadSpan)
	if d.policy.Workloads != xid.None && n >= suspectWorkloads {
		c := d.recordEvent(Condition{
			At: WholeGPU(o.At.GPU), Reason: ReasonWorkloads, State: d.policy.state(d.policy.Workloads),
			Detail: "application faults of several workloads within an hour",
		})
		c.State = d.policy.state(d.policy.Workloads)
	}
}

// requireService takes the GPU out of service until an operator clears the condition.
func (d *ledgerBuilder) requireService(id DeviceID, why string) {
	d.setLevel(Condition{At: WholeGPU(id), Reason: ReasonService, State: Unhealthy, Detail: why}, 1)
}
