package kube

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// devices are those of one node while it is translated.
type devices struct {
	t      *translation
	node   *node
	report report
	named  map[gpu.DeviceID]rescue.Device
	kinds  map[string]rescue.Device
}

func newDevices(t *translation, n *node, r report) *devices {
	d := &devices{t: t, node: n, report: r, named: map[gpu.DeviceID]rescue.Device{}, kinds: map[string]rescue.Device{}}
	for i := range r.faults {
		d.name(faultyDevice(&r.faults[i]))
	}
	for kind, units := range n.allocatable.gpus {
		d.add(kind, r.allocatable(kind, units))
	}
	for kind, units := range t.dra.free(n, r) {
		d.add(kind, units)
	}
	return d
}

// name adds a device with an ID.
func (d *devices) name(one rescue.Device) {
	if _, ok := d.named[one.ID]; !ok {
		one.Healthy = d.report.healthy(one.At)
		d.named[one.ID] = one
	}
}

// add adds units of a kind.
func (d *devices) add(kind string, units int) {
	one := d.kinds[kind]
	one.ID, one.At, one.Kind = gpu.DeviceID(kind), gpu.WholeGPU(gpu.DeviceID(kind)), kind
	one.Units += units
	d.kinds[kind] = one
}

// list has all devices of the node, in order. If not all of its faults are known, it has no free units.
func (d *devices) list() (all []rescue.Device) {
	for _, dev := range d.t.dra.onNode[d.node.name] {
		d.name(rescue.Device{ID: dev.id, At: dev.at(d.report, "")})
	}
	for _, kind := range slices.Sorted(maps.Keys(d.kinds)) {
		one := d.kinds[kind]
		one.Healthy = one.Units > 0 && d.report.whole()
		all = append(all, one)
	}
	for _, id := range slices.Sorted(maps.Keys(d.named)) {
		all = append(all, d.named[id])
	}
	return all
}

// holds are the devices that a pod has on the node: units of kinds, and those with IDs.
func (d *devices) holds(p *pod) (all []rescue.Hold) {
	units := d.t.dra.counted(p, d.report)
	for kind, n := range units {
		d.add(kind, n) // they were not free
	}
	for kind, n := range p.requests.gpus {
		if n > 0 && !p.byClaim(kind) {
			d.add(kind, 0)
			units[kind] = n
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(units)) {
		all = append(all, rescue.Hold{Device: gpu.DeviceID(kind), Units: units[kind]})
	}
	known, claimed := d.t.dra.holds(p, d.report)
	for _, one := range claimed {
		d.name(one)
	}
	for _, h := range p.devices {
		d.name(rescue.Device{ID: h.Device, At: d.at(h, p)})
	}
	known = append(known, p.devices...)
	if len(known) == 0 && p.requests.some() {
		known = d.byAgent(p)
	}
	return append(all, known...)
}

// byClaim reports whether an extended resource of the pod is served by a claim.
func (p *pod) byClaim(kind string) bool {
	return slices.ContainsFunc(p.claims, func(c podClaim) bool {
		return slices.Contains(slices.Collect(maps.Values(c.resources)), kind)
	})
}

// byAgent are the devices of a pod whose status shows none, as in Kubernetes before 1.36: by its requests it has some, and the agent names it as a
// holder of those with faults.
func (d *devices) byAgent(p *pod) (all []rescue.Hold) {
	seen := map[gpu.DeviceID]bool{}
	for i := range d.report.faults {
		f := &d.report.faults[i]
		id := faultyDevice(f).ID
		if slices.Contains(f.Holders, p.uid) && !seen[id] {
			seen[id] = true
			all = append(all, rescue.Hold{Device: id})
		}
	}
	return all
}

// at is where a device of a pod's status is. The API server does not show of which GPU a MIG instance is. So it is where the agent reports that the pod has
// faulty hardware, if it is the pod's only instance, or shown as unhealthy. Else it is taken for one without a fault, and the agent's report
// about the pod then differs from it, which permits no act.
func (d *devices) at(h rescue.Hold, p *pod) gpu.Placement {
	if !strings.HasPrefix(string(h.Device), "MIG-") {
		return gpu.WholeGPU(h.Device)
	}
	if at, ok := oldInstance(h.Device); ok {
		return at
	}
	if h.Shown == rescue.ShownUnhealthy || len(p.devices) == 1 {
		for i := range d.report.faults {
			if f := &d.report.faults[i]; slices.Contains(f.Holders, p.uid) {
				return f.At
			}
		}
	}
	return gpu.WholeGPU(h.Device)
}

// oldInstance parses an ID of drivers before 470: MIG-GPU-UUID/GI/CI.
func oldInstance(id gpu.DeviceID) (gpu.Placement, bool) {
	parts := strings.Split(strings.TrimPrefix(string(id), "MIG-"), "/")
	if len(parts) != 3 {
		return gpu.Placement{}, false
	}
	gi, err := strconv.ParseUint(parts[1], 10, 32)
	ci, err2 := strconv.ParseUint(parts[2], 10, 32)
	return gpu.Placement{GPU: gpu.DeviceID(parts[0]), GI: uint32(gi), CI: uint32(ci)}, cmp.Or(err, err2) == nil
}
