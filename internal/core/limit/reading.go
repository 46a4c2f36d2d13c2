package limit

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Reading is what was read of a node at one time.
type Reading struct {
	At       time.Time // after the driver's answers
	Boot     string    // ID of the boot; "" = unknown
	BootTime time.Time // zero = unknown
	Driver   string    // which load of the driver it is: limits of the backend misc end with it; "" = unknown
	Opened   string    // which opening of the driver by this agent it is: a reset, and what ended limits else, is followed by another one
	Node     Node

	GPUs   map[gpu.DeviceID]GPU
	Shares []Holding
	Groups map[string]Group // by path

	// Processes are those with memory of a GPU. Known is when the reading of those of a GPU began: what a process got later may not be in it. Those of a GPU that is
	// not in it were not read, and are of before, if there are some.
	Known     map[gpu.DeviceID]time.Time
	Processes []Process

	HoldersKnown bool            // Shares has all work that has GPUs, of this agent's orchestrator
	Listed       map[string]bool // work that the orchestrator's record lists, with GPUs or without, by Work.ID
	Awaited      bool            // the orchestrator's first record comes in a moment: nothing is known so far of the work that runs

	// Reserve is what CUDA contexts of work may have of a GPU, in bytes: whether the driver counts them is not known.
	Reserve uint64

	// Hook are the limits that NVIDIA's hook sets by the policy. Containers that ended before any reading have left some.
	Hook []Value

	// Parents are the groups whose children must have the backend's controller, from the root, if this agent enables it: see Result.Enable.
	Parents []Parent

	Done []Done // changes that were made since the reading before

	// Partial means that only some groups were read, those of new work, so that their limits are set before its first process: nothing is forgotten, and the table
	// is none to show.
	Partial bool
}

// GPU is a GPU on which limits are read.
type GPU struct {
	Memory uint64 // bytes, by nvmlDeviceGetMemoryInfo
	MIG    bool   // its MIG mode is on: the driver counts nothing
	Own    gpu.LimitAnswer

	// Of its shares by the policy: the limit of each in bytes, 0 = they have none; their pool; whether the limit is required.
	Share    uint64
	Pool     string
	Required bool
}

// Holding is work that has a GPU, or shares of it, by the record of the orchestrator or of the agent.
type Holding struct {
	Work     holders.Work
	GPU      gpu.DeviceID
	Pool     string // "" = the units are not offered any more
	Way      Way
	Required bool
	Bytes    uint64             // by the policy, of all its shares of the GPU; 0 = no limit
	Units    []inventory.UnitID // of its shares, offered or not

	// Groups are where the work is: the group of its task or pod, or with ByHook those in which its container may be.
	Groups []string

	Runs bool // the orchestrator recorded that its processes were started
}

// Value is a hard limit on a GPU.
type Value struct {
	GPU  gpu.DeviceID
	Hard uint64 // bytes
}

// Process is a process with memory of a GPU.
type Process struct {
	PID     int
	Started uint64 // see gpu.Process
	GPU     gpu.DeviceID
	Memory  uint64 // bytes of the GPU by the driver's list of processes, with its CUDA context; 0 = unknown
	Work    holders.Work
	Group   string // control group; "" = unknown
}

// Group is a control group, with what the driver returned for it.
type Group struct {
	Path       string
	Inode      uint64
	Work       holders.Work // by its path or its processes; the zero value = none
	Container  bool         // of Work's zero value: it is that of a container, by its path
	Controller bool         // the backend's controller is on
	PIDs       []int        // of the processes in it and in groups below it; 0 = one that this agent's PID namespace does not have
	Limits     map[gpu.DeviceID]Answers
}

// Answers are what the driver returned for a group and the one above it, one right after the other.
type Answers struct{ Group, Parent gpu.LimitAnswer }

// answers returns what the driver returned for a GPU.
func (g Group) answers(id gpu.DeviceID) Answers {
	a, read := g.Limits[id]
	if !read {
		a.Group.State, a.Parent.State = gpu.LimitFailed, gpu.LimitFailed
	}
	return a
}

// own reports whether the answer is certainly of the group's own limit, and not that of a group above it. What is used shows nothing: the answers are not of the same
// time.
func (a Answers) own(b Backend) bool {
	group, parent := a.Group.Limit, a.Parent.Limit
	return a.Group.State == gpu.LimitRead && (b == DMem || a.Parent.State != gpu.LimitRead || group.Hard != parent.Hard || group.Soft != parent.Soft)
}

// Parent is a group whose children must have a controller.
type Parent struct {
	Path string
	On   bool // it is enabled for its children
}

// Change is a limit that is to be set.
type Change struct {
	Path  string
	Inode uint64
	GPU   gpu.DeviceID
	Soft  uint64
	Hard  uint64 // gpu.NoMemoryLimit = it ends
}

// Done is a change that was made, or that failed.
type Done struct {
	Change
	Err string // "" = it was made
}

// Result is a decision.
type Result struct {
	Saved   Saved
	Table   Table
	Changes []Change // in this order
	Enable  []string // groups in which the backend's controller is to be enabled for their children, from the root

	// Undecided means that newer lists of processes are needed to know whether a limit was late.
	Undecided bool
}

// below reports whether a path is that of a group or of one below it.
func below(p, group string) bool {
	return p == group || strings.HasPrefix(p, strings.TrimSuffix(group, "/")+"/")
}

// pathsBelow returns the groups of a reading below a group, sorted.
func (r *Reading) pathsBelow(group string) (paths []string) {
	for _, p := range slices.Sorted(maps.Keys(r.Groups)) {
		if p != group && below(p, group) {
			paths = append(paths, p)
		}
	}
	return paths
}

// above returns the groups above one, from the root.
func above(group string) (all []string) {
	for group != "/" && group != "" {
		group = group[:strings.LastIndex(group, "/")]
		all = append(all, cmp.Or(group, "/"))
	}
	slices.Reverse(all)
	return all
}

// BackendOf returns by which controller the driver limits memory, by dmem.capacity of the root group and the controllers of that: it takes dmem if the kernel has a
// region of it, else misc (memacct.c). NVML 13.4 has no call for it.
func BackendOf(capacity string, controllers []string) Backend {
	for line := range strings.Lines(capacity) {
		if region, _, _ := strings.Cut(line, " "); strings.HasPrefix(region, "nvidia/") && strings.HasSuffix(region, "/vidmem") {
			return DMem
		}
	}
	if slices.Contains(controllers, MiscController) {
		return Misc
	}
	return NoBackend
}

// Controller is the name of the backend's controller of control groups.
func (b Backend) Controller() string {
	if b == Misc {
		return MiscController
	}
	return string(b)
}

// MiscController is the name of the controller with the backend misc. Only a build for a kernel without it has another one: -ldflags -X.
var MiscController = string(Misc)

// softOf is the soft limit that belongs to a hard one: with misc the same, as NVIDIA's hook sets it. With dmem none, because the driver adds it to dmem.min of
// the groups above, where it stays after the group has ended.
func softOf(b Backend, hard uint64) uint64 {
	if b == Misc {
		return hard
	}
	return 0
}
