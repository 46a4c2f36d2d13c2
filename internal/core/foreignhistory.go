package core

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// ForeignHistory means that a checkpoint contains none of the GPUs that the driver lists. It belongs to another
// node (the state directory came with a cloned image or a moved disk), or every GPU was replaced. The checkpoint's
// history was dropped.
type ForeignHistory struct {
	HistoryGPUs []gpu.DeviceID // GPUs in the checkpoint, sorted
	DriverGPUs  []gpu.DeviceID // GPUs that the driver lists, sorted
}

// Error lists the GPUs of both.
func (f *ForeignHistory) Error() string {
	return fmt.Sprintf("health history has GPUs %v, the driver lists %v", f.HistoryGPUs, f.DriverGPUs)
}

// gpuIDs returns the GPUs in the checkpoint, sorted.
func (r Checkpoint) gpuIDs() []gpu.DeviceID {
	var ids []gpu.DeviceID
	for _, d := range r.Devices {
		ids = append(ids, d.At.GPU)
	}
	for _, c := range r.Conditions {
		ids = append(ids, c.At.GPU)
	}
	for id := range r.GPUs {
		ids = append(ids, id)
	}
	return sortedIDs(slices.DeleteFunc(ids, func(id gpu.DeviceID) bool { return id == "" })) // "" = the node
}

// findForeignHistory compares the GPUs of a checkpoint with a snapshot. If they have no GPU in common, the
// checkpoint is another node's, but only if the driver reports the UUIDs of more than half of its GPUs: a GPU
// without a UUID may be one of the checkpoint. If no device can be read (all GPUs have fallen off the bus) or the
// driver is not ready, nothing is decided. The result known is true if a GPU of the checkpoint was found.
func findForeignHistory(history []gpu.DeviceID, reading gpu.Snapshot) (f *ForeignHistory, known bool) {
	var listed []gpu.DeviceID
	withoutUUID := 0
	for _, d := range reading.Devices {
		listed = append(listed, d.At.GPU)
	}
	for _, e := range reading.Excluded {
		if e.At.GPU == "" {
			withoutUUID++
		} else {
			listed = append(listed, e.At.GPU)
		}
	}
	for _, id := range listed {
		if _, there := slices.BinarySearch(history, id); there {
			return nil, true
		}
	}
	listed = sortedIDs(listed)
	if reading.Driver.State != gpu.DriverReady || len(reading.Devices) == 0 || len(listed) <= withoutUUID {
		return nil, false
	}
	return &ForeignHistory{HistoryGPUs: history, DriverGPUs: listed}, false
}

// withoutForeign returns the state without the history of the checkpoint if the snapshot shows that it is another
// node's. The ledger drops the conditions of GPUs that are not in the snapshot: see Ledger.Relocate.
func (s State) withoutForeign(reading gpu.Snapshot) State {
	if len(s.unconfirmedGPUs) == 0 {
		return s
	}
	f, known := findForeignHistory(s.unconfirmedGPUs, reading)
	if f != nil {
		of := func(id gpu.DeviceID) bool { return slices.Contains(f.HistoryGPUs, id) }
		devices, links := &s.Snapshot.Devices, &s.Snapshot.Links
		if s.priorDevices != nil {
			devices, links = &s.priorDevices, &s.priorLinks
		}
		*devices = slices.DeleteFunc(slices.Clone(*devices), func(d gpu.Device) bool { return of(d.At.GPU) })
		*links = slices.DeleteFunc(slices.Clone(*links), func(l gpu.Link) bool { return of(l.A) || of(l.B) })
		bound := s.Binding
		s.Binding = inventory.Binding{}
		if len(*devices) > 0 { // read on this node, while the history was unconfirmed
			s.Binding = inventory.Binding{Counts: bound.Counts, Profile: bound.Profile}
		}
		s.Foreign = f
	}
	if f != nil || known {
		s.unconfirmedGPUs = nil
	}
	return s
}

func sortedIDs(ids []gpu.DeviceID) []gpu.DeviceID {
	return slices.Compact(slices.Sorted(slices.Values(ids)))
}
