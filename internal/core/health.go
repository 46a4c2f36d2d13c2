package core

import (
	"fmt"
	"strings"
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

var healthStateNames = [...]string{"healthy", "degraded", "unknown", "unhealthy", "lost"}

func (s HealthState) String() string { return healthStateNames[s] }

// MarshalText spells the state for files and programs.
func (s HealthState) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (s *HealthState) UnmarshalText(text []byte) error {
	return UnmarshalName(s, healthStateNames[:], string(text), "health state")
}

// Health is the verdict on a unit: its worst condition. It is comparable and holds nothing that changes
// while the verdict stands (no ages, counts or temperatures), NewHealth each change is published to an
// orchestrator.
type Health struct {
	State          HealthState
	Reason         Reason
	Code           uint64         // of an XID or another event
	Detail         string         // what was seen, one line
	Since          time.Time      // UTC
	RecoveryAction RecoveryAction // what the driver wants done, if it says
	Action         string         // what an operator should do
	Clears         string         // what makes it well again
	Limitations    string         // what can't be seen of this GPU: "no XID events"
	MissingNodes   string         // device nodes that its containers lack: "/dev/nvidia-uvm: run nvidia-modprobe -c0 -u"
	Simulated      bool           // a rehearsal
	Advisory       bool           // reported only: the unit takes work whatever its state (ModeObserve)
}

// Schedulable reports whether new work may be placed.
func (h Health) Schedulable() bool { return h.State <= Degraded || h.Advisory }

// maxHealthText bounds String, in bytes: Nomad keeps the text of every device in its state.
const maxHealthText = 200

// String is the line that both orchestrators and every log show, at most 200 bytes:
//
//	unhealthy: XID 95 uncontained memory error since 2026-11-20T10:31Z; driver asks: GPU reset; action: drain and reset the GPU; clears: reset seen
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
		rest.WriteString("; driver asks: " + h.RecoveryAction.String())
	}
	if h.Action != "" {
		rest.WriteString("; action: " + h.Action)
	}
	if h.Clears != "" {
		rest.WriteString("; clears: " + h.Clears)
	}
	rest.WriteString(h.limits())
	const head = 80 // what is wrong comes first
	return truncated(truncated(text, max(maxHealthText-rest.Len(), head))+rest.String(), maxHealthText)
}

// limits are warnings, which do not count against the unit. Missing nodes concern new work, and so only a unit that takes any.
func (h Health) limits() (text string) {
	if h.Limitations != "" {
		text = " (health limited: " + h.Limitations + ")"
	}
	if h.MissingNodes != "" && h.Schedulable() {
		text += " (missing " + h.MissingNodes + ")"
	}
	return text
}

// cause is what is wrong, in a few words.
func (h Health) cause() string {
	text := h.Reason.text()
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

// truncated cuts a text that is longer than n bytes, at a rune's end.
func truncated(text string, n int) string {
	if len(text) <= n {
		return text
	}
	const mark = "..."
	return strings.ToValidUTF8(text[:max(n-len(mark), 0)], "") + mark
}

// NewHealth is the health of a unit that the host lacks something for.
func NewHealth(r Reason, detail string) Health {
	m := r.meaning()
	return Health{State: m.state, Reason: r, Detail: detail, Action: m.action, Clears: m.clearsText}
}
