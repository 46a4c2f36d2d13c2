package inventory

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// CheckMode configures what a reservation does if Check finds something.
type CheckMode string

// The modes of the check.
const (
	CheckOff    CheckMode = "off"    // nothing is checked, and processes are not read
	CheckWarn   CheckMode = "warn"   // the finding is logged
	CheckRefuse CheckMode = "refuse" // the reservation fails
)

// Enabled reports whether reservations are checked.
func (m CheckMode) Enabled() bool { return m == CheckWarn || m == CheckRefuse }

// Finding is why new work on a healthy device may fail, as of the latest health check.
type Finding struct {
	Device    gpu.Device
	Failed    bool          // the device did not answer
	Failure   string        // the driver call; may be empty
	Processes []gpu.Process // with memory of the device, by PID, although it is free for new work
}

// Reason returns the finding without the device, as one line: "memory in use by processes without a reservation: pid 2114 (512 MiB)".
func (f Finding) Reason() string {
	var reasons []string
	if f.Failed {
		text := "last health check not answered"
		if f.Failure != "" {
			text += " (" + f.Failure + ")"
		}
		reasons = append(reasons, text)
	}
	if len(f.Processes) > 0 {
		var texts []string
		for _, p := range f.Processes {
			texts = append(texts, p.String())
		}
		reasons = append(reasons, "memory in use by processes without a reservation: "+ProcessList(texts))
	}
	return strings.Join(reasons, "; ")
}

// ProcessList joins the texts of processes, at most eight: the kubelet puts an error into the pod's status.
func ProcessList(texts []string) string {
	const most = 8
	if more := len(texts) - most; more > 0 {
		texts = append(texts[:most:most], fmt.Sprintf("%d more", more))
	}
	return strings.Join(texts, ", ")
}

// CheckError refuses a reservation because of findings.
type CheckError struct{ Findings []Finding }

// Error lists the findings.
func (e *CheckError) Error() string {
	texts := make([]string, len(e.Findings))
	for i, f := range e.Findings {
		texts[i] = string(f.Device.ID) + ": " + f.Reason()
	}
	return "reservation check: " + strings.Join(texts, "; ")
}

// Check returns a finding for each device of a plan's units that did not answer its latest health check, or whose memory is in use
// by processes without a reservation, in the order of the units. What is not known is no finding.
//
// An orchestrator reserves an exclusive device only when no other workload has it, so each process with memory of it is one
// without a reservation, unless it has ended since that health check: running reports whether a process still exists. The
// workloads of a shared device are not known, so its processes are not checked.
func Check(l health.Ledger, units []Unit, running func(gpu.Process) bool) []Finding {
	var findings []Finding
	for i := range units {
		u := &units[i]
		if i > 0 && u.Device.ID == units[i-1].Device.ID { // another replica
			continue
		}
		last := l.LastCheck(u.Device.At.GPU)
		f := Finding{Device: u.Device, Failed: last.Failed, Failure: last.Failure}
		if u.Sharing.Mode == Exclusive {
			f.Processes = slices.DeleteFunc(last.OnDevice(u.Device.At), func(p gpu.Process) bool { return !running(p) })
		}
		if f.Failed || len(f.Processes) > 0 {
			findings = append(findings, f)
		}
	}
	return findings
}
