// Package handover reports GPUs that need a repair where other programs read it: in a condition and an annotation of the agent's Node object, and
// in events of the pods that have such a GPU. It writes nothing else, and nothing at all unless an admission policy keeps it to that.
//
//	core.State -> Of -> Verdict + holders -> Handover: one patch of nodes/status, and events
//
// The condition is about the GPUs that the agent's configuration offers. It shows that one needs a repair only for faults of the hardware: unhealthy
// or lost, real and enforced, and repaired by a reset, a reboot or a replacement. While the GPUs can't be checked it is Unknown. The annotation
// (package faultreport) has all faults that are unhealthy or lost; without one there is no annotation.
package handover

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// Reasons of the condition.
const (
	reasonFault   = "GPUNeedsRepair"
	reasonNone    = "NoFault"
	reasonUnknown = "NotChecked"
)

// unconfirmedFor is for how long after the start a fault that was there at once waits for a second round of checks.
const unconfirmedFor = time.Minute

// Verdict is what a state shows of the GPUs that an agent offers.
type Verdict struct {
	Pending bool // not all is known yet: nothing is to be written
	GPUs    int  // that it is about

	Sound           kubeapi.ConditionStatus // True = no GPU needs a repair
	Reason, Message string
	Faults          []faultreport.Fault // the worst first, without holders
	Devices         map[string]int      // as faultreport.Report has them
}

// Begun is how far an agent has come since its start.
type Begun struct {
	At     time.Time
	Checks uint64 // rounds of checks of all GPUs
}

// Of returns the verdict of a state at a time. After a start it is pending until the GPUs were checked, and what only the first check shows is
// confirmed or not: another verdict would end a condition that is still true, or begin one that is not.
func Of(s core.State, mode health.Mode, now time.Time, begun Begun) Verdict {
	devices := slices.Collect(s.Inventory.Devices())
	v := Verdict{GPUs: len(devices), Sound: kubeapi.ConditionTrue, Reason: reasonNone, Message: "No GPU needs a repair."}
	young := now.Sub(begun.At) < unconfirmedFor
	var unchecked []string // causes
	maintenance := false
	for _, c := range s.Ledger.ForMode(mode).Conditions() {
		d, offered := deviceAt(devices, c.At)
		if c.State <= health.Degraded || !c.IgnoredUntil.IsZero() || !offered && c.At != gpu.Node {
			continue
		}
		if cannotCheck(c.Reason) {
			unchecked, maintenance = append(unchecked, c.Cause()), maintenance || c.Reason == health.ReasonMaintenance
		}
		if c.State >= health.Unhealthy && c.At != gpu.Node {
			v.Faults = append(v.Faults, faultOf(c, d, mode))
		}
		event := c.Reason == health.ReasonXID || c.Reason == health.ReasonEvent
		v.Pending = v.Pending || young && begun.Checks < 2 && !event && c.At != gpu.Node && !c.Since.Before(begun.At)
	}
	comes := young || s.Snapshot.Driver.State == gpu.DriverReady && len(unchecked) == 0 // the first check
	v.Pending = v.Pending || begun.Checks == 0 && comes || s.Allocatable.Provisional()
	slices.SortFunc(v.Faults, compare)
	counting := slices.DeleteFunc(slices.Clone(v.Faults), func(f faultreport.Fault) bool { return !NeedsRepair(f) })
	switch {
	case len(counting) > 0 && !maintenance:
		v.Sound, v.Reason, v.Message = kubeapi.ConditionFalse, reasonFault, messageOf(counting)
	case len(unchecked) > 0:
		slices.Sort(unchecked)
		v.Sound, v.Reason = kubeapi.ConditionUnknown, reasonUnknown
		v.Message = "The GPUs, or some of them, can't be checked: " + strings.Join(slices.Compact(unchecked), ", ") + "."
	}
	return v
}

// deviceAt returns the first device that a condition at a placement concerns.
func deviceAt(devices []inventory.Unit, at gpu.Placement) (gpu.Device, bool) {
	for i := range devices {
		if at.Overlaps(devices[i].Device.At) {
			return devices[i].Device, true
		}
	}
	return gpu.Device{}, false
}

// cannotCheck reports whether a condition for a reason means that nothing is known of the hardware.
func cannotCheck(r health.Reason) bool {
	switch r {
	case health.ReasonDriver, health.ReasonMaintenance, health.ReasonUnresponsive, health.ReasonUnchecked, health.ReasonFaultUnknown:
		return true
	default:
		return false
	}
}

func faultOf(c health.Condition, d gpu.Device, mode health.Mode) faultreport.Fault {
	f := faultreport.Fault{
		GPU: c.At.GPU, PCI: string(d.PCI), State: c.State, Repair: c.Repair(), Cause: c.Cause(), Since: c.Since.UTC(),
		Simulated: c.Simulated, Advisory: mode == health.ModeObserve,
	}
	if c.At.GI != gpu.Whole {
		f.GI = &c.At.GI
	}
	if c.At.CI != gpu.Whole {
		f.CI = &c.At.CI
	}
	return f
}

// NeedsRepair reports whether a fault makes the condition show that a GPU needs a repair.
func NeedsRepair(f faultreport.Fault) bool {
	return f.Repair != health.NoRepair && !f.Simulated && !f.Advisory && f.Cause != health.ReasonUnresponsive.String()
}

// compare is the order of faults from the worst. It does not depend on times, so that the message of the condition changes seldom.
func compare(a, b faultreport.Fault) int {
	return cmp.Or(
		cmp.Compare(b.State, a.State), cmp.Compare(b.Repair, a.Repair), gpu.ComparePlacements(a.Placement(), b.Placement()),
		cmp.Compare(a.Cause, b.Cause),
	)
}

// maxNamed is how many faults the message names.
const maxNamed = 8

var repairWords = map[health.Repair]string{
	health.Reset: "a reset", health.BusReset: "a reset of its PCIe bus", health.Reboot: "a reboot of the node", health.Replace: "diagnostics or replacement",
}

// messageOf is the message of the condition: the same for the same faults, whenever they began.
func messageOf(faults []faultreport.Fault) string {
	var parts []string
	for _, f := range faults[:min(len(faults), maxNamed)] {
		parts = append(parts, described(f))
	}
	if more := len(faults) - maxNamed; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(parts, "; ") + "."
}

// described is a fault in some words: "GPU-1 (0000:1b:00.0) needs a reset: XID_95".
func described(f faultreport.Fault) string {
	text := f.Placement().String()
	if f.PCI != "" {
		text += " (" + f.PCI + ")"
	}
	return text + " needs " + repairWords[f.Repair] + ": " + f.Cause
}
