package health

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// State is the health state of a unit. The order is from best to worst. Healthy and Degraded units take new
// work.
type State uint8

// The states of health. The zero value is Healthy.
const (
	Healthy State = iota
	Degraded
	Unknown
	Unhealthy
	GPULost
)

var healthStateNames = [...]string{"healthy", "degraded", "unknown", "unhealthy", "lost"}

// String returns the name of the state: "healthy".
func (s State) String() string { return healthStateNames[s] }

// MarshalText returns the name of the state.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText parses the output of MarshalText.
func (s *State) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(s, healthStateNames[:], string(text), "health state")
}

// Health is the health of a unit: its worst condition. It is comparable, and it contains nothing that changes
// while the condition lasts (no ages, counts or temperatures), because each change is published to an
// orchestrator.
type Health struct {
	State          State
	Reason         Reason
	Code           uint64         // XID, NVML event type or recovery action
	Detail         string         // the observation, one line
	Since          time.Time      // UTC
	RecoveryAction RecoveryAction // that the driver reports; RecoveryUnknown = none reported
	Action         string         // what an operator should do
	Clears         string         // the evidence that clears the condition
	Limitations    string         // what can't be monitored on this GPU: "no XID events"
	MissingNodes   string         // device nodes that are missing on the node: "/dev/nvidia-uvm: run nvidia-modprobe -c0 -u"
	Simulated      bool           // the condition was simulated by an operator
	Advisory       bool           // reported only: the unit takes work in any state (ModeObserve)
}

// Schedulable reports whether the unit takes new work.
func (h Health) Schedulable() bool { return h.State <= Degraded || h.Advisory }

// Tolerable reports whether work that asks for it may use a unit with this condition. Not if the GPU is lost, the driver is not to be
// called, or the condition is not one of the device: the unit is withdrawn, is another agent's or another workload's, or lacks what
// containers need to start.
func (h Health) Tolerable() bool {
	return h.State < GPULost && h.Reason != ReasonMaintenance && (!h.Reason.OfUnit() || h.Reason == ReasonOccupied)
}

// SameCause reports whether two healths are of the same condition: cause and beginning are equal.
func (h Health) SameCause(o Health) bool {
	return h.Reason == o.Reason && h.Code == o.Code && h.Since.Equal(o.Since)
}

// maxHealthText is the maximum length of String in bytes: Nomad stores the text of every device in its state.
const maxHealthText = 200

// String returns the health as one line of at most 200 bytes, as both orchestrators and all logs show it:
//
//	unhealthy: XID 95 uncontained memory error since 2026-11-20T10:31Z; recovery action: GPU reset; action: drain and reset the GPU; cleared by: reset seen
func (h Health) String() string {
	text := h.State.String()
	if h.State == Healthy {
		return truncated(text+h.limits(), maxHealthText)
	}
	if h.Advisory {
		text = "observed, not enforced: " + text
	}
	if h.Simulated {
		text = "simulated: " + text
	}
	text += ": " + h.cause()
	var rest strings.Builder
	if !h.Since.IsZero() {
		rest.WriteString(" since " + h.Since.Format("2006-01-02T15:04Z"))
	}
	if h.RecoveryAction > RecoveryNone && h.Reason != ReasonRecoveryAction {
		rest.WriteString("; recovery action: " + h.RecoveryAction.String())
	}
	if h.Action != "" {
		rest.WriteString("; action: " + h.Action)
	}
	if h.Clears != "" {
		rest.WriteString("; cleared by: " + h.Clears)
	}
	rest.WriteString(h.limits())
	const head = 80 // least space for state and cause
	return truncated(truncated(text, max(maxHealthText-rest.Len(), head))+rest.String(), maxHealthText)
}

// maxOthers is the number of conditions that Text has beside the worst one.
const maxOthers = 3

// Text returns the health of a unit by each of its conditions, the worst first, as one line of at most 850 bytes: the worst as String, and
// of the others those that require an action, because what clears one need not clear another.
func Text(all []Health) string {
	if len(all) == 0 {
		return Healthy.String()
	}
	text := all[0].String()
	others := slices.DeleteFunc(slices.Clone(all[1:]), func(h Health) bool {
		return h.Action == "" || h.Reason == ReasonRecoveryAction && h.Action == all[0].Action // String has the recovery action
	})
	for _, h := range others[:min(len(others), maxOthers)] {
		h.Limitations, h.MissingNodes, h.RecoveryAction = "", "", RecoveryUnknown // in that of the worst
		text += "; also " + h.String()
	}
	if more := len(others) - maxOthers; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	return text
}

// limits returns the warnings that do not affect the state. Missing device nodes are a warning only for a unit
// that takes new work.
func (h Health) limits() (text string) {
	if h.Limitations != "" {
		text = " (health limited: " + h.Limitations + ")"
	}
	if h.MissingNodes != "" && h.Schedulable() {
		text += " (missing " + h.MissingNodes + ")"
	}
	return text
}

// cause returns the cause as text.
func (h Health) cause() string {
	text := h.Reason.meaning().text
	switch h.Reason {
	case ReasonXID:
		text = fmt.Sprintf("XID %d", h.Code)
	case ReasonEvent:
		text = fmt.Sprintf("event 0x%x", h.Code)
	case ReasonLost:
		if h.State != GPULost {
			text = "GPU was lost"
		}
	default:
	}
	switch {
	case h.Reason == ReasonRecoveryAction:
		return text + ": " + h.Detail
	case h.Detail == "":
		return text
	case h.Reason == ReasonXID || h.Reason == ReasonEvent:
		return text + " " + h.Detail
	}
	return text + " (" + h.Detail + ")"
}

// truncated shortens a text to at most n bytes, between two runes.
func truncated(text string, n int) string {
	if len(text) <= n {
		return text
	}
	const mark = "..."
	return strings.ToValidUTF8(text[:max(n-len(mark), 0)], "") + mark
}

// New returns the health of a unit with the state, action and clearing text that r has by default.
func New(r Reason, detail string) Health {
	m := r.meaning()
	return Health{State: m.state, Reason: r, Detail: detail, Action: m.action, Clears: m.clearsText}
}
