package limit

import (
	"cmp"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Backend is the controller of control groups by which the driver limits memory (RmMemacctMode; memacct.c in open-gpu-kernel-modules 615). It is chosen when
// the driver's module is loaded.
type Backend string

// The backends.
const (
	NoBackend Backend = ""
	Misc      Backend = "misc" // the driver's own table; the nearest ancestor with a limit counts; nothing is charged where the controller is off
	DMem      Backend = "dmem" // the kernel's, hierarchical: dmem.max, dmem.min
)

// WithoutBackend is why no limit can be set with NoBackend.
const WithoutBackend = "the kernel has neither the controller dmem nor misc"

// Node is what a node can do for limits.
type Node struct {
	Backend     Backend
	Unsupported string // why no limit can be read or set on any GPU: "driver 580.159.04: want 615 or newer"; "" = they can, and Backend is known
	CannotSet   string // why this agent can't set limits, with the remedy; "" = it can, or need not
	Foreign     bool   // limits are read, and the policy of this agent has none
}

// Way is how the limit of a share comes to its control group.
type Way string

// The ways.
const (
	ByTask Way = "task" // the agent sets it on the group of a task of Nomad (exec, java, raw_exec)
	ByPod  Way = "pod"  // the agent sets it on the group of the pod, before a claim is prepared
	ByHook Way = "hook" // NVIDIA's CDI hook sets it on the container's group; the agent reads it, and sets it if it is another
)

// State is whether the limit of a share holds.
type State string

// The states.
const (
	Limited   State = "limited"     // the driver refuses what is beyond the limit
	Late      State = "late"        // the work used the GPU before the limit was set: what it had then is not counted
	Unlimited State = "not limited" // there is no limit, or another one than the policy has
	Foreign   State = "foreign"     // the driver has a limit that no policy of this node has: of another program
	Unknown   State = "unknown"     // not known so far, or it can't be read
)

// Share is the limit of one work on one GPU.
type Share struct {
	Work     holders.Work
	GPU      gpu.DeviceID
	Pool     string // "" = no pool of the policy: Foreign
	Way      Way    // "" of Foreign
	Required bool   // by the policy
	Want     uint64 // bytes by the policy; 0 = the policy has no limit
	Group    string // control group below the mount point: "/nomad.slice/share.slice/ALLOC.TASK.scope"; "" = not found

	// Begun means that the work has processes that use the GPU or may use it, by its group, the list of processes or the orchestrator's record, so that a limit that does
	// not hold matters. A container whose group is not known, because no process of it has used the GPU, has not begun.
	Begun bool

	Read   bool // Driver has what the driver returned for Group
	Driver gpu.MemoryLimit

	State  State
	Reason string    // of all states but Limited, in one line
	Since  time.Time // of State
}

// Table is what is known of all limits of a node at one time. It is immutable; the zero value = nothing has been read.
type Table struct {
	At     time.Time
	Node   Node
	Shares []Share // by work and GPU, sorted

	// Problems last: LIMIT_CONTROLLER_OFF, STALE_LIMIT, LIMIT_OVERRIDDEN, LIMIT_NOT_COUNTED, MEMORY_TOTAL_LIMITED. Object is the work or the GPU.
	Problems []problem.Problem

	Given  map[gpu.DeviceID]Given // what work has of each GPU by the policy; while the record of work is not complete, at least what it had before
	Counts Counts

	Opened string // the latest opening of the driver of which the work that ran was known: see Reading.Opened, Awaited

	// Waiting has the GPUs that take no new work: since the driver was opened, or the GPU was reset, the limits of the work that it has were not all set. Once they
	// were, no GPU waits any more.
	Waiting map[gpu.DeviceID]bool
}

// Given is what work has of a GPU by the policy.
type Given struct {
	Bytes uint64                      // the sum of its limits, by the policy when it began
	Units map[inventory.UnitID]uint64 // of that by the unit of a share, offered or not
}

// Counts are events since the agent began to read limits; they only grow.
type Counts struct {
	Set        uint64 // limits that the agent has set
	Failed     uint64 // limits that it could not set
	Overridden uint64 // limits of containers that were not those of the policy, and were corrected
	Stale      uint64 // limits of groups that have ended, found on another group and ended
	Late       uint64 // shares that were late
}

// Share returns the share of a work on a GPU.
func (t Table) Share(w holders.Work, id gpu.DeviceID) (Share, bool) {
	i := slices.IndexFunc(t.Shares, func(s Share) bool { return s.Work == w && s.GPU == id })
	if i < 0 {
		return Share{}, false
	}
	return t.Shares[i], true
}

// Unread returns the table at a time at which nothing can be read since another one, with the reason: no share is known to be limited. Limits of other programs are
// not in it.
func (t Table) Unread(at, since time.Time, why string) Table {
	t.At, t.Problems = at, nil
	t.Shares = slices.DeleteFunc(slices.Clone(t.Shares), func(s Share) bool { return s.State == Foreign })
	for i := range t.Shares {
		s := &t.Shares[i]
		s.Read, s.Driver, s.Since = false, gpu.MemoryLimit{}, since
		s.State, s.Reason = Unknown, why
	}
	return t
}

// find returns the share that is the same work on the same GPU, or in the same group.
func (t Table) find(s Share) (Share, bool) {
	if i, known := slices.BinarySearchFunc(t.Shares, s, compareShares); known {
		return t.Shares[i], true
	}
	return Share{}, false
}

// compareShares is the order of shares. Work has several groups on a GPU only if these are Foreign.
func compareShares(a, b Share) int {
	foreign := cmp.Compare(boolInt(a.State == Foreign), boolInt(b.State == Foreign))
	if c := cmp.Or(a.Work.Compare(b.Work), cmp.Compare(a.GPU, b.GPU), foreign); c != 0 || a.State != Foreign {
		return c
	}
	return cmp.Compare(a.Group, b.Group)
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func compareProblems(a, b problem.Problem) int {
	return cmp.Or(cmp.Compare(a.Code, b.Code), cmp.Compare(a.Object, b.Object), cmp.Compare(a.Text, b.Text))
}
