package core

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Command is an operator's word on conditions.
type Command struct {
	GPU        DeviceID  // a physical GPU
	Cause      string    // as Condition.Cause spells it; "" is every condition of the GPU
	VerifiedAt time.Time // when the operator last looked: a fault that happened later is not touched
}

// NewerFaultError refuses an order that knows nothing of a fault that happened since. Nothing was changed.
type NewerFaultError struct{ Conditions []Condition }

func (e *NewerFaultError) Error() string {
	texts := make([]string, len(e.Conditions))
	for i, c := range e.Conditions {
		texts[i] = fmt.Sprintf("%s happened at %s", c.Cause(), c.Last.Format(time.RFC3339Nano))
	}
	return "newer than the verification: " + strings.Join(texts, ", ") + "; check the GPU again"
}

// NoConditionError refuses an order about what does not stand.
type NoConditionError struct{ Command Command }

func (e *NoConditionError) Error() string {
	if e.Command.Cause == "" {
		return fmt.Sprintf("no condition stands against %s", e.Command.GPU)
	}
	return fmt.Sprintf("no condition %s stands against %s", e.Command.Cause, e.Command.GPU)
}

// UnresponsiveError refuses an order about a GPU that does not answer: it is of no use to anybody until it does.
type UnresponsiveError struct{ GPU DeviceID }

func (e *UnresponsiveError) Error() string {
	return fmt.Sprintf("%s does not answer: what it lacks is an answer and not an order", e.GPU)
}

// Clear drops conditions NewHealth an operator has verified that they are over, and returns them. A level that
// is still there is disregarded until it goes. It fails with *NewerFaultError, *NoConditionError,
// *SilentError or *ConfigError, and then changes nothing.
func (l Ledger) Clear(p HealthPolicy, now time.Time, o Command) (Ledger, []Condition, error) {
	found, err := l.matching(now, o)
	if err != nil {
		return l, nil, err
	}
	d := l.builder(p, now)
	history := d.history(o.GPU)
	for _, c := range found {
		if history.level(c.Reason) == Yes && !c.Simulated {
			d.find(c).IgnoredUntil = IgnoredForever
			continue
		}
		d.remove(func(other Condition) bool { return other == c })
	}
	if slices.ContainsFunc(found, func(c Condition) bool { return !c.Simulated }) {
		history.UnhealthyEpisodes, history.Recoveries, history.ClearedByReset = nil, nil, nil
		history.UnhealthySince, history.SevereCause = time.Time{}, false // got well by order, not by itself
	}
	d.advance()
	return d.ledger(), found, nil
}

// Ignore disregards conditions until a time, or until they happen again, and returns them. It fails as
// Clear does.
func (l Ledger) Ignore(p HealthPolicy, now time.Time, o Command, until time.Time) (Ledger, []Condition, error) {
	if !until.After(now) {
		return l, nil, &ConfigError{"until", until.Format(time.RFC3339), "want a time to come"}
	}
	found, err := l.matching(now, o)
	if err != nil {
		return l, nil, err
	}
	d := l.builder(p, now)
	for _, c := range found {
		d.find(c).IgnoredUntil = until.UTC()
	}
	d.advance()
	return d.ledger(), found, nil
}

// IgnoredForever is later than any uptime: until then a condition is ignored that was cleared while its level was there.
var IgnoredForever = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

// matching are the conditions that an order is about.
func (l Ledger) matching(now time.Time, o Command) ([]Condition, error) {
	if o.VerifiedAt.IsZero() || o.VerifiedAt.After(now) && o.VerifiedAt.Sub(now) <= ClockTolerance {
		o.VerifiedAt = now
	}
	if o.VerifiedAt.After(now) {
		return nil, &ConfigError{"verified-at", o.VerifiedAt.Format(time.RFC3339), "want a time that is not in the future"}
	}
	found := slices.DeleteFunc(l.Conditions(), func(c Condition) bool {
		return c.At.GPU != o.GPU || o.GPU == "" || o.Cause != "" && !strings.EqualFold(c.Cause(), o.Cause)
	})
	history := l.histories[o.GPU]
	silent := func(c Condition) bool { return c.Reason.isUnresponsive() && (history == nil || !history.responding) }
	newer := slices.DeleteFunc(slices.Clone(found), func(c Condition) bool { return !c.Last.After(o.VerifiedAt) })
	switch {
	case len(found) == 0:
		return nil, &NoConditionError{o}
	case len(newer) > 0:
		return nil, &NewerFaultError{newer}
	case slices.ContainsFunc(found, silent):
		return nil, &UnresponsiveError{o.GPU}
	}
	return found, nil
}
