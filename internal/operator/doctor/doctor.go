// Package doctor finds out why a node offers no GPU, or fewer than expected. It reads files of the node, asks the driver once and the
// running agent, and changes nothing. What it reads (Facts) and what it concludes (pure functions of Facts) are separate; each
// reading has a deadline of its own, because a driver, a disk or a socket may hang.
//
// Most checks form a chain: GPUs on the PCI bus, library, kernel module, device nodes, driver, devices. Only the first link that is
// broken is a problem; those behind it are skipped, because they fail for the same reason.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Severity is how much a finding matters.
type Severity string

// The severities, from the least to the most.
const (
	OK      Severity = "ok"
	Skipped Severity = "skipped" // not checked, because of a problem before it
	Note    Severity = "note"    // intended, unknown, or not visible from here
	Warning Severity = "warning" // works, and may fail later or for some workloads
	Problem Severity = "problem" // devices are missing or take no work, or containers do not get them
)

// rank orders severities: the most important is 0.
func (s Severity) rank() int { return slices.Index([]Severity{Problem, Warning, Note, Skipped, OK}, s) }

// Finding is the result of a check. Its JSON is an interface for scripts: keys are added, never changed.
type Finding struct {
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	Place    string   `json:"lookedAt"` // what was looked at: paths, a process, a setting
	Found    string   `json:"found"`
	Remedy   string   `json:"remedy,omitempty"` // what to do; "" = nothing
}

// Check is a check of one orchestrator. Look may take as long as ctx lasts, and is abandoned then.
type Check struct {
	Name  string
	Place string // for the finding that Look did not return in time

	Decides problem.Code // a problem of the agent that is not repeated if the check has found one; "" = none

	Look func(ctx context.Context, f *Facts) []Finding
}

// Options are what is looked at.
type Options struct {
	Program  string // "k8s-gpu", "nomad-gpu": for commands in remedies
	Roots    core.Roots
	HostRoot string // root of the host's file system, as this process sees it; "" = "/"

	StateDir          string // "" = none
	KernelLog         string // path; "" = it is not read
	KernelLogOptional bool
	CDI               func() []cdi.File // lists the CDI specifications; nil = not looked at
	Config            error             // problems of the configuration; nil = none

	// Agent returns the report of the running agent: an error that wraps control.ErrNotRunning if none runs.
	Agent func(context.Context) (report.Report, error)
	// Driver reads the driver once and returns what an agent would offer. Not called while the agent has released the driver.
	Driver func(context.Context) report.Report

	Prove         proof.Policy      // of GPUs; the zero value = none is proved
	ProofSettings []problem.Problem // settings because of which none is proved nevertheless

	Reset         reset.Policy      // of GPUs; the zero value = none is reset but by a person
	ResetSettings []problem.Problem // settings because of which none is reset nevertheless
	Resetter      gpureset.Resetter // what resets them; nil = not looked at
	ResetPause    reset.Pause       // the programs that watch GPUs, and are stopped for a reset

	Limits        inventory.LimitMode         // of device memory: the strongest of the policy's rules; LimitNone = they have none
	LimitSettings []problem.Problem           // settings because of which it is not known whether limits hold
	LimitSetter   func(context.Context) error // asks what sets limits whether it can; nil = not looked at
	Hook          string                      // path of NVIDIA's CDI hook program on the host; "" = where the container toolkit has it

	Checks []Check       // of the orchestrator
	Limit  time.Duration // of each reading; 0 = 10 s

	system system // nil = the operating system; for tests
}

const defaultLimit = 10 * time.Second

// kubernetes reports whether the program is that for Kubernetes; else it is that for Nomad.
func (o Options) kubernetes() bool { return strings.HasPrefix(o.Program, "k8s") }

func (o Options) host(path string) string { return beneath(o.HostRoot, path) }

// Run runs all checks. It returns after about twice Limit at the latest, whatever hangs. The findings are in the order in which
// they should be read: problems first.
func Run(ctx context.Context, o Options) []Finding {
	o.Limit = cmp.Or(o.Limit, defaultLimit)
	if o.system == nil {
		o.system = operatingSystem{}
	}
	f := gather(ctx, &o)
	checked := []Finding{}
	for i, found := range concurrently(ctx, o.Limit, o.Checks, func(ctx context.Context, c Check) []Finding { return c.Look(ctx, f) }) {
		c := o.Checks[i]
		if found == nil {
			checked = append(checked, late(c.Name, c.Place, o.Limit))
			continue
		}
		if Problems(*found) > 0 {
			f.decided = append(f.decided, c.Decides)
		}
		checked = append(checked, *found...)
	}
	return Sorted(append(decide(f), checked...))
}

// Sorted returns findings with the most important first, otherwise in their order.
func Sorted(findings []Finding) []Finding {
	return slices.SortedStableFunc(slices.Values(findings), func(a, b Finding) int {
		return cmp.Compare(a.Severity.rank(), b.Severity.rank())
	})
}

// Problems counts the findings of severity Problem.
func Problems(findings []Finding) (n int) { return count(findings, Problem) }

func count(findings []Finding, s Severity) (n int) {
	for _, f := range findings {
		if f.Severity == s {
			n++
		}
	}
	return n
}

// late is the finding that something did not return in time.
func late(check, place string, limit time.Duration) Finding {
	return Finding{
		Check: check, Severity: Problem, Place: place,
		Found:  fmt.Sprintf("no answer within %v", limit),
		Remedy: "a disk, a process or the driver hangs: look for \"blocked for more than\" and NVRM lines in dmesg",
	}
}

// concurrently calls a function for each item at once, for at most limit each. A result is nil if the call did not return in time;
// its goroutine is abandoned.
func concurrently[T, R any](ctx context.Context, limit time.Duration, items []T, call func(context.Context, T) R) []*R {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	channels := make([]chan R, len(items))
	for i, item := range items {
		result := make(chan R, 1)
		channels[i] = result
		go func() { result <- call(ctx, item) }()
	}
	expired := time.After(limit + limit/10) // a call that ends with ctx is not late
	results := make([]*R, len(items))
	for i, c := range channels {
		select {
		case r := <-c:
			results[i] = &r
		case <-expired:
			expired = closed
			select {
			case r := <-c:
				results[i] = &r
			default:
			}
		}
	}
	return results
}

// closed stands for a time that has expired.
var closed = func() <-chan time.Time { c := make(chan time.Time); close(c); return c }()

// list joins names, and shortens a long list.
func list(names []string) string {
	const most = 4
	if len(names) > most {
		return strings.Join(names[:most], ", ") + fmt.Sprintf(" and %d more", len(names)-most)
	}
	return strings.Join(names, ", ")
}
