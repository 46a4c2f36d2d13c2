package handover

import (
	"cmp"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// held returns the faults with the UIDs of the pods that have their hardware, by a record whose holders are located. A record that may lack one, or
// has one without UID, does not make them known.
func held(faults []faultreport.Fault, r holders.Record) []faultreport.Fault {
	faults = slices.Clone(faults)
	for i := range faults {
		f := &faults[i]
		f.HoldersKnown = r.Complete
		for _, w := range podsOn(f.Placement(), r) {
			if w.ID == "" {
				f.HoldersKnown = false
			} else {
				f.Holders = append(f.Holders, w.ID)
			}
		}
		slices.Sort(f.Holders)
		f.Holders = slices.Compact(f.Holders)
	}
	return faults
}

// podsOn returns the pods that have hardware of a placement, each once.
func podsOn(at gpu.Placement, r holders.Record) (pods []holders.Work) {
	for _, h := range r.Holders {
		if h.At.GPU != "" && h.At.Overlaps(at) {
			h.Work.Container, h.Work.Claim = "", ""
			pods = append(pods, h.Work)
		}
	}
	slices.SortFunc(pods, func(a, b holders.Work) int { return cmp.Or(a.Compare(b), cmp.Compare(a.ID, b.ID)) })
	return slices.Compact(pods)
}
