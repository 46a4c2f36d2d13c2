package core

import (
	"cmp"
	"errors"
	"slices"
)

// DriverState says whether the driver can be asked at all.
type DriverState uint8

// The states of the driver, as far as one reading can tell.
const (
	DriverPending DriverState = iota // not asked yet
	DriverAbsent                     // no library or no kernel module: a node without GPUs, or not yet
	DriverFailed                     // there, but it does not work (or no longer)
	DriverReady
	DriverReleased // left alone for maintenance, by an operator's order
)

func (s DriverState) String() string {
	return [...]string{"pending", "absent", "failed", "ready", "released"}[s]
}

// Driver is the driver as one reading gives it.
type Driver struct {
	State   DriverState
	Version string // "580.95.05"
	CUDA    string // "13.0"
	Reason  string // why it is not ready; one line, stable over retries
}

// Snapshot is one complete reading of the machine. Build one with NewSnapshot or NoDriver.
type Snapshot struct {
	Driver   Driver
	Devices  []Device    // in canonical order; a GPU in MIG mode and its instances
	Excluded []Exclusion // seen, but not readable
	Links    []Link      // between full GPUs, A before B in canonical order
	Nodes    []string    // NVIDIA's device nodes present on the host, sorted: "/dev/nvidia0"
	Unloaded bool        // there is no driver because the kernel module was unloaded
}

// Exclusion is a device that was seen and can't be offered, with the reason.
type Exclusion struct {
	Index  int // NVML index of the physical GPU
	At     Placement
	PCI    PCIAddress
	Kind   ObservationKind // what its silence says: Lost or ProbeFailed; 0 = excluded by intent
	Reason string
}

// Link is how two GPUs reach each other.
type Link struct {
	A, B    DeviceID
	Path    PCIePath
	NVLinks int // active NVLinks between the two (directly or over NVSwitch)
}

// PCIePath is the nearest common ancestor of two GPUs (NVML: nvmlGpuTopologyLevel_t); a larger value
// is a shorter path. The zero value is unknown.
type PCIePath uint8

// PCIe paths, from far to near.
const (
	PathUnknown      PCIePath = iota
	PathSystem                // across NUMA nodes
	PathNUMA                  // across host bridges of one NUMA node
	PathHostBridge            // one host bridge
	PathMultiSwitch           // several PCIe switches
	PathSingleSwitch          // one PCIe switch
	PathBoard                 // one board
)

// NewSnapshot returns s in canonical order. The slices of s are not changed.
func NewSnapshot(s Snapshot) Snapshot {
	s.Devices = slices.SortedFunc(slices.Values(s.Devices), compareDevices)
	s.Excluded = slices.SortedFunc(slices.Values(s.Excluded), compareExclusions)
	s.Links = slices.SortedFunc(slices.Values(s.Links), func(a, b Link) int {
		return cmp.Or(cmp.Compare(a.A, b.A), cmp.Compare(a.B, b.B))
	})
	s.Nodes = slices.Sorted(slices.Values(s.Nodes))
	return s
}

// NoDriver is the reading of a machine whose driver can't be asked: a value like any other.
func NoDriver(state DriverState, reason string) Snapshot {
	return Snapshot{Driver: Driver{State: state, Reason: reason}}
}

// Unavailable is the reading of a machine whose driver can't be asked for that reason.
func Unavailable(err error) Snapshot {
	state := DriverFailed
	if errors.Is(err, ErrNoDriver) {
		state = DriverAbsent
	}
	s := NoDriver(state, err.Error())
	s.Unloaded = errors.Is(err, ErrUnloaded)
	return s
}

// NVLinks are the links that have any.
func (s Snapshot) NVLinks() []Link {
	return slices.DeleteFunc(slices.Clone(s.Links), func(l Link) bool { return l.NVLinks == 0 })
}

// Equal reports whether two readings say the same.
func (s Snapshot) Equal(t Snapshot) bool {
	return s.Driver == t.Driver &&
		slices.Equal(s.Devices, t.Devices) &&
		slices.Equal(s.Excluded, t.Excluded) &&
		slices.Equal(s.Links, t.Links) &&
		slices.Equal(s.Nodes, t.Nodes)
}

func compareExclusions(a, b Exclusion) int {
	return cmp.Or(cmp.Compare(a.Index, b.Index), comparePlacements(a.At, b.At), cmp.Compare(a.Reason, b.Reason))
}

