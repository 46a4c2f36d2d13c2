package core

import (
	"iter"
	"slices"
	"time"
)

// UnitID names a unit to the orchestrators: the device's ID (at most 63 characters, the kubelet's limit).
type UnitID string

// Unit is what one request consumes.
type Unit struct {
	ID     UnitID
	Device Device
	Health Health
}

// Inventory is what the machine offers now. It is immutable; a nil *Inventory offers nothing.
type Inventory struct {
	driver      Driver
	units       []Unit // in canonical order
	excluded    []Exclusion
	links       []Link
	nodes       []string
	deviceNodes bool
	byID        map[UnitID]int // index into units
	retired     map[UnitID]time.Time
}

// Build says what a reading and its conditions mean under a configuration. It never fails: what can't
// be offered is in Excluded, with the reason.
func Build(s Snapshot, l Ledger, c Config) *Inventory {
	inv := &Inventory{
		driver: s.Driver, excluded: slices.Clone(s.Excluded), links: s.Links, nodes: s.Nodes, deviceNodes: c.DeviceNodes,
	}
	wanted := selectDevices(s.Devices, c.MIG)
	l = l.under(c.Health.Mode)
	for _, d := range s.Devices {
		reason := wanted(d)
		if slices.Contains(c.Exclude, d.ID) {
			reason = "ignored by configuration"
		}
		switch reason {
		case "":
			inv.units = append(inv.units, Unit{ID: UnitID(d.ID), Device: d, Health: healthUnder(c.Health.Mode, l.Health(d.At))})
		case hidden:
		default:
			inv.excluded = append(inv.excluded, Exclusion{Index: d.Index, At: d.At, PCI: d.PCI, Reason: reason})
		}
	}
	slices.SortFunc(inv.excluded, compareExclusions)
	return inv.indexed()
}

// healthUnder is a verdict with what the mode makes of it. Maintenance is none, but an order.
func healthUnder(mode HealthMode, h Health) Health {
	h.Advisory = mode == ModeObserve && h.State > Degraded && h.Reason != ReasonMaintenance
	return h
}

// hidden marks a device that is not offered because another view of the same hardware is.
const hidden = "hidden"

// selectDevices returns why the strategy does not offer a device: "" if it does.
func selectDevices(devices []Device, strategy MIGStrategy) func(Device) string {
	switch strategy {
	case MIGMixed:
		return func(d Device) string {
			if d.MIG {
				return instead(d, devices)
			}
			return ""
		}
	case MIGSingle:
		profile := commonProfile(devices)
		return func(d Device) string {
			switch {
			case d.MIG:
				return instead(d, devices)
			case d.Profile == profile:
				return ""
			case d.Profile == "":
				return "mig-strategy single: MIG mode is off on this GPU"
			}
			return "mig-strategy single: profile " + d.Profile + " differs from this node's " + profile
		}
	default: // MIGNone
		return func(d Device) string {
			if d.Profile != "" {
				return hidden
			}
			return ""
		}
	}
}

// instead says why a GPU in MIG mode is not offered itself.
func instead(gpu Device, devices []Device) string {
	if slices.ContainsFunc(devices, func(d Device) bool { return d.Profile != "" && d.At.GPU == gpu.ID }) {
		return hidden
	}
	return "MIG mode is on and there are no MIG instances"
}

// commonProfile is the profile with the most instances, the lesser name among equals; "" without any.
func commonProfile(devices []Device) string {
	count := map[string]int{}
	best := ""
	for _, d := range devices {
		if p := d.Profile; p != "" {
			count[p]++
		}
	}
	for p, n := range count {
		if best == "" || n > count[best] || n == count[best] && p < best {
			best = p
		}
	}
	return best
}

func (inv *Inventory) indexed() *Inventory {
	inv.byID = make(map[UnitID]int, len(inv.units))
	for i, u := range inv.units {
		inv.byID[u.ID] = i
	}
	return inv
}

// Succeed returns inv as the successor of prev: a unit that prev offered and inv does not stays listed
// as unhealthy until grace has passed since it went, because an orchestrator may be about to hand it
// out (kubelet 1.37 can panic when an ID vanishes under an allocation).
func (inv *Inventory) Succeed(prev *Inventory, now time.Time, grace time.Duration) *Inventory {
	next := *inv
	next.units, next.retired = slices.Clone(inv.units), map[UnitID]time.Time{}
	for u := range prev.Units() {
		if _, ok := inv.byID[u.ID]; ok {
			continue
		}
		since, ok := prev.retired[u.ID]
		if !ok {
			since = now
		}
		if now.Sub(since) >= grace {
			continue
		}
		u.Health = Health{State: Unhealthy, Reason: ReasonWithdrawn}
		next.units = append(next.units, u)
		next.retired[u.ID] = since
	}
	slices.SortFunc(next.units, func(a, b Unit) int { return compareDevices(a.Device, b.Device) })
	return next.indexed()
}

// Retiring reports whether units wait to be dropped: Succeed once more when their grace has passed.
func (inv *Inventory) Retiring() bool { return inv != nil && len(inv.retired) > 0 }

// Driver is the state of the driver behind the inventory.
func (inv *Inventory) Driver() Driver {
	if inv == nil {
		return Driver{}
	}
	return inv.driver
}

// Units yields every unit in canonical order.
func (inv *Inventory) Units() iter.Seq[Unit] {
	return func(yield func(Unit) bool) {
		if inv == nil {
			return
		}
		for _, u := range inv.units {
			if !yield(u) {
				return
			}
		}
	}
}

// Len is the number of units.
func (inv *Inventory) Len() int {
	if inv == nil {
		return 0
	}
	return len(inv.units)
}

// Unit looks a unit up.
func (inv *Inventory) Unit(id UnitID) (Unit, bool) {
	if inv == nil {
		return Unit{}, false
	}
	i, ok := inv.byID[id]
	if !ok {
		return Unit{}, false
	}
	return inv.units[i], true
}

// Excluded lists what was seen and is not offered, with reasons.
func (inv *Inventory) Excluded() []Exclusion {
	if inv == nil {
		return nil
	}
	return slices.Clone(inv.excluded)
}

// Equal reports whether two inventories offer the same, so that publishing the other would be noise.
func (inv *Inventory) Equal(other *Inventory) bool {
	if inv == nil || other == nil {
		return inv == other
	}
	return inv.driver == other.driver &&
		slices.Equal(inv.units, other.units) &&
		slices.Equal(inv.excluded, other.excluded) &&
		slices.Equal(inv.links, other.links) &&
		slices.Equal(inv.nodes, other.nodes) &&
		inv.deviceNodes == other.deviceNodes
}
