package core

import (
	"fmt"
	"time"
)

// HealthState is the standing of a unit, from well to worst. Healthy and Degraded take new work.
type HealthState uint8

// The states of health. The zero value is Healthy.
const (
	Healthy HealthState = iota
	Degraded
	Unknown
	Unhealthy
	GPULost
)

func (s HealthState) String() string {
	return [...]string{"healthy", "degraded", "unknown", "unhealthy", "lost"}[s]
}

// Reason is the kind of cause behind a state of health.
type Reason uint8

// Reasons. The zero value goes with Healthy.
const (
	ReasonNone       Reason = iota
	ReasonXID               // the driver reported a critical XID; Code is its number
	ReasonLost              // the GPU is not reachable or not listed
	ReasonProbe             // the driver answers with an error for this GPU
	ReasonNoAnswer          // a call about this GPU does not return
	ReasonDriver            // the driver as a whole can't be asked
	ReasonRetirement        // taken out of service by intent: MIG re-layout, configuration, replacement
)

func (r Reason) String() string {
	return [...]string{"", "XID", "LOST", "PROBE", "NOT_ANSWERING", "NVML_UNAVAILABLE", "RETIRED"}[r]
}

// Health is the verdict on a unit. It is comparable and holds nothing that changes while the verdict
// stands (no ages, counts or temperatures), because each change is published to an orchestrator.
type Health struct {
	State  HealthState
	Reason Reason
	Code   uint64 // XID number
	Detail string // one line
}

// Schedulable reports whether new work may be placed.
func (h Health) Schedulable() bool { return h.State <= Degraded }

// String is the line that both orchestrators and every log show.
func (h Health) String() string {
	if h.State == Healthy {
		return "healthy"
	}
	cause := map[Reason]string{
		ReasonXID:        fmt.Sprintf("XID %d", h.Code),
		ReasonLost:       "GPU is lost",
		ReasonProbe:      "GPU answers with an error",
		ReasonNoAnswer:   "driver does not answer",
		ReasonDriver:     "driver is not usable",
		ReasonRetirement: "no longer offered",
	}[h.Reason]
	if h.Detail != "" {
		cause += " (" + h.Detail + ")"
	}
	return h.State.String() + ": " + cause
}

// HealthPolicy says what observations mean.
type HealthPolicy struct {
	Off           bool          // judge nothing but whether the driver and the GPU are there
	IgnoredXIDs   []uint64      // sorted; these never change health
	ProbeFailures int           // consecutive failed probes before a GPU is unhealthy, at least 1
	Deadline      time.Duration // after which a driver call counts as stuck; positive
}

// DefaultHealthPolicy ignores the XIDs that a faulty application causes (the same six as NVIDIA's
// k8s-device-plugin) and calls a GPU unhealthy at the second failed probe or 10 s into a stuck call.
func DefaultHealthPolicy() HealthPolicy {
	return HealthPolicy{
		IgnoredXIDs:   []uint64{13, 31, 43, 45, 68, 109},
		ProbeFailures: 2,
		Deadline:      10 * time.Second,
	}
}
