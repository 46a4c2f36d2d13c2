package kube

import (
	"hash/maphash"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// settle is how long it takes until the server's counts of a node have the GPUs that its agent reports as faulty: the kubelet writes them every 10 s.
const settle = 30 * time.Second

// report is what is known of the faults of a node.
type report struct {
	text   uint64    // hash of the annotation
	at     time.Time // when the latest renewal came; zero = none has come since this program began to watch
	faults []rescue.Fault
	err    error // why the annotation can't be used
	more   bool  // the agent has more faults than the annotation has place for
	silent bool  // there is no annotation
	grew   time.Time
}

var seed = maphash.MakeSeed()

// next returns the report after an annotation was read. A change counts as a renewal only if the watch was up to date: what is received after an
// interruption may have been written long before.
func (r report) next(text string, now time.Time, current bool) report {
	n := report{text: maphash.String(seed, text), at: r.at, grew: r.grew}
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
		n.err, n.grew = err, now
		return n
	}
	n.more = parsed.More > 0
	for _, f := range parsed.Faults {
		n.faults = append(n.faults, faultOf(f))
	}
	if slices.ContainsFunc(n.faults, func(f rescue.Fault) bool { return !r.has(f) }) {
		n.grew = now
	}
	return n
}

func faultOf(f faultreport.Fault) rescue.Fault {
	return rescue.Fault{
		At: f.Placement(), State: f.State, Repair: f.Repair, Cause: f.Cause, Since: f.Since, Simulated: f.Simulated, Advisory: f.Advisory,
		Unconfirmed: f.Unconfirmed, Holders: f.Holders, HoldersKnown: f.HoldersKnown,
	}
}

// has reports whether a fault of the same hardware, that takes it from new work, was reported before.
func (r report) has(f rescue.Fault) bool {
	return slices.ContainsFunc(r.faults, func(old rescue.Fault) bool { return old.At == f.At && (withdraws(old) || !withdraws(f)) })
}

// withdraws reports whether the GPU of a fault takes no new work.
func withdraws(f rescue.Fault) bool { return f.State >= health.Unhealthy && !f.Advisory }

// reportedAt is when the agent last said what the report has. One without faults is not renewed, and says that all of them have ended.
func (r report) reportedAt(now time.Time) time.Time {
	if r.err == nil && !r.silent && len(r.faults) == 0 && !r.more {
		return now
	}
	if r.err != nil {
		return time.Time{}
	}
	return r.at
}

// counted reports whether the server's counts of free devices can be used.
func (r report) counted(now time.Time) bool {
	return r.err == nil && !r.more && (r.grew.IsZero() || now.Sub(r.grew) >= settle)
}

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
