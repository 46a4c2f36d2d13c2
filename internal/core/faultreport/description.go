package faultreport

import (
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Words before the state, as health.Health.String has them.
const (
	simulated = "simulated: "
	advisory  = "observed, not enforced: "
)

// sinceLayout is that of health.Health.String.
const (
	since       = " since "
	sinceLayout = "2006-01-02T15:04Z"
)

// Description is what programs read in Nomad's HealthDescription of a device. The text is an interface that stays: it begins with the cause, a
// space, "simulated: " and "observed, not enforced: " where that is so, the state, and a colon. What follows is for people, and may change.
//
//	XID_95 unhealthy: XID 95 uncontained memory error since 2026-11-20T10:31Z; action: drain and reset the GPU; cleared by: reset seen
//	LOST simulated: lost: GPU is lost since 2026-11-20T10:31Z
//
// A fault that only the first check after a start has shown is "UNCHECKED unknown: ". The text of a healthy device has no cause: it is empty, or
// begins with "healthy".
type Description struct {
	Cause     string // of the worst condition, as health.Condition.Cause names it; "" = healthy
	State     health.State
	Since     time.Time // to the minute; zero = the text has none
	Simulated bool      // by an operator
	Advisory  bool      // reported only: the device takes work
}

// Describe returns the description of a device with these conditions, the worst first; "" = healthy. The recovery action that the driver reports
// is left out: it comes a moment after the fault, and each change of the text makes Nomad evaluate the jobs of the node. A condition that needs
// more for its repair than the others is the worst one anyway.
func Describe(all []health.Health) string {
	if len(all) == 0 {
		return ""
	}
	same := make([]health.Health, len(all))
	for i, h := range all {
		h.RecoveryAction = health.RecoveryUnknown
		same[i] = h
	}
	text := health.Text(same)
	if cause := all[0].Cause(); cause != "" {
		return cause + " " + text
	}
	return text
}

// ParseDescription reads the output of Describe. It returns false for a text of another form, such as that of another plugin or of an agent older
// than the form.
func ParseDescription(text string) (Description, bool) {
	var d Description
	if text == "" || strings.HasPrefix(text, health.Healthy.String()) {
		return d, true
	}
	cause, rest, ok := strings.Cut(text, " ")
	if !ok || !isCause(cause) {
		return Description{}, false
	}
	d.Cause = cause
	rest, d.Simulated = strings.CutPrefix(rest, simulated)
	rest, d.Advisory = strings.CutPrefix(rest, advisory)
	state, rest, ok := strings.Cut(rest, ":")
	if !ok || d.State.UnmarshalText([]byte(state)) != nil {
		return Description{}, false
	}
	d.Since = timeIn(rest)
	return d, true
}

// isCause reports whether a word may be a cause: "EVENT_0x2000".
func isCause(word string) bool {
	for _, c := range word {
		if (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '_' && c != 'x' {
			return false
		}
	}
	return word != "" && len(word) <= maxCause
}

// timeIn returns the first time after the word "since"; zero if there is none.
func timeIn(text string) time.Time {
	for {
		_, rest, ok := strings.Cut(text, since)
		if !ok {
			return time.Time{}
		}
		if at, err := time.Parse(sinceLayout, rest[:min(len(rest), len(sinceLayout))]); err == nil {
			return at
		}
		text = rest
	}
}
