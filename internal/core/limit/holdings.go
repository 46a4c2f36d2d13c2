package limit

import (
	"cmp"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Holdings returns what work has of full GPUs by a record, one for each work and GPU, in order. Their groups are not known. Units that are not offered any more
// have no limit: work keeps the one that it had, see Record. The limit with which a container was created is that of the record of the kubelet, which creates it again
// with the same after a change of the policy.
func Holdings(r holders.Record, inv *inventory.Allocatable) (all []Holding) {
	type key struct {
		work holders.Work
		gpu  gpu.DeviceID
	}
	units, created := map[key][]inventory.Unit{}, map[key]uint64{}
	for _, h := range r.Holders {
		k := key{h.Work, h.Device}
		if h.Work.ID == "" || inv == nil || !isGPU(inv, h.Device) {
			continue
		}
		if _, known := units[k]; !known {
			all = append(all, Holding{Work: h.Work, GPU: h.Device, Way: wayOf(h, r), Runs: r.Tasks[h.Work].Running})
		}
		u, offered := inv.Unit(h.Unit)
		if !offered && h.API == inventory.DRA && h.Unit == "" { // by the kubelet's list, which has no unit
			u, offered = limitedUnit(inv, h.Device)
		}
		if !offered {
			u = inventory.Unit{}
		}
		u.ID = h.Unit
		units[k] = append(units[k], u)
		created[k] = max(created[k], h.Memory)
	}
	for i := range all {
		h := &all[i]
		for _, u := range units[key{h.Work, h.GPU}] {
			if u.ID != "" {
				h.Units = append(h.Units, u.ID)
			}
			if u.Memory > 0 {
				h.Pool, h.Required = u.Pool, h.Required || u.Sharing.Limit == inventory.LimitRequired
			}
		}
		h.Bytes = cmp.Or(created[key{h.Work, h.GPU}], inv.LimitPolicy().MemoryLimits(units[key{h.Work, h.GPU}])[h.GPU])
	}
	slices.SortStableFunc(all, func(a, b Holding) int { return compareShares(a.share(), b.share()) })
	return all
}

// limitedUnit is a share of a GPU, if claims get shares of it with a limit.
func limitedUnit(inv *inventory.Allocatable, id gpu.DeviceID) (inventory.Unit, bool) {
	for u := range inv.Devices() {
		if u.Device.ID == id && u.Memory > 0 && u.API == inventory.DRA {
			return u, true
		}
	}
	return inventory.Unit{}, false
}

// isGPU reports whether a device is a full GPU of the node, offered or not.
func isGPU(inv *inventory.Allocatable, id gpu.DeviceID) bool {
	for d := range inv.Hardware() {
		if d.ID == id {
			return d.At == gpu.WholeGPU(id)
		}
	}
	return false
}

// WithPods returns holdings with the pods of a state that they lack: the kubelet lists a pod some time after its claims were prepared.
func WithPods(all []Holding, pods []Pod, inv *inventory.Allocatable) []Holding {
	for _, p := range pods {
		if slices.ContainsFunc(all, func(h Holding) bool { return h.Way == ByPod && h.Work.ID == p.Work.ID && h.GPU == p.GPU }) {
			continue
		}
		u, _ := limitedUnit(inv, p.GPU)
		all = append(all, Holding{Work: p.Work, GPU: p.GPU, Pool: u.Pool, Way: ByPod, Required: u.Sharing.Limit == inventory.LimitRequired})
	}
	return all
}

// wayOf is how the limit of a holder comes to its group.
func wayOf(h holders.Holder, r holders.Record) Way {
	switch {
	case h.API == inventory.DRA:
		return ByPod
	case h.API == inventory.DevicePlugin, r.Tasks[h.Work].InContainer():
		return ByHook
	}
	return ByTask
}
