package core

import (
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

const (
	// echo is how far apart the kernel log and NVML may tell of one XID.
	echo = 10 * time.Second

	// relapse is how soon the same XID again, after a reset, calls for an operator.
	relapse = time.Hour

	// workloadSpan and suspectWorkloads: so many different workloads with application faults within it
	// point to the GPU, as NVIDIA's workflow for XID 13 and 31 has it.
	workloadSpan     = time.Hour
	suspectWorkloads = 3

	// unidentified is the XID of a fault that NVML can't identify.
	unidentified = 999
)

// observe folds one observation.
func (d *draft) observe(o Observation) {
	gpu := o.At.GPU
	switch o.Kind {
	case XID:
		d.fault(o, ReasonXID, d.policy.xid(o.Code))
	case Event:
		if rule, ok := xid.Event(o.Code); ok {
			d.fault(o, ReasonEvent, rule)
		}
	case Lost:
		d.interrupt(o.At)
		if o.At.GI == Whole {
			d.chart(gpu).lost = true
		}
		d.stands(Condition{At: o.At, Reason: ReasonLost, State: GPULost, Detail: o.Detail}, 1)
	case ProbeFailed:
		d.interrupt(o.At)
		d.stands(Condition{At: o.At, Reason: ReasonProbe, State: Unhealthy, Detail: o.Detail}, d.policy.ProbeFailures)
	case CallPending:
		d.interrupt(o.At)
	case Unresponsive:
		d.interrupt(o.At)
		state := Unhealthy
		if gpu == "" {
			state = Unknown
		}
		d.stands(Condition{At: o.At, Reason: ReasonUnresponsive, State: state, Detail: o.Detail}, 1)
	case InstanceRead:
		d.drop(func(c Condition) bool { return c.At == o.At && c.Reason.silence() })
	case Checked:
		d.check(gpu, o.Sample)
	case DriverRebound:
		d.chart(gpu).LastReset = d.now
	case DriverUnavailable:
		d.driverLost(o)
	case DriverUnloaded:
		d.reload()
	case DriverAvailable:
		d.driverAnswered(o)
	case Reserved:
		d.chart(gpu).hand(o.At)
	case KernelLogRead: // State has taken it in
	}
}

// interrupt enters that the GPU did not answer: no recovery goes on, and one that has never been checked
// since the agent started is not known to be well. A MIG instance speaks for itself only.
func (d *draft) interrupt(at Placement) {
	gpu := at.GPU
	if gpu == "" || at.GI != Whole {
		return
	}
	chart := d.chart(gpu)
	chart.answers, chart.row = false, 0
	if chart.checked.IsZero() {
		d.stands(Condition{At: WholeGPU(gpu), Reason: ReasonUnchecked, State: Unknown}, 1)
	}
	for i := range d.conditions {
		if c := &d.conditions[i]; c.At.GPU == gpu {
			c.ClearingSince, c.CleanChecks = time.Time{}, 0
		}
	}
}

// driverAnswered enters that the driver can be asked. One of another version has been loaded since.
func (d *draft) driverAnswered(o Observation) {
	if d.driver != "" && o.Detail != "" && o.Detail != d.driver {
		d.reload()
	}
	d.driver = o.Detail
	d.drop(func(c Condition) bool { return c.At == Node })
}

// reload enters that the driver is loaded anew before it gives its next verdict, or was.
func (d *draft) reload() {
	for gpu := range d.charts {
		d.chart(gpu).reloading = true
	}
}

// driverLost enters that nobody can be asked. The driver may be the same when it answers again, also where its library
// was missing: that it was unloaded is an observation of its own.
func (d *draft) driverLost(o Observation) {
	reason, other := ReasonDriver, ReasonMaintenance
	if DriverState(o.Code) == DriverReleased {
		reason, other = other, reason
	}
	d.drop(func(c Condition) bool { return c.At == Node && c.Reason == other })
	d.stands(Condition{At: Node, Reason: reason, State: Unknown, Detail: o.Detail}, 1)
	for gpu := range d.charts {
		chart := d.chart(gpu)
		chart.answers, chart.row, chart.checked = false, 0, time.Time{}
		chart.absent = chart.absent || DriverState(o.Code) == DriverAbsent
	}
}

// fault enters an XID or another event.
func (d *draft) fault(o Observation, reason Reason, rule xid.Rule) {
	if d.policy.Mode == ModeOff {
		return
	}
	before := time.Time{}
	if !o.Simulated {
		chart := d.chart(o.At.GPU)
		if rule.Name == "" && chart.crowded(o.Code) {
			o.Code, rule = unidentified, d.policy.xid(unidentified)
		}
		if t := chart.tallied(reason, o.Code); t != nil && t.echoed(o, d.now) {
			t.BothSources = true
			return // the other source has told already
		}
		before = chart.tally(reason, o.Code, o.FromKernelLog, d.now)
	}
	if rule.Class == xid.Application && !o.Simulated {
		d.workload(o)
	}
	if rule.Effect == xid.None && rule.SettledEffect == xid.None && rule.RepeatWindow == 0 {
		return
	}
	at := o.At
	if rule.WholeGPU() {
		at = WholeGPU(at.GPU)
	}
	c := d.happened(Condition{At: at, Reason: reason, Code: o.Code, Detail: detailOf(rule, o), Simulated: o.Simulated})
	c.Repeated = c.Repeated || c.Count > 1 && rule.RepeatWindow > 0 && !before.IsZero() && d.now.Sub(before) <= rule.RepeatWindow
	if c.severe(d.policy) && reason == ReasonXID {
		for _, m := range d.read(at.GPU).ClearedByReset {
			if m.Code == o.Code && d.now.Sub(m.At) <= relapse {
				d.latch(at.GPU, fmt.Sprintf("XID %d again within an hour of a reset", o.Code))
			}
		}
	}
}

// detailOf is what the table calls the fault, with the kernel's own words where only it told.
func detailOf(rule xid.Rule, o Observation) string {
	if o.Detail == "" {
		return rule.Meaning
	}
	return rule.Meaning + " (" + shortened(o.Detail, 60) + ")"
}

// workload enters an application fault. One workload that fails over and over says nothing about the GPU.
func (d *draft) workload(o Observation) {
	chart := d.chart(o.At.GPU)
	n := chart.failed(chart.workload(o.At), d.now, workloadSpan)
	if d.policy.Workloads != xid.None && n >= suspectWorkloads {
		c := d.happened(Condition{
			At: WholeGPU(o.At.GPU), Reason: ReasonWorkloads, State: d.policy.state(d.policy.Workloads),
			Detail: "application faults of several workloads within an hour",
		})
		c.State = d.policy.state(d.policy.Workloads)
	}
}

// latch takes the GPU out of service until an operator has looked.
func (d *draft) latch(gpu DeviceID, why string) {
	d.stands(Condition{At: WholeGPU(gpu), Reason: ReasonService, State: Unhealthy, Detail: why}, 1)
}
