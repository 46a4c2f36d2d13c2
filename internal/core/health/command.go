package health

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Command selects the conditions that an operator clears or ignores.
type Command struct {
	GPU        gpu.DeviceID // a physical GPU
	Cause      string       // as returned by Condition.Cause, in any case; "" = every condition of the GPU
	VerifiedAt time.Time    // when the operator last checked the GPU; zero = now. The command fails if a fault occurred later
}

// NewerFaultError means that a fault occurred after Command.VerifiedAt. Nothing was changed.
type NewerFaultError struct{ Conditions []Condition }

// Error lists the newer faults with their times.
func (e *NewerFaultError) Error() string {
	texts := make([]string, len(e.Conditions))
	for i, c := range e.Conditions {
		texts[i] = fmt.Sprintf("%s happened at %s", c.Cause(), c.Last.Format(time.RFC3339Nano))
	}
	return "newer than the verification: " + strings.Join(texts, ", ") + "; check the GPU again"
}

// NoConditionError means that the command selects no condition.
type NoConditionError struct {
	Command Command
	Causes  []string // of the conditions that the GPU has
}

// Error names the GPU, and with a cause in the command those that the GPU has.
func (e *NoConditionError) Error() string {
	if e.Command.Cause == "" {
		return fmt.Sprintf("no condition on GPU %s", e.Command.GPU)
	}
	text := fmt.Sprintf("no condition %s on GPU %s", e.Command.Cause, e.Command.GPU)
	if len(e.Causes) == 0 {
		return text + ", which has none"
	}
	return text + ", which has " + strings.Join(e.Causes, ", ")
}

// UnresponsiveError means that the GPU of the command does not respond. Its conditions can't be cleared or ignored
// until it does.
type UnresponsiveError struct{ GPU gpu.DeviceID }

// Error names the GPU.
func (e *UnresponsiveError) Error() string {
	return fmt.Sprintf("GPU %s does not respond: its conditions can't be cleared or ignored until it does", e.GPU)
}

// Clear removes the conditions that an operator has verified to be over, and returns them. A persistent state that
// is still present is ignored until it is gone. Clear fails with *NewerFaultError, *NoConditionError,
// *UnresponsiveError or *setting.Error, and then changes nothing.
func (l Ledger) Clear(p Policy, now time.Time, o Command) (Ledger, []Condition, error) {
	found, err := l.matching(now, o)
	if err != nil {
		return l, nil, err
	}
	b := l.builder(p, now)
	history := b.history(o.GPU)
	for _, c := range found {
		if c.Reason == ReasonRecoveryAction && !c.Simulated {
			history.endLoggedAction()
		}
		if history.level(c.Reason) == Yes && !c.Simulated {
			b.find(c).IgnoredUntil = IgnoredForever
			continue
		}
		b.remove(c.At.GPU, func(other Condition) bool { return other == c })
	}
	if slices.ContainsFunc(found, func(c Condition) bool { return !c.Simulated }) {
		history.UnhealthyEpisodes, history.Recoveries, history.ClearedByReset = nil, nil, nil
		history.UnhealthySince, history.SevereCause = time.Time{}, false // an operator's command is not a recovery
	}
	b.advance()
	return b.ledger(), found, nil
}

// Ignore ignores conditions until a time, or until they occur again, and returns them. It fails as Clear does.
func (l Ledger) Ignore(p Policy, now time.Time, o Command, until time.Time) (Ledger, []Condition, error) {
	if !until.After(now) {
		return l, nil, &setting.Error{Key: "until", Value: until.Format(time.RFC3339), Remedy: "want a time to come"}
	}
	found, err := l.matching(now, o)
	if err != nil {
		return l, nil, err
	}
	b := l.builder(p, now)
	for _, c := range found {
		b.find(c).IgnoredUntil = until.UTC()
	}
	b.advance()
	return b.ledger(), found, nil
}

// IgnoredForever is the end of the time for which Clear ignores a persistent state that is still present.
var IgnoredForever = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

// causes are those of a GPU's conditions, each once.
func (l Ledger) causes(id gpu.DeviceID) (causes []string) {
	for _, c := range l.Conditions() {
		if c.At.GPU == id && !slices.Contains(causes, c.Cause()) {
			causes = append(causes, c.Cause())
		}
	}
	return causes
}

// matching returns the conditions that a command selects.
func (l Ledger) matching(now time.Time, o Command) ([]Condition, error) {
	if o.VerifiedAt.IsZero() || o.VerifiedAt.After(now) && o.VerifiedAt.Sub(now) <= ClockTolerance {
		o.VerifiedAt = now
	}
	if o.VerifiedAt.After(now) {
		return nil, &setting.Error{Key: "verified-at", Value: o.VerifiedAt.Format(time.RFC3339), Remedy: "want a time that is not in the future"}
	}
	found := slices.DeleteFunc(l.Conditions(), func(c Condition) bool {
		return c.At.GPU != o.GPU || o.GPU == "" || o.Cause != "" && !strings.EqualFold(c.Cause(), o.Cause)
	})
	history := l.histories[o.GPU]
	notResponding := func(c Condition) bool { return c.Reason.isUnresponsive() && (history == nil || !history.responding) }
	newer := slices.DeleteFunc(slices.Clone(found), func(c Condition) bool { return !c.Last.After(o.VerifiedAt) })
	switch {
	case len(found) == 0:
		return nil, &NoConditionError{o, l.causes(o.GPU)}
	case len(newer) > 0:
		return nil, &NewerFaultError{newer}
	case slices.ContainsFunc(found, notResponding):
		return nil, &UnresponsiveError{o.GPU}
	}
	return found, nil
}