// Reconcile holds a reading against the previous one. A device that stopped answering is kept, as
// running work may still hold it and it may come back; one that is gone by intent (its GPU answers
// without that MIG instance, or another GPU sits in its slot) is not. The observations say what the
// reading means for the health of each GPU and of the driver.
func Reconcile(prev, reading Snapshot) (Snapshot, []Observation) {
	if reading.Driver.State != DriverReady {
		reading.Devices, reading.Excluded = prev.Devices, prev.Excluded
		reading.Links, reading.Nodes = prev.Links, prev.Nodes
		obs := []Observation{{At: Node, Kind: DriverLost, Code: uint64(reading.Driver.State), Detail: reading.Driver.Reason}}
		if reading.Unloaded {
			obs = append(obs, Observation{At: Node, Kind: Unloaded})
		}
		return reading, obs
	}
	obs := []Observation{{At: Node, Kind: DriverAnswered, Detail: reading.Driver.Version}}
	for _, d := range reading.Devices {
		if d.At.GI != Whole { // a GPU speaks for itself when it is checked
			obs = append(obs, Observation{At: d.At, Kind: Responsive})
		}
	}
	kept := slices.Clone(reading.Devices)
	for _, d := range prev.Devices {
		if slices.ContainsFunc(reading.Devices, func(e Device) bool { return e.ID == d.ID }) {
			continue
		}
		if o, ok := silence(d, reading); ok {
			kept = append(kept, d)
			obs = append(obs, o)
		}
	}
	silent := kept[len(reading.Devices):]
	reading.Links = slices.Concat(reading.Links, linksOf(prev.Links, silent, kept, reading.Links))
	reading.Devices = kept
	reading.Excluded = slices.DeleteFunc(slices.Clone(reading.Excluded), func(e Exclusion) bool {
		return slices.ContainsFunc(kept, e.concerns)
	})
	return NewSnapshot(reading), obs
}

// linksOf are the links that GPUs which fell silent had with those that are still there, but for those that were read
// again. Who groups GPUs by their links does not part a lost GPU from its neighbours.
func linksOf(links []Link, silent, kept []Device, read []Link) (of []Link) {
	has := func(devices []Device, id DeviceID) bool {
		return slices.ContainsFunc(devices, func(d Device) bool { return d.ID == id })
	}
	for _, l := range links {
		again := slices.ContainsFunc(read, func(r Link) bool { return r.A == l.A && r.B == l.B })
		if !again && (has(silent, l.A) || has(silent, l.B)) && has(kept, l.A) && has(kept, l.B) {
			of = append(of, l)
		}
	}
	return of
}

// silence says what it means that d is missing from a reading; false if it is gone by intent.
func silence(d Device, reading Snapshot) (Observation, bool) {
	for _, e := range reading.Excluded {
		if e.concerns(d) {
			at := e.At // an instance that can't be read says nothing about its siblings
			if at.GPU == "" {
				at = WholeGPU(d.At.GPU)
			}
			return Observation{At: at, Kind: e.Kind, Detail: e.Reason}, true
		}
	}
	for _, e := range reading.Devices {
		if e.ID == d.At.GPU || e.PCI != "" && e.PCI == d.PCI {
			return Observation{}, false
		}
	}
	for _, e := range reading.Excluded {
		if e.At.GPU != "" && e.At.GPU != d.At.GPU && e.PCI != "" && e.PCI == d.PCI {
			return Observation{}, false // another GPU sits in its slot, readable or not
		}
	}
	at := WholeGPU(d.At.GPU)
	for _, e := range reading.Excluded {
		if e.nameless() { // it may be this one, and what is said of it is all that is known
			return Observation{At: at, Kind: e.Kind, Detail: e.Reason}, true
		}
	}
	return Observation{At: at, Kind: Lost, Detail: "not listed by the driver"}, true
}

// nameless reports whether e is somebody at an index who does not say who it is, and of whom not even the slot is
// known.
func (e Exclusion) nameless() bool { return e.At.GPU == "" && e.PCI == "" && e.Kind != 0 }

// Locate returns o with a placement that the snapshot knows: what happened to an instance that is not
// there (any more) counts against the whole GPU, never against nothing. It reports false for something on
// another device than one of the snapshot, which the kernel log may tell of.
func (s Snapshot) Locate(o Observation) (Observation, bool) {
	if o.At.GPU == "" && o.PCI != "" {
		gpu, ok := s.gpuAt(o.PCI)
		o.At = WholeGPU(gpu)
		return o, ok
	}
	if o.At.GPU == "" || slices.ContainsFunc(s.Devices, func(d Device) bool { return o.At.Covers(d.At) }) {
		return o, true
	}
	o.At = WholeGPU(o.At.GPU)
	return o, true
}

// silenced is what it means for the MIG instances of a GPU that does not answer. When it answers again, they may
// have been laid out anew meanwhile: each is offered again only when it was read.
func (s Snapshot) silenced(o Observation) (obs []Observation) {
	if o.Kind != Unresponsive || o.At.GPU == "" || o.At.GI != Whole {
		return nil
	}
	for _, d := range s.Devices {
		if d.Profile != "" && d.At.GPU == o.At.GPU {
			each := o
			each.At = d.At
			obs = append(obs, each)
		}
	}
	return obs
}

// concerns reports whether e is about d: by identity, or by slot where the GPU's UUID can't be read.
func (e Exclusion) concerns(d Device) bool {
	if e.At.GPU == "" {
		return e.PCI != "" && e.PCI == d.PCI
	}
	return e.At.Covers(d.At)
}
