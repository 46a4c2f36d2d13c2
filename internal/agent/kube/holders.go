package kube

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// readers read the records of what pods have through the APIs of the kubelet, for the moves of GPUs between APIs. claims is the record of the
// DRA adapter; nil = there is no such adapter. A GPU is known to have no holder only while the kubelet lists all pods: what was prepared may
// have been lost with its folder. Without that list what device plugins once gave out is no reason against a forced move.
func readers(plugins *deviceplugin.Plugins, claims func() holders.Record, current func() *inventory.Allocatable) ownership.Readers {
	return ownership.Readers{
		inventory.DevicePlugin: plugins.Record,
		inventory.DRA: func() holders.Record {
			listed, known := plugins.Claims()
			own := holders.Record{Complete: true}
			if claims != nil {
				own = claims()
			}
			return claimRecord(own, listed, current(), known)
		},
	}
}

// claimRecord returns the claims that have GPUs: by what is prepared, and by the kubelet's list, which has also those whose record was lost. known
// is whether that list is complete.
func claimRecord(own holders.Record, listed []podresources.Claim, inv *inventory.Allocatable, known holders.Record) holders.Record {
	r, recorded := known, map[string]bool{}
	if r.Holders = slices.Clone(own.Holders); !own.Complete {
		r.Complete, r.Missing = false, own.Missing
	}
	for i := range r.Holders {
		recorded[r.Holders[i].Work.String()] = true
	}
	for _, c := range listed {
		work := holders.Work{Orchestrator: holders.Kubernetes, Namespace: c.Namespace, Container: c.Container, Claim: c.Name}
		if c.Driver != resourceslice.Driver || recorded[work.String()] {
			continue
		}
		if d, ok := deviceOf(inv, c); ok {
			r.Holders = append(r.Holders, holders.Holder{Work: work, API: inventory.DRA, Device: d.ID, At: d.At})
		} else {
			r.Complete, r.Missing = false, "the end of pod "+c.Pod+", whose "+work.String()+" has a device "+c.Device+" that this agent does not offer"
		}
	}
	return r
}

// pluginHolders are the pods that have devices through device plugins, for the DRA adapter. Without the kubelet's list of pods (listed) what device
// plugins once gave out does not count on a GPU that has come to dra: that was forced, and nothing shows whether a pod still has it.
func pluginHolders(all []holders.Holder, listed bool, inv *inventory.Allocatable) []holders.Holder {
	if listed {
		return all
	}
	return slices.DeleteFunc(all, func(h holders.Holder) bool {
		one, ok := inv.Owner(h.At.GPU)
		return ok && one.API == inventory.DRA && one.Pending == ""
	})
}

// deviceOf returns the device of a claim, which may be offered or not.
func deviceOf(inv *inventory.Allocatable, c podresources.Claim) (gpu.Device, bool) {
	for d := range inv.Hardware() {
		if c.Names(d) {
			return d, true
		}
	}
	return gpu.Device{}, false
}
