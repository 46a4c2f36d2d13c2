package inventory

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Input is what an inventory is built from.
type Input struct {
	Snapshot gpu.Snapshot
	Ledger   health.Ledger
	Config   Config
	Mode     health.Mode
	Binding  Binding // what is bound already; each device must have its number

	Incarnation int // of the driver: see Inventory.Incarnation
}

// Build returns the inventory of a snapshot and a ledger under a configuration. It never fails: devices that
// can't be offered are in Excluded, with the reason.
func Build(in Input) *Inventory {
	s, c := in.Snapshot, in.Config
	inv := &Inventory{
		driver: s.Driver, listed: slices.Clone(s.Devices), excluded: slices.Clone(s.Excluded), links: s.Links, nodes: s.Nodes,
		incarnation: in.Incarnation, indexIDs: c.IndexIDs, packed: c.Packed, limitPolicy: c.Policy.Limits,
	}
	if c.IMEXChannel {
		_, inv.imexChannel = slices.BinarySearch(s.Nodes, gpu.IMEXChannelNode)
		inv.imexMissing = c.IMEXRequired && !inv.imexChannel
	}
	lost := in.Ledger.Lost(s.Devices)
	all := newOfferBuilder(s, c, in.Binding, lost)
	l := in.Ledger.ForMode(in.Mode)
	offers, units := make([]Offer, len(s.Devices)), 0
	for i := range s.Devices {
		if offers[i] = all.decide(&s.Devices[i]); offers[i].Outcome == Offered {
			units += max(offers[i].Sharing.Replicas, 1)
		}
	}
	inv.units = make([]Unit, 0, units)
	for i, o := range offers {
		d := &s.Devices[i]
		switch o.Outcome {
		case Offered:
			inv.appendUnits(d, o, c.API, inv.healthOf(l, in.Mode, d))
		case NotOffered:
			inv.excluded = append(inv.excluded, gpu.Exclusion{Index: d.Index, At: d.At, PCI: d.PCI, Reason: o.Reason})
		case Represented:
		}
	}
	for i := range inv.units {
		way := &inv.units[i].Injection
		inv.injectsNodes = inv.injectsNodes || way.Nodes || way.CDI != CDIOff
		inv.needsCDI = inv.needsCDI || way.CDI != CDIOff || way.Libraries
	}
	inv.binding, inv.positionBindings, inv.awaitsNumber = all.binding(), all.positionBindings(), all.awaitsNumber
	if s.Driver.State == gpu.DriverReady && len(s.Excluded) == 0 && !all.awaitsNumber { // otherwise the selected device may be missing
		inv.policyWarnings = all.unmatchedRules()
		if len(inv.positionBindings) > 0 {
			inv.outdatedBindings = all.outdatedBindings(presentOrder(s, c, lost))
		}
	}
	inv.policyWarnings = append(inv.policyWarnings, mixedPoolWarnings(inv.units)...)
	slices.SortFunc(inv.excluded, gpu.CompareExclusions)
	inv.unitList = newUnitList(inv.units)
	return inv
}

// presentOrder returns the offers as if all devices except the lost ones were seen for the first time.
func presentOrder(s gpu.Snapshot, c Config, lost map[gpu.DeviceID]bool) *offerBuilder {
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d gpu.Device) bool { return lost[d.ID] })
	fresh := newOfferBuilder(s, c, Binding{Numbering: Numbering{}.Initial(s)}, nil)
	for i := range s.Devices {
		fresh.decide(&s.Devices[i])
	}
	return fresh
}

// appendUnits appends the units of a device: one, or one for each replica.
func (inv *Inventory) appendUnits(d *gpu.Device, o Offer, through API, h health.Health) {
	u := Unit{ID: UnitID(d.ID), Device: *d, Pool: o.Pool, Sharing: o.Sharing, Injection: o.Injection, Memory: o.Memory, Health: h, API: through}
	if o.Sharing.Mode == Exclusive {
		inv.units = append(inv.units, u)
		return
	}
	for u.Replica = range o.Sharing.Replicas {
		u.ID = replicaID(d.ID, u.Replica)
		inv.units = append(inv.units, u)
	}
}

// applyMode sets Advisory for unhealthy units under ModeObserve. Maintenance is not advisory: the driver can't be
// used.
func applyMode(mode health.Mode, h health.Health) health.Health {
	h.Advisory = mode == health.ModeObserve && h.State > health.Degraded && h.Reason != health.ReasonMaintenance
	return h
}
