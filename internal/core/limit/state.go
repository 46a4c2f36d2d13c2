package limit

import (
	"cmp"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// Saved is what is known from before; it is on disk. It is a value: no function changes one that it gets. The zero value is that of a node on which no limit
// was set or found, and it stays as it is while none is.
type Saved struct {
	Version   int        `json:"version"`
	Boot      string     `json:"boot,omitempty"`
	BootTime  time.Time  `json:"bootTime,omitzero"`
	Driver    string     `json:"driver,omitempty"`    // load of the driver, of Leftovers
	Records   []Record   `json:"groups,omitempty"`    // by path, inode and GPU
	Pods      []Pod      `json:"pods,omitempty"`      // by work and GPU
	Leftovers []Leftover `json:"leftovers,omitempty"` // by GPU and bytes

	newest uint64 // the highest inode of the groups of the latest reading of all; 0 = unknown
}

// Record is a group that has, or is to have, a limit by the policy on a GPU. It lasts as long as the group. That of a task lasts as long as the task: one that exec
// restarts in place has another group with the same path, perhaps while the orchestrator's record can't be read.
type Record struct {
	Path  string       `json:"path"`
	Inode uint64       `json:"inode"` // 0 = the group of the task has ended
	GPU   gpu.DeviceID `json:"gpu"`
	Work  holders.Work `json:"work,omitzero"`
	Hard  uint64       `json:"bytes"` // by the policy when the work began
	Pool  string       `json:"pool,omitempty"`
	Way   Way          `json:"way,omitempty"` // "" = it has the limit of work to whose group it belongs: see decision.shadow

	// Own means that the agent has set the limit of this group since the driver was loaded, or that it was another one than that of the group above: so it is the
	// group's own.
	Own bool `json:"own,omitempty"`

	// Uncounted are the processes that used the GPU before the limit was read: what they had then is not counted. Without any the limit holds.
	Uncounted []Uncounted `json:"uncounted,omitempty"`

	// Undecided means that the limit is about to be set, or was, and that it is not known so far whether a process used the GPU before.
	Undecided bool `json:"undecided,omitempty"`

	// Found is the limit that the group had in the place of that of the policy, by an image, a job or another program; 0 = none. It is reported until the group ends.
	Found uint64 `json:"found,omitempty"`

	before   []int     // of Undecided: the processes that were there when the limit was read; nil = any may have been
	read     time.Time // of Undecided: when that was
	used     uint64    // of Undecided: what the driver counted then
	mending  bool      // of Undecided: the group had another limit from its beginning, so what it uses is counted
	idle     time.Time // since when processes have more than Reading.Reserve of the GPU and nothing is counted; zero = that is not so
	shadowed bool      // a group below it seems to have a limit of its own
}

// Uncounted is a process that used a GPU before the limit was there.
type Uncounted struct {
	PID     int    `json:"pid"`
	Started uint64 `json:"started"`
}

// Pod is a limit of a pod's group for a resource claim.
type Pod struct {
	Work  holders.Work `json:"work"`
	GPU   gpu.DeviceID `json:"gpu"`
	Bytes uint64       `json:"bytes"`
}

// Leftover is a limit of groups that have ended with it, since the driver was loaded and the GPU was reset. The driver keeps it (backend misc), for whichever groups
// get their addresses.
type Leftover struct {
	GPU  gpu.DeviceID `json:"gpu"`
	Hard uint64       `json:"bytes"`

	// After is the highest inode that was read when the first of the groups was there. The kernel numbers control groups upwards (kernfs_new_node), so that of a group
	// that has its address now is higher.
	After uint64 `json:"after"`
}

// WithPod returns the state in which a claim of a pod is to be limited on a GPU.
func (s Saved) WithPod(p Pod) Saved {
	s = s.clone()
	i, known := slices.BinarySearchFunc(s.Pods, p, comparePods)
	if known {
		s.Pods[i] = p
	} else {
		s.Pods = slices.Insert(s.Pods, i, p)
	}
	return s
}

// WithoutPod returns the state without the limits of a pod: those of a claim, or with Work.Claim "" all.
func (s Saved) WithoutPod(w holders.Work) Saved {
	s = s.clone()
	s.Pods = slices.DeleteFunc(s.Pods, func(p Pod) bool { return p.Work.ID == w.ID && (w.Claim == "" || p.Work.Claim == w.Claim) })
	return s
}

// Pod returns how many bytes a pod is to have on a GPU, by all its claims.
func (s Saved) Pod(id string, device gpu.DeviceID) (bytes uint64) {
	for _, p := range s.Pods {
		if p.Work.ID == id && p.GPU == device {
			bytes += p.Bytes
		}
	}
	return bytes
}

// Of returns the record of a group on a GPU.
func (s Saved) Of(path string, inode uint64, id gpu.DeviceID) (Record, bool) {
	if i, ok := s.find(path, inode, id); ok {
		return s.Records[i], true
	}
	return Record{}, false
}

func (s Saved) find(path string, inode uint64, id gpu.DeviceID) (int, bool) {
	return slices.BinarySearchFunc(s.Records, Record{Path: path, Inode: inode, GPU: id}, compareRecords)
}

// record returns the record of a group, which is a new one if there is none. It is good until another one is added.
func (s *Saved) record(g Group, id gpu.DeviceID) *Record {
	if i, known := s.find(g.Path, g.Inode, id); known {
		return &s.Records[i]
	}
	if i, before := s.find(g.Path, 0, id); before {
		s.Records = slices.Delete(s.Records, i, i+1)
	}
	i, _ := s.find(g.Path, g.Inode, id)
	s.Records = slices.Insert(s.Records, i, Record{Path: g.Path, Inode: g.Inode, GPU: id})
	return &s.Records[i]
}

// left reports whether a limit of a group may be a leftover: it has the value of one, and the group is newer.
func (s Saved) left(g Group, id gpu.DeviceID, hard uint64) bool {
	i, known := slices.BinarySearchFunc(s.Leftovers, Leftover{GPU: id, Hard: hard}, compareLeftovers)
	return known && g.Inode > s.Leftovers[i].After
}

// leave adds the limit of a group that has ended.
func (s *Saved) leave(r Record) {
	l := Leftover{r.GPU, r.Hard, max(r.Inode, s.newest)}
	i, known := slices.BinarySearchFunc(s.Leftovers, l, compareLeftovers)
	switch {
	case known:
		s.Leftovers[i].After = min(s.Leftovers[i].After, l.After)
	case len(s.Leftovers) < maxLeftovers:
		s.Leftovers = slices.Insert(s.Leftovers, i, l)
	}
}

// of reports whether a record is of the work of a holding.
func (r *Record) of(h Holding) bool {
	w := h.Work
	return r.GPU == h.GPU && r.Way == h.Way && r.Work.ID == w.ID && r.Work.Container == w.Container && r.Work.Orchestrator == w.Orchestrator && w.ID != ""
}

// clone returns a state that can be changed without effect on s.
func (s Saved) clone() Saved {
	s.Records, s.Pods, s.Leftovers = slices.Clone(s.Records), slices.Clone(s.Pods), slices.Clone(s.Leftovers)
	for i := range s.Records {
		r := &s.Records[i]
		r.Uncounted, r.before = slices.Clone(r.Uncounted), slices.Clone(r.before)
	}
	return s
}

func compareRecords(a, b Record) int {
	return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Inode, b.Inode), cmp.Compare(a.GPU, b.GPU))
}

func comparePods(a, b Pod) int { return cmp.Or(a.Work.Compare(b.Work), cmp.Compare(a.GPU, b.GPU)) }

func compareLeftovers(a, b Leftover) int {
	return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Hard, b.Hard))
}

// times are those of a state that may be changed: none but that of the boot.
type times struct{ *Saved }

// Booted implements durable.State.
func (s times) Booted() (*string, *time.Time) { return &s.Boot, &s.BootTime }

// EachPast implements durable.State.
func (s times) EachPast(func(*time.Time)) {}

// EachDue implements durable.State.
func (s times) EachDue(func(*time.Time)) {}

var _ durable.State = times{}
