package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Describe puts an inventory into words.
func Describe(inv *core.Inventory) Report {
	d := inv.Driver()
	r := Report{
		Driver:  Driver{State: d.State.String(), Version: d.Version, CUDA: d.CUDA, Reason: d.Reason},
		Devices: describeDevices(inv), Excluded: []Excluded{}, Conditions: []Condition{}, Counts: []Count{},
		PolicyWarnings: append(append([]string{}, inv.PolicyWarnings()...), inv.OutdatedBindings()...), Overlaps: []Overlap{}, Bindings: DescribeBindings(inv.PositionBindings()),
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		if at, ok := inv.Numbering().Of(d.ID); ok && at.String() != d.index() {
			d.Number = at.String()
		}
	}
	for _, e := range inv.Excluded() {
		x := Excluded{Index: e.Index, PCI: e.PCI, Reason: e.Reason}
		if e.At.GPU != "" {
			x.ID = e.At.String()
		}
		r.Excluded = append(r.Excluded, x)
	}
	for _, c := range inv.Overlaps() {
		i := slices.IndexFunc(r.Devices, func(d Device) bool { return d.ID == c.Device })
		r.Overlaps = append(r.Overlaps, Overlap{ID: c.Device, Index: r.Devices[i].Index, By: c.Agent})
	}
	return r
}

// describeDevices has a device once for all of its units that are alike.
func describeDevices(inv *core.Inventory) []Device {
	devices := []Device{}
	var first core.Unit // of the latest device
	for u := range inv.Units() {
		if u.Device.ID == first.Device.ID && u.Pool == first.Pool && u.Sharing == first.Sharing && u.Health == first.Health {
			devices[len(devices)-1].Replicas++
			continue
		}
		d := describeUnit(u)
		if missing, _ := inv.MissingNodes(u.Device); len(missing) > 0 {
			d.MissingNodes, d.CreateNodes = missing, u.Device.CreateNodesCommand(missing)
		}
		devices, first = append(devices, d), u
	}
	return devices
}

func describeUnit(u core.Unit) Device {
	d := Device{
		ID: u.Device.ID, GPU: u.Device.At.GPU, Index: u.Device.Index, Model: u.Device.Model, Profile: u.Device.Profile,
		PCI: u.Device.PCI, NUMANode: u.Device.NUMANode, MemoryBytes: u.Device.Memory,
		Schedulable: u.Health.Schedulable(), Health: u.Health.String(),
		State: u.Health.State, Cause: u.Health.Cause(), Since: u.Health.Since, Action: u.Health.Action,
		Clears: u.Health.Clears, Limits: u.Health.Limitations, Simulated: u.Health.Simulated, Advisory: u.Health.Advisory,
		Pool: u.Pool, Sharing: u.Sharing.Mode.String(), OnePerRequest: u.Sharing.OnePerRequest,
		ClientMemory: u.Sharing.Memory, ClientThreads: u.Sharing.Threads,
		Serial: u.Device.Serial, Architecture: u.Device.Architecture, Brand: u.Device.Brand,
		ECC: u.Device.ECC.String(), NVLinks: u.Device.NVLinks,
	}
	if u.Sharing.Mode != core.Exclusive {
		d.Replicas = 1
	}
	if u.Device.Profile != "" {
		d.Instance = new(u.Device.Instance)
	}
	if u.Device.Compute != (core.Compute{}) {
		d.ComputeCapability = u.Device.Compute.String()
	}
	if u.Health.RecoveryAction > core.RecoveryNone {
		d.Asks = u.Health.RecoveryAction.String()
	}
	return d
}

// DescribeState puts a state into words: what is offered, what stands against it and since when, and how often
// each GPU has reported what. Notes are about the agent itself.
func DescribeState(s core.State, cfg core.Config, notes ...string) Report {
	r := Describe(s.Inventory)
	r.Warnings = slices.Concat(notes, describeUnlisted(s, r.Excluded))
	r.Conditions = append(r.Conditions, DescribeConditions(s, cfg, s.Ledger.Conditions())...)
	counted := map[core.DeviceID]bool{}
	for _, d := range s.Snapshot.Devices {
		chart, ok := s.Ledger.History(d.At.GPU)
		if !ok || counted[d.At.GPU] {
			continue
		}
		counted[d.At.GPU] = true
		for _, t := range slices.SortedFunc(slices.Values(chart.FaultCounts), func(a, b core.FaultCount) int {
			return cmp.Or(cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Code, b.Code))
		}) {
			cause := core.Condition{Reason: t.Reason, Code: t.Code}.Cause()
			r.Counts = append(r.Counts, Count{GPU: d.At.GPU, Index: d.Index, Cause: cause, Count: t.Count, Last: t.Last})
		}
	}
	return r
}

// describeUnlisted says what the kernel log has of PCI addresses where no GPU is listed: with the exclusion of a GPU that
// is there, else in a note.
func describeUnlisted(s core.State, excluded []Excluded) (notes []string) {
	codes := map[core.PCIAddress]string{}
	each, _ := s.UnlistedXIDs()
	for _, x := range each {
		codes[x.PCI] += fmt.Sprintf(", %d", x.Code)
	}
	for i, e := range excluded {
		if of, ok := codes[e.PCI]; ok && e.ID == "" {
			excluded[i].Reason += "; the kernel log has XID " + of[len(", "):]
			delete(codes, e.PCI)
		}
	}
	for _, pci := range slices.Sorted(maps.Keys(codes)) {
		notes = append(notes, fmt.Sprintf("the kernel log has XID %s of %s, where no GPU is listed", codes[pci][len(", "):], pci))
	}
	return notes
}

// DescribeConditions puts conditions of a state into words, the node's first and then by GPU.
func DescribeConditions(s core.State, cfg core.Config, conditions []core.Condition) []Condition {
	now := time.Now()
	words := make([]Condition, 0, len(conditions))
	for _, c := range conditions {
		w := Condition{
			At: c.At.String(), GPU: c.At.GPU, Index: index(s, c.At.GPU), Cause: c.Cause(), State: c.State,
			Noted: c.State == core.Healthy, Detail: c.Detail, Since: c.Since, Last: c.Last, Count: c.Count,
			Action: c.Action(), Clears: c.Clears(), Simulated: c.Simulated,
		}
		switch {
		case c.IgnoredUntil.Equal(core.IgnoredForever):
			w.Disregarded = true
		case !c.IgnoredUntil.IsZero():
			w.IgnoredUntil = c.IgnoredUntil
		case !c.ClearingSince.IsZero() && !w.Noted:
			dwell := s.Ledger.Dwell(cfg.Health, now, c)
			w.Recovering = &Recovery{
				Since: c.ClearingSince, Checks: min(c.CleanChecks, cfg.Health.CleanChecks), ChecksWanted: cfg.Health.CleanChecks,
				Held: int(min(now.Sub(c.ClearingSince), dwell).Seconds()), HeldWanted: int(dwell.Seconds()),
			}
		}
		words = append(words, w)
	}
	slices.SortStableFunc(words, func(a, b Condition) int { return cmp.Compare(a.Index, b.Index) })
	return words
}

// index is that of a physical GPU; -1 if it has none.
func index(s core.State, gpu core.DeviceID) int {
	for _, d := range s.Snapshot.Devices {
		if d.At.GPU == gpu {
			return d.Index
		}
	}
	return -1
}
