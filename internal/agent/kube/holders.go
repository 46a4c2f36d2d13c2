package kube

import (
	"cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/node/assignment"
)

// readers read the records of what pods have through the APIs of the kubelet, for the moves of GPUs between APIs. claims are those that the DRA
// adapter has prepared in this boot, nil until they are read; without such an adapter it is a nil function. A GPU is known to have no
// holder only while the kubelet lists all pods: what was prepared may have been lost with its folder. Without that list what device plugins
// once gave out is no reason against a forced move.
func readers(plugins *deviceplugin.Adapter, claims func() []prepared.Claim, current func() *inventory.Inventory) assignment.Readers {
	return assignment.Readers{
		inventory.DevicePlugin: func() assignment.Record { return plugins.Record().Unconfirmed() },
		inventory.DRA: func() assignment.Record {
			listed, h := plugins.Claims()
			all := []prepared.Claim{}
			if claims != nil {
				all = claims()
			}
			return claimRecord(all, listed, current(), h)
		},
	}
}

// claimRecord returns the claims that have GPUs: by what is prepared, and by the kubelet's list, which has also those whose record was lost.
func claimRecord(all []prepared.Claim, listed []podresources.Claim, inv *inventory.Inventory, h assignment.Holders) assignment.Record {
	if all == nil {
		h.Known, h.Why = false, "the prepared claims, which are not read yet; does the disk of state_dir respond?"
	}
	by, recorded := map[gpu.DeviceID][]string{}, map[string]bool{}
	for _, c := range all {
		name := "claim " + c.Namespace + "/" + c.Name
		recorded[name] = true
		for _, r := range c.Results {
			if !r.Admin {
				by[r.At.GPU] = append(by[r.At.GPU], name)
			}
		}
	}
	for _, c := range listed {
		name := "claim " + cmp.Or(c.Namespace, "?") + "/" + c.Name
		if c.Driver != resourceslice.Driver || recorded[name] {
			continue
		}
		if of, ok := gpuOf(inv, c); ok {
			by[of] = append(by[of], name)
		} else {
			h.Known, h.Why = false, "the end of pod "+c.Pod+", whose "+name+" has a device "+c.Device+" that this agent does not offer"
		}
	}
	return assignment.NewRecord(h, by)
}

// pluginHolder returns the pod that has hardware through a device plugin, by holder. Without the kubelet's list of pods (listed) what device
// plugins once gave out does not count on a GPU that has come to dra: that was forced, and nothing shows whether a pod still has it.
func pluginHolder(holder func(gpu.Placement) (string, bool), listed bool, inv *inventory.Inventory, at gpu.Placement) (string, bool) {
	if one, ok := inv.Assignment(at.GPU); !listed && ok && one.API == inventory.DRA && one.Moving == "" {
		return "", false
	}
	return holder(at)
}

// gpuOf returns the physical GPU of a claim's device.
func gpuOf(inv *inventory.Inventory, c podresources.Claim) (gpu.DeviceID, bool) {
	for d := range inv.Hardware() {
		if c.Names(d) {
			return d.At.GPU, true
		}
	}
	return "", false
}
