package limit

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// Saved is what is known from before; it is on disk. It is a value: no function changes one that it gets. The zero value is that of a node on which no limit
// was set or found, and it stays as it is while none is.
type Saved struct {
	Version  int       `json:"version"`
	Boot     string    `json:"boot,omitempty"`
	BootTime time.Time `json:"bootTime,omitzero"`
	Driver   string    `json:"driver,omitempty"` // load of the driver, of Values
	Records  []Record  `json:"groups,omitempty"` // by path, inode and GPU
	Pods     []Pod     `json:"pods,omitempty"`   // by work and GPU
	Values   []Value   `json:"values,omitempty"` // by GPU and value: see Value
}

// Record is a group whose limit by the policy was read on a GPU.
type Record struct {
	Path  string       `json:"path"`
	Inode uint64       `json:"inode"`
	GPU   gpu.DeviceID `json:"gpu"`
	Hard  uint64       `json:"bytes"` // by the policy when the work began
	Pool  string       `json:"pool,omitempty"`
	Way   Way          `json:"way,omitempty"` // "" = it has the limit of work to whose group it belongs: see decision.shadow

	// Own means that the agent has set the limit of this group since the driver was loaded, so it is the group's own.
	Own bool `json:"own,omitempty"`

	// Uncounted are the processes that used the GPU before the limit was read: what they had then is not counted. Without any the limit holds.
	Uncounted []Uncounted `json:"uncounted,omitempty"`

	// Undecided means that the limit is about to be set, or was, and that it is not known so far whether a process used the GPU before.
	Undecided bool `json:"undecided,omitempty"`

	before   []int     // of Undecided: the processes that were there when the limit was read; nil = any may have been
	read     time.Time // of Undecided: when that was
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
	Pool  string       `json:"pool,omitempty"`
	Bytes uint64       `json:"bytes"`
}

// ErrElsewhere means that another process of the agent has the record of limits, as during an update: it sets them until it ends.
var ErrElsewhere = errors.New("another process of this agent sets the limits of the node until it ends")

// Value is a hard limit that this agent, or NVIDIA's hook by its policy, has set on a GPU since the driver was loaded. The driver keeps it when the group ends (backend misc), for whichever group
// gets its address.
type Value struct {
	GPU  gpu.DeviceID `json:"gpu"`
	Hard uint64       `json:"bytes"`
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

// OfClaims returns the state with the pods of the claims that are prepared. The pods of other claims stay until they have ended.
func (s Saved) OfClaims(prepared []Pod, ended func(holders.Work) bool) Saved {
	kept := s.clone()
	kept.Pods = slices.DeleteFunc(kept.Pods, func(p Pod) bool {
		return !slices.ContainsFunc(prepared, func(o Pod) bool { return comparePods(p, o) == 0 }) && ended(p.Work)
	})
	for _, p := range prepared {
		kept = kept.WithPod(p)
	}
	return kept
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
	i, known := s.find(g.Path, g.Inode, id)
	if !known {
		s.Records = slices.Insert(s.Records, i, Record{Path: g.Path, Inode: g.Inode, GPU: id})
	}
	return &s.Records[i]
}

// has reports whether a value was set on a GPU since the driver was loaded.
func (s Saved) has(v Value) bool {
	_, known := slices.BinarySearchFunc(s.Values, v, compareValues)
	return known
}

func (s *Saved) addValue(v Value) {
	if i, known := slices.BinarySearchFunc(s.Values, v, compareValues); !known && len(s.Values) < maxValues {
		s.Values = slices.Insert(s.Values, i, v)
	}
}

// clone returns a state that can be changed without effect on s.
func (s Saved) clone() Saved {
	s.Records, s.Pods, s.Values = slices.Clone(s.Records), slices.Clone(s.Pods), slices.Clone(s.Values)
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

func compareValues(a, b Value) int {
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
