package kube

import (
	"hash/maphash"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// report is what is known of the faults of a node.
type report struct {
	text   uint64    // hash of the annotation
	at     time.Time // when the latest renewal came; zero = none has come since this program began to watch
	faults []rescue.Fault
	err    error // why the annotation can't be used
	more   bool  // the agent has more faults than the annotation has place for
	silent bool  // there is no annotation

	devices map[string]int // faultreport.Report.Devices
}

var seed = maphash.MakeSeed()

// next returns the report after an annotation was read. A change counts as a renewal only if the watch was up to date: what is received after an
// interruption may have been written long before.
func (r report) next(text string, now time.Time, current bool) report {
	n := report{text: maphash.String(seed, text), at: r.at}
	if n.text == r.text && r.text != 0 {
		return r
	}
	if current && r.text != 0 {
		n.at = now
	}
	if n.silent = text == ""; n.silent {
		n.at = time.Time{}
		return n
	}
	parsed, err := faultreport.Parse(text)
	if err != nil {
		n.err = err
		return n
	}
	n.more, n.devices = parsed.More > 0, parsed.Devices
	for _, f := range parsed.Faults {
		n.faults = append(n.faults, faultOf(f))
	}
	return n
}

func faultOf(f faultreport.Fault) rescue.Fault {
	return rescue.Fault{
		At: f.Placement(), State: f.State, Repair: f.Repair, Cause: f.Cause, Since: f.Since, Simulated: f.Simulated, Advisory: f.Advisory,
		Unconfirmed: f.Unconfirmed, Holders: f.Holders, HoldersKnown: f.HoldersKnown,
	}
}

// reportedAt is when the agent last confirmed what the report has. One without faults is not renewed, and means that all of them have ended.
func (r report) reportedAt(now time.Time) time.Time {
	if r.err == nil && !r.silent && len(r.faults) == 0 && !r.more {
		return now
	}
	if r.err != nil {
		return time.Time{}
	}
	return r.at
}

// allocatable returns how many of the devices that the server counts for a resource take work. The count may be of before a fault; the agent's
// word of that has come with the fault.
func (r report) allocatable(resource string, counted int) int {
	if r.silent {
		return counted
	}
	return min(counted, r.devices[resource])
}

// whole reports whether all faults of the node are known.
func (r report) whole() bool { return r.err == nil && !r.more }

// reports are those of all nodes, by node.
type reports map[string]report

// see takes the annotations of the nodes that are there now.
func (all reports) see(nodes []*node, now time.Time, current bool) {
	there := make(map[string]bool, len(nodes))
	for _, n := range nodes {
		there[n.name] = true
		all[n.name] = all[n.name].next(n.report, now, current)
	}
	for name := range all {
		if !there[name] {
			delete(all, name)
		}
	}
}

// faultyDevice is hardware with a fault, as a device that work may hold.
func faultyDevice(f *rescue.Fault) rescue.Device {
	id := f.At.GPU
	if f.At.GI != gpu.Whole {
		id = gpu.DeviceID(f.At.String())
	}
	return rescue.Device{ID: id, At: f.At}
}
