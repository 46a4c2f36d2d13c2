package core

import "slices"

// Reconcile holds a reading against the previous one. A device that stopped answering is kept, as
// running work may still hold it and it may come back; one that is gone by intent (its GPU answers
// without that MIG instance, or another GPU sits in its slot) is not. The observations say what the
// reading means for the health of each GPU and of the driver.
func Reconcile(prev, reading Snapshot) (Snapshot, []Observation) {
	if reading.Driver.State != DriverReady {
		reading.Devices, reading.Excluded = prev.Devices, prev.Excluded
		reading.Links, reading.Nodes = prev.Links, prev.Nodes
		obs := []Observation{{At: Node, Kind: DriverUnavailable, Code: uint64(reading.Driver.State), Detail: reading.Driver.Reason}}
		if reading.Unloaded {
			obs = append(obs, Observation{At: Node, Kind: DriverUnloaded})
		}
		return reading, obs
	}
	obs := []Observation{{At: Node, Kind: DriverAvailable, Detail: reading.Driver.Version}}
	for _, d := range reading.Devices {
		if d.At.GI != Whole { // a GPU speaks for itself when it is checked
			obs = append(obs, Observation{At: d.At, Kind: InstanceRead})
		}
	}
	kept := slices.Clone(reading.Devices)
	for _, d := range prev.Devices {
		if slices.ContainsFunc(reading.Devices, func(e Device) bool { return e.ID == d.ID }) {
			continue
		}
		if o, ok := missingDevice(d, reading); ok {
			kept = append(kept, d)
			obs = append(obs, o)
		}
	}
	silent := kept[len(reading.Devices):]
	reading.Links = slices.Concat(reading.Links, retainedLinks(prev.Links, silent, kept, reading.Links))
	reading.Devices = kept
	reading.Excluded = slices.DeleteFunc(slices.Clone(reading.Excluded), func(e Exclusion) bool {
		return slices.ContainsFunc(kept, e.Matches)
	})
	return NewSnapshot(reading), obs
}

// retainedLinks are the links that GPUs which fell silent had with those that are still there, but for those that were read
// again. Who groups GPUs by their links does not part a lost GPU from its neighbours.
func retainedLinks(links []Link, silent, kept []Device, read []Link) (of []Link) {
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

// missingDevice says what it means that d is missing from a reading; false if it is gone by intent.
func missingDevice(d Device, reading Snapshot) (Observation, bool) {
	for _, e := range reading.Excluded {
		if e.Matches(d) {
			at := e.At // an instance that can't be read says nothing about its siblings
			if at.GPU == "" {
				at = WholeGPU(d.At.GPU)
			}
			return Observation{At: at, Kind: KindOf(e.Failure), Detail: e.Reason}, true
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
		if e.Unidentified() { // it may be this one, and what is said of it is all that is known
			return Observation{At: at, Kind: KindOf(e.Failure), Detail: e.Reason}, true
		}
	}
	return Observation{At: at, Kind: Lost, Detail: "not listed by the driver"}, true
}

// Locate returns o with a placement that the snapshot knows: what happened to an instance that is not
// there (any more) counts against the whole GPU, never against nothing. It reports false for something on
// another device than one of the snapshot, which the kernel log may tell of.
func Locate(s Snapshot, o Observation) (Observation, bool) {
	if o.At.GPU == "" && o.PCI != "" {
		id, ok := s.GPUAt(o.PCI)
		o.At = WholeGPU(id)
		return o, ok
	}
	if o.At.GPU == "" || slices.ContainsFunc(s.Devices, func(d Device) bool { return o.At.Covers(d.At) }) {
		return o, true
	}
	o.At = WholeGPU(o.At.GPU)
	return o, true
}

// expandToInstances is what it means for the MIG instances of a GPU that does not answer. When it answers again, they may
// have been laid out anew meanwhile: each is offered again only when it was read.
func expandToInstances(s Snapshot, o Observation) (obs []Observation) {
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
