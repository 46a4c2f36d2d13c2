package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/limit"
)

// MemoryLimits is what is known of limits of device memory: those of the policy, and those that other programs have set.
type MemoryLimits struct {
	At          time.Time `json:"at"`                    // when they were read
	Backend     string    `json:"backend,omitempty"`     // the controller of control groups by which the driver limits memory: misc, dmem; missing = none
	Unsupported string    `json:"unsupported,omitempty"` // why the driver can't limit memory on this node; missing = it can
	CannotSet   string    `json:"cannotSet,omitempty"`   // why this agent can't set limits
	Foreign     bool      `json:"foreign,omitempty"`     // the policy of this agent has no limits: those that are listed are of other programs

	Shares []MemoryLimit `json:"shares"` // by work and GPU
}

// MemoryLimit is the limit of one work on one GPU.
type MemoryLimit struct {
	GPU   gpu.DeviceID `json:"gpu"`
	Index int          `json:"index"` // -1 = the GPU has none
	Work  Owner        `json:"work"`

	Pool         string  `json:"pool,omitempty"`         // missing = of no pool of the policy
	Way          string  `json:"way,omitempty"`          // how the limit comes to the control group: task, pod, hook; missing = another program has set it
	Required     bool    `json:"required,omitempty"`     // by the policy
	Begun        bool    `json:"begun,omitempty"`        // the work has, or had, processes that may use the GPU: until then a limit that is not known does not matter
	WantBytes    uint64  `json:"wantBytes,omitempty"`    // by the policy; missing = it has none
	ControlGroup string  `json:"controlGroup,omitempty"` // below the mount point; missing = it was not found
	SoftBytes    *uint64 `json:"softBytes,omitempty"`    // these three as the driver returns them; missing = they were not read
	HardBytes    *uint64 `json:"hardBytes,omitempty"`    // also missing = the group has no limit of its own
	UsedBytes    *uint64 `json:"usedBytes,omitempty"`

	State  string    `json:"state"`            // limited, late, not limited, foreign, unknown
	Reason string    `json:"reason,omitempty"` // of all states but limited
	Since  time.Time `json:"since,omitzero"`   // of the state
}

// WithMemoryLimits returns a report with what is known of limits of device memory.
func (r Report) WithMemoryLimits(t limit.Table) Report {
	all := MemoryLimits{
		At: t.At, Backend: string(t.Node.Backend), Unsupported: t.Node.Unsupported, CannotSet: t.Node.CannotSet, Foreign: t.Node.Foreign, Shares: []MemoryLimit{},
	}
	for _, s := range t.Shares {
		one := MemoryLimit{
			GPU: s.GPU, Index: r.indexOf(s.GPU), Work: Owner(s.Work), Pool: s.Pool, Way: string(s.Way), Required: s.Required, Begun: s.Begun, WantBytes: s.Want, ControlGroup: s.Group,
			State: string(s.State), Reason: s.Reason, Since: s.Since,
		}
		if s.Read {
			one.SoftBytes, one.UsedBytes = &s.Driver.Soft, &s.Driver.Used
			if s.Driver.Hard != gpu.NoMemoryLimit {
				one.HardBytes = &s.Driver.Hard
			}
		}
		all.Shares = append(all.Shares, one)
	}
	r.MemoryLimits = &all
	return r
}

// indexOf is the index of a physical GPU; -1 if no device of the report is on it.
func (r Report) indexOf(id gpu.DeviceID) int {
	for _, d := range r.Devices {
		if d.GPU == id {
			return d.Index
		}
	}
	return -1
}

func (r Report) writeMemoryLimits(w io.Writer) error {
	l := r.MemoryLimits
	if l == nil {
		return nil
	}
	fmt.Fprintf(w, "\nmemory limits: %s\n", l)
	if len(l.Shares) == 0 {
		return nil
	}
	t := NewTable(w)
	fmt.Fprintln(t, "GPU\tWORK\tPOOL\tWAY\tPOLICY\tDRIVER\tUSED\tSTATE\tREASON")
	for _, s := range l.Shares {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", tableName(s.Index, s.GPU), ownerText(s.Work), cmp.Or(s.Pool, "-"), cmp.Or(s.Way, "-"),
			s.policy(), s.driver(), mebibytes(s.UsedBytes), s.state(), s.Reason)
	}
	return t.Flush()
}

