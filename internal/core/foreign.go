package core

import (
	"fmt"
	"slices"
)

// ForeignHistory means that a history has none of the GPUs that the driver names: it is that of another machine
// (its state directory came with a cloned image or a moved disk), or every GPU was replaced since. It was dropped.
type ForeignHistory struct {
	HistoryGPUs []DeviceID // GPUs of the history, by UUID, sorted
	DriverGPUs  []DeviceID // GPUs that the driver names, by UUID, sorted
}

func (f *ForeignHistory) Error() string {
	return fmt.Sprintf("the history has GPUs %v, and the driver names %v", f.HistoryGPUs, f.DriverGPUs)
}

// gpus are the GPUs in a record, sorted.
func (r Checkpoint) gpuIDs() []DeviceID {
	var ids []DeviceID
	for _, d := range r.Devices {
		ids = append(ids, d.At.GPU)
	}
	for _, c := range r.Conditions {
		ids = append(ids, c.At.GPU)
	}
	for id := range r.GPUs {
		ids = append(ids, id)
	}
	return sortedIDs(slices.DeleteFunc(ids, func(id DeviceID) bool { return id == "" })) // "" = the node
}

// findForeignHistory compares the GPUs of a history with a reading of the driver. No GPU in common means another machine, but
// only if the driver names most of the GPUs that it lists: one without a UUID may be any, and that as many were replaced as
// can't be read is likelier than that they were taken for those of another machine. A machine all of whose GPUs
// have fallen off the bus keeps its history, as does one whose driver is not ready. Known reports that a GPU of the
// history is there.
func findForeignHistory(history []DeviceID, reading Snapshot) (f *ForeignHistory, known bool) {
	var machine []DeviceID
	nameless := 0
	for _, d := range reading.Devices {
		machine = append(machine, d.At.GPU)
	}
	for _, e := range reading.Excluded {
		if e.At.GPU == "" {
			nameless++
		} else {
			machine = append(machine, e.At.GPU)
		}
	}
	for _, id := range machine {
		if _, there := slices.BinarySearch(history, id); there {
			return nil, true
		}
	}
	machine = sortedIDs(machine)
	if reading.Driver.State != DriverReady || len(reading.Devices) == 0 || len(machine) <= nameless {
		return nil, false
	}
	return &ForeignHistory{HistoryGPUs: history, DriverGPUs: machine}, false
}

// withoutForeign is the state before a reading, without the history if the reading shows that it is another
// machine's. What the ledger has of its GPUs goes with their devices: see Ledger.Relocate.
func (s State) withoutForeign(reading Snapshot) State {
	if len(s.unconfirmedGPUs) == 0 {
		return s
	}
	f, known := findForeignHistory(s.unconfirmedGPUs, reading)
	if f != nil {
		of := func(id DeviceID) bool { return slices.Contains(f.HistoryGPUs, id) }
		devices, links := &s.Snapshot.Devices, &s.Snapshot.Links
		if s.priorDevices != nil {
			devices, links = &s.priorDevices, &s.priorLinks
		}
		*devices = slices.DeleteFunc(slices.Clone(*devices), func(d Device) bool { return of(d.At.GPU) })
		*links = slices.DeleteFunc(slices.Clone(*links), func(l Link) bool { return of(l.A) || of(l.B) })
		bound := s.Binding
		s.Binding = Binding{}
		if len(*devices) > 0 { // this or an earlier process read them, and decided on them, while the history was in doubt
			s.Binding = Binding{Counts: bound.Counts, Profile: bound.Profile}
		}
		s.Foreign = f
	}
	if f != nil || known {
		s.unconfirmedGPUs = nil
	}
	return s
}

func sortedIDs(ids []DeviceID) []DeviceID {
	return slices.Compact(slices.Sorted(slices.Values(ids)))
}
