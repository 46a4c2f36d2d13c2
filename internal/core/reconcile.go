package core

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Reconcile compares a snapshot with the previous one. A device that stopped responding stays in the result,
// because work may still use it and it may respond again. A device that was removed on purpose does not: its GPU
// responds without that MIG instance, or another GPU is at its PCI address. The observations are what the snapshot
// means for the health of the driver and of each device.
//
// Where prev is of the same driver, a value that was there stays if the reading has none: NVML answers that it is not
// supported, or nothing. The instances of a GPU whose MIG mode is not answered stay too. Then prev.Driver.Version is
// the version in the reading.
func Reconcile(prev, reading gpu.Snapshot) (gpu.Snapshot, []health.Observation) {
	if reading.Driver.State != gpu.DriverReady {
		reading.Devices, reading.Excluded = prev.Devices, prev.Excluded
		reading.Links, reading.Nodes = prev.Links, prev.Nodes
		obs := []health.Observation{{At: gpu.Node, Kind: health.DriverUnavailable, Code: uint64(reading.Driver.State), Detail: reading.Driver.Reason}}
		if reading.Unloaded {
			obs = append(obs, health.Observation{At: gpu.Node, Kind: health.DriverUnloaded})
		}
		return reading, obs
	}
	obs := []health.Observation{{At: gpu.Node, Kind: health.DriverAvailable, Detail: reading.Driver.Version}}
	for _, d := range reading.Devices {
		if d.At.GI != gpu.Whole { // a full GPU is observed by its health check
			obs = append(obs, health.Observation{At: d.At, Kind: health.InstanceRead})
		}
	}
	unanswered := map[gpu.DeviceID]bool{} // divided GPUs whose MIG mode is not answered
	sameDriver := prev.Driver.Version != "" && prev.Driver.Version == reading.Driver.Version
	if sameDriver {
		reading.Devices, unanswered = withKnown(prev.Devices, reading.Devices)
	}
	kept, listed := slices.Clone(reading.Devices), idsOf(reading.Devices)
	for _, d := range prev.Devices {
		if listed[d.ID] {
			continue
		}
		if d.Profile != "" && unanswered[d.At.GPU] {
			kept = append(kept, d)
			continue
		}
		if !sameDriver && d.Profile != "" && listed[d.At.GPU] { // no instance outlives its driver
			continue
		}
		if o, ok := missingDevice(d, reading); ok {
			kept = append(kept, d)
			obs = append(obs, o)
		}
	}
	missing := kept[len(reading.Devices):]
	reading.Links = slices.Concat(reading.Links, retainedLinks(prev.Links, missing, kept, reading.Links))
	reading.Devices = kept
	reading.Excluded = slices.DeleteFunc(slices.Clone(reading.Excluded), func(e gpu.Exclusion) bool {
		return slices.ContainsFunc(kept, e.Matches)
	})
	return gpu.NewSnapshot(reading), obs
}

// withKnown returns the devices of a reading with the values of an earlier one where they have none. unanswered are the
// divided GPUs whose MIG mode is not answered.
func withKnown(before, read []gpu.Device) (known []gpu.Device, unanswered map[gpu.DeviceID]bool) {
	was := make(map[gpu.DeviceID]gpu.Device, len(before))
	for _, d := range before {
		was[d.ID] = d
	}
	known, unanswered = slices.Clone(read), map[gpu.DeviceID]bool{}
	for i, d := range known {
		if old, ok := was[d.ID]; ok && old.At == d.At {
			known[i] = d.WithKnown(old)
			unanswered[d.ID] = known[i].MIG && !d.MIG
		}
	}
	return known, unanswered
}

// retainedLinks returns the previous links between GPUs that stopped responding and GPUs that are listed, except
// those that were read again. This keeps a lost GPU in the NVLink group of its peers.
func retainedLinks(links []gpu.Link, missing, kept []gpu.Device, read []gpu.Link) (of []gpu.Link) {
	if len(missing) == 0 {
		return nil
	}
	type pair struct{ a, b gpu.DeviceID }
	readAgain := make(map[pair]bool, len(read))
	for _, l := range read {
		readAgain[pair{l.A, l.B}] = true
	}
	gone, all := idsOf(missing), idsOf(kept)
	for _, l := range links {
		if !readAgain[pair{l.A, l.B}] && (gone[l.A] || gone[l.B]) && all[l.A] && all[l.B] {
			of = append(of, l)
		}
	}
	return of
}

func idsOf(devices []gpu.Device) map[gpu.DeviceID]bool {
	ids := make(map[gpu.DeviceID]bool, len(devices))
	for i := range devices {
		ids[devices[i].ID] = true
	}
	return ids
}

// missingDevice returns the observation for d, which is missing from a snapshot; false if it was removed on
// purpose.
func missingDevice(d gpu.Device, reading gpu.Snapshot) (health.Observation, bool) {
	for _, e := range reading.Excluded {
		if e.Matches(d) {
			at := e.At // a failure of one instance is not a failure of the others
			if at.GPU == "" {
				at = gpu.WholeGPU(d.At.GPU)
			}
			return health.Observation{At: at, Kind: health.KindOf(e.Failure), Detail: e.Reason}, true
		}
	}
	for _, e := range reading.Devices {
		if e.ID == d.At.GPU || e.PCI != "" && e.PCI == d.PCI {
			return health.Observation{}, false
		}
	}
	for _, e := range reading.Excluded {
		if e.At.GPU != "" && e.At.GPU != d.At.GPU && e.PCI != "" && e.PCI == d.PCI {
			return health.Observation{}, false // another GPU is at its PCI address, readable or not
		}
	}
	at := gpu.WholeGPU(d.At.GPU)
	for _, e := range reading.Excluded {
		if e.Unidentified() { // possibly this GPU
			return health.Observation{At: at, Kind: health.KindOf(e.Failure), Detail: e.Reason}, true
		}
	}
	return health.Observation{At: at, Kind: health.Lost, Detail: health.NotListed}, true
}

// locateIn returns o with a placement that is in the snapshot. A fault of a MIG instance that is not there (any
// more) counts against its GPU. It returns false if the observation has only a PCI address, and no GPU of the
// snapshot is there.
func locateIn(s gpu.Snapshot, o health.Observation) (health.Observation, bool) {
	if o.At.GPU == "" && o.PCI != "" {
		id, ok := s.GPUAt(o.PCI)
		o.At = gpu.WholeGPU(id)
		return o, ok
	}
	if o.At.GPU == "" || slices.ContainsFunc(s.Devices, func(d gpu.Device) bool { return o.At.Covers(d.At) }) {
		return o, true
	}
	o.At = gpu.WholeGPU(o.At.GPU)
	return o, true
}

// expandToInstances returns an observation for each MIG instance of a GPU that does not respond. Instances may be
// created or destroyed before it responds again, so each is offered again only after it was read.
func expandToInstances(s gpu.Snapshot, o health.Observation) (obs []health.Observation) {
	if o.Kind != health.Unresponsive || o.At.GPU == "" || o.At.GI != gpu.Whole {
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
