package proof

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Policy is when GPUs are proved. The zero value is off.
type Policy struct {
	Command    []string // program and arguments, without a shell; nil = off
	Timeout    time.Duration
	At         []Reason      // for which a GPU is proved
	Every      time.Duration // for the reason idle: the last verdict of a GPU is not older
	IdleFor    time.Duration // how long a GPU that takes work was free before
	MaxPerNode int           // proofs at a time
	Windows    []Window      // for the reason idle; nil = any time

	OnFail   health.State // of a GPU that failed: health.Unhealthy or health.Degraded
	Withhold bool         // a GPU takes no work after a boot until it has passed
}

// Default is the policy of an operator who has set only the command.
func Default() Policy {
	return Policy{
		Timeout: time.Minute, At: Reasons(), Every: 7 * day, IdleFor: 10 * time.Minute, MaxPerNode: 1, OnFail: health.Unhealthy,
	}
}

// On reports whether GPUs are proved at all.
func (p Policy) On() bool { return len(p.Command) > 0 }

// Check returns all settings that are invalid. Their keys are those of the section prove.
func (p Policy) Check() error {
	var all []error
	bad := func(key, value, remedy string) {
		all = append(all, &setting.Error{Key: key, Value: value, Remedy: remedy})
	}
	lasts := func(key string, value, least, most time.Duration) {
		if value < least || value > most {
			bad(key, value.String(), fmt.Sprintf("a time from %v to %v", least, most))
		}
	}
	if len(p.Command) == 0 || p.Command[0] == "" || p.Command[0][0] != '/' {
		bad("command", fmt.Sprint(p.Command), "the absolute path of a program and its arguments, such as [/usr/local/bin/check-gpu, --quick]")
	}
	if len(p.At) == 0 {
		bad("at", "[]", "one reason at least")
	}
	if p.OnFail != health.Unhealthy && p.OnFail != health.Degraded {
		bad("onFail", p.OnFail.String(), "unhealthy or degraded")
	}
	for _, w := range p.Windows {
		if w.From < 0 || w.From >= day || w.To < 0 || w.To > day || w.From == w.To {
			bad("windows", w.String(), "windows that begin at 00:00 to 23:59, and do not end when they begin")
		}
	}
	if p.MaxPerNode < 1 || p.MaxPerNode > 64 {
		bad("maxPerNode", strconv.Itoa(p.MaxPerNode), "a number from 1 to 64")
	}
	lasts("timeout", p.Timeout, time.Second, 15*time.Minute)
	lasts("every", p.Every, time.Hour, 366*day)
	lasts("idleFor", p.IdleFor, leastIdle, 7*day)
	return errors.Join(all...)
}

// asks reports whether a GPU is proved for a reason.
func (p Policy) asks(r Reason) bool { return slices.Contains(p.At, r) }

// holdsBack reports whether a GPU that is to be proved for a reason takes no work until it is.
func (p Policy) holdsBack(r Reason) bool {
	return r == Reset || r == Recovery || r == Boot && p.Withhold
}

// Times that are no settings.
const (
	day = 24 * time.Hour

	// SettleTime is for how long a GPU looks free before a proof begins. That no work has had it for 30 s, by complete records, is what taking it waits
	// for (TakeWithin): so two waits do not follow each other.
	SettleTime = 2 * time.Second

	// TakeWithin is how long a proof that has begun waits until no API gives its GPU out. It takes more than the settle
	// time of the ownership (30 s) and the time in which mps-daemon ends an MPS control daemon.
	TakeWithin = 75 * time.Second

	// EndsWithin is beyond Policy.Timeout: no GPU is kept for longer.
	EndsWithin = 10 * time.Second

	leastIdle   = 30 * time.Second // of Policy.IdleFor
	mostApart   = time.Hour        // between two proofs of a node for the reason idle: GPUs that are all due do not follow each other
	mostInDay   = 2                // proofs of one GPU after a fault: from the next one on a person decides
	afterCancel = time.Hour        // in which a GPU whose proof an operator ended is not proved again
)

// backOff is the time after which a check that could not run is tried again: the first time, the second, and from then on.
var backOff = [...]time.Duration{time.Hour, 6 * time.Hour, day}

// Reason is why a GPU is proved.
type Reason uint8

// The reasons, in the order in which GPUs are proved.
const (
	Reset    Reason = iota // the GPU was reset since its last verdict
	Recovery               // it was unhealthy since its last verdict, and is not any more
	Boot                   // the node was booted since its last verdict
	Idle                   // its last verdict is old
)

var reasonNames = [...]string{"reset", "recovery", "boot", "idle"}

// Reasons are all reasons.
func Reasons() []Reason { return []Reason{Boot, Reset, Recovery, Idle} }

// String returns the name of the reason.
func (r Reason) String() string { return reasonNames[r] }

// MarshalText returns the name of the reason.
func (r Reason) MarshalText() ([]byte, error) { return gpu.MarshalName(r, reasonNames[:], "reason") }

// UnmarshalText parses the output of MarshalText.
func (r *Reason) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(r, reasonNames[:], string(text), "reason")
}

// Outcome is how a proof ended.
type Outcome uint8

// The outcomes. The zero value is no result.
const (
	Cancelled Outcome = iota // it did not begin, or was ended before its result
	Passed
	Failed
	NotRun // the check could not run: no evidence about the GPU
)

var outcomeNames = [...]string{"cancelled", "passed", "failed", "could not run"}

// String returns the name of the outcome.
func (o Outcome) String() string { return outcomeNames[o] }