// String is what the node can do for limits, in one line.
func (l *MemoryLimits) String() string {
	var parts []string
	switch {
	case l.Unsupported != "":
		parts = append(parts, "not possible: "+l.Unsupported)
	case l.Backend == "":
		parts = append(parts, "no controller of control groups for them")
	default:
		parts = append(parts, "by the controller "+l.Backend)
	}
	if l.CannotSet != "" {
		parts = append(parts, "this agent can't set them: "+l.CannotSet)
	}
	if l.Foreign {
		parts = append(parts, "of other programs, the policy has none")
	}
	return strings.Join(parts, "; ")
}

// policy is the limit by the policy: "20480 MiB, required".
func (s MemoryLimit) policy() string {
	switch {
	case s.WantBytes == 0:
		return "none"
	case s.Required:
		return mebibytes(&s.WantBytes) + ", required"
	}
	return mebibytes(&s.WantBytes)
}

// driver is the limit that the driver has: "20480 MiB", "none", "not read".
func (s MemoryLimit) driver() string {
	switch {
	case s.UsedBytes == nil:
		return "not read"
	case s.HardBytes == nil:
		return "none"
	}
	return mebibytes(s.HardBytes)
}

func (s MemoryLimit) state() string {
	if s.Since.IsZero() {
		return s.State
	}
	return s.State + " since " + stamp(s.Since)
}

func mebibytes(n *uint64) string {
	if n == nil {
		return "-"
	}
	return fmt.Sprintf("%d MiB", *n>>20)
}

// topLimits are the lines of top about limits of memory, at most as many as there are rows: first what is not limited, then what is nearest
// to its limit.
func (r Report) topLimits(rows int) []string {
	if r.MemoryLimits == nil || len(r.MemoryLimits.Shares) == 0 || rows < 1 {
		return nil
	}
	all := slices.SortedStableFunc(slices.Values(r.MemoryLimits.Shares), func(a, b MemoryLimit) int {
		return cmp.Or(cmp.Compare(a.rank(), b.rank()), cmp.Compare(b.part(), a.part()))
	})
	hidden := 0
	if len(all) >= rows {
		hidden = len(all) - max(rows-2, 0)
	}
	var lines []string
	if shown := all[:len(all)-hidden]; len(shown) > 0 {
		var b strings.Builder
		t := NewTable(&b)
		fmt.Fprintln(t, "GPU\tSHARE GiB\tLIMIT\tOWNER")
		for _, s := range shown {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", tableName(s.Index, s.GPU), cmp.Or(ratio(gibibytes(s.UsedBytes), gibibytes(s.HardBytes)), "-"), s.State, ownerText(s.Work))
		}
		_ = t.Flush() // a strings.Builder does not fail
		lines = strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	}
	if hidden > 0 {
		lines = append(lines, Noun(hidden, "more share"))
	}
	return lines
}

// rank is 0 for a share without the limit that the policy wants.
func (s MemoryLimit) rank() int {
	if s.Lacks() {
		return 0
	}
	return 1
}

// Lacks reports whether work that has begun is not known to have the limit of the policy.
func (s MemoryLimit) Lacks() bool {
	return s.Begun && s.WantBytes > 0 && s.State != string(limit.Limited)
}

// part is how much of its limit a share uses, 1 at the limit; 0 if that is not known.
func (s MemoryLimit) part() float64 {
	if s.UsedBytes == nil || s.HardBytes == nil || *s.HardBytes == 0 {
		return 0
	}
	return float64(*s.UsedBytes) / float64(*s.HardBytes)
}

func gibibytes(n *uint64) string {
	if n == nil {
		return ""
	}
	return strconv.FormatFloat(float64(*n)/(1<<30), 'f', 1, 64)
}
