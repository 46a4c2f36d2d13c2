package core

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Checkpoint is what of a State survives the agent, so that a restart neither heals a sick GPU nor forgets one.
// Its JSON form is what the state file holds.
type Checkpoint struct {
	Boot        string      // of the machine: /proc/sys/kernel/random/boot_id
	Booted      time.Time   `json:",omitzero"`  // its moment, on the clock of the times below; zero = unknown
	Unread      bool        `json:",omitempty"` // devices and links are those of an earlier boot: the driver has not been read in this one
	Driver      string      // version of the driver that was asked last
	Maintenance Maintenance `json:"Away,omitzero"`
	Binding     Binding     `json:",omitzero"`
	Devices     []Device
	Links       []Link `json:",omitempty"` // NVLinks between those
	Conditions  []Condition
	GPUs        map[DeviceID]GPUHistory `json:"Charts"`
	KernelLog   uint64                  `json:",omitempty"` // sequence number to go on with in the log of that boot; 0 = unknown

	// Inherited are the GPUs of the history before, sorted, if it may be another machine's. The other GPUs in the record were read
	// on this machine.
	Inherited []DeviceID `json:",omitempty"`
}

// Checkpoint is the state to keep; boot is the machine's boot id. Rehearsals, and what only this process can know, are left out.
func (s State) Checkpoint(boot string) Checkpoint {
	r := Checkpoint{
		Boot: boot, Booted: s.booted, Driver: s.Ledger.driver, Maintenance: s.Maintenance, Binding: s.Binding,
		Devices: slices.Clone(s.Snapshot.Devices), Links: s.Snapshot.NVLinks(), GPUs: map[DeviceID]GPUHistory{},
		KernelLog: s.log.next, Inherited: slices.Clone(s.inherited),
	}
	if s.prior != nil {
		r.Devices, r.Links, r.Unread = slices.Clone(s.prior), slices.Clone(s.links), s.rebooted
	}
	for _, c := range s.Ledger.conditions {
		if c.At.GPU != "" && !c.Simulated && c.Reason != ReasonUnchecked {
			r.Conditions = append(r.Conditions, c)
		}
	}
	for gpu, chart := range s.Ledger.charts {
		r.GPUs[gpu] = *chart
	}
	return r
}

// Restore is the state that follows from a record: nothing is offered before the driver was asked, but what
// stood still stands. A reboot is evidence for what it clears; what only an operator can clear outlives it. The times of r
// are on the present clock: see Record.Rebase.
func Restore(cfg Config, r Checkpoint, boot string) State {
	s := NewState(cfg)
	rebooted := r.Boot != boot
	known := NewSnapshot(Snapshot{Devices: r.Devices, Links: r.Links})
	s.prior, s.links, s.booted, s.rebooted = known.Devices, known.Links, r.Booted, rebooted || r.Unread
	if s.inherited = sortedIDs(r.Inherited); len(s.inherited) == 0 {
		s.inherited = r.gpus()
	}
	if !rebooted { // which ends a maintenance, and loads the driver anew anyhow
		s.Ledger.driver, s.Maintenance = r.Driver, r.Maintenance
		s.Binding = r.Binding
		s.Binding.Numbering = NewNumbering(r.Binding.Numbering.Generation, r.Binding.Numbering.Numbers)
		if !r.Unread && len(r.Binding.Numbering.Numbers) == 0 {
			s.Binding.Numbering = s.Binding.Numbering.seeFirst(known) // a history of an agent that kept no numbers
		}
		s.Inventory = build(s.Snapshot, s.Ledger, cfg, s.Binding)
		s.Inventory.doubtful = len(s.inherited) > 0
	}
	s.log = logOf(r, rebooted || r.Unread && r.KernelLog == 0)
	s.Ledger.charts = make(map[DeviceID]*GPUHistory, len(r.GPUs))
	for gpu, chart := range r.GPUs {
		if rebooted {
			chart.Sample, chart.Links, chart.Joined = HealthSample{}, 0, false
			chart.Tallies = settled(chart.Tallies)
		}
		s.Ledger.charts[gpu] = chart.clone()
	}
	for _, c := range r.Conditions {
		if rebooted && clearedByReboot(cfg.Health, c) {
			continue
		}
		if chart := s.Ledger.charts[c.At.GPU]; chart != nil && c.At.GI == Whole && c.Reason == ReasonLost && !chart.Reset.After(c.Last) {
			chart.lost = true // its return is a sign of a reset, whoever sees it
		}
		c.Clearing, c.Clean = time.Time{}, 0
		s.Ledger.conditions = append(s.Ledger.conditions, c)
	}
	s.Ledger.conditions = united(s.Ledger.conditions)
	return s
}

func clearedByReboot(p HealthPolicy, c Condition) bool {
	clears := c.Reason.meaning().clears
	if rule := c.rule(p); rule.Class != 0 {
		clears = rule.Clears
	}
	return clears&xid.Reboot != 0 && (!p.Manual || c.State < Unhealthy)
}
