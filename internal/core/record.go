package core

import (
	"slices"
	"time"
)

// Checkpoint is what of a State survives the agent, so that a restart neither heals a sick GPU nor forgets one.
// Its JSON form is what the state file holds.
type Checkpoint struct {
	BootID           string      `json:"Boot"`             // of the machine: /proc/sys/kernel/random/boot_id
	BootTime         time.Time   `json:"Booted,omitzero"`  // its moment, on the clock of the times below; zero = unknown
	NotReadSinceBoot bool        `json:"Unread,omitempty"` // devices and links are those of an earlier boot: the driver has not been read in this one
	Driver           string      // version of the driver that was asked last
	Maintenance      Maintenance `json:"Away,omitzero"`
	Binding          Binding     `json:",omitzero"`
	Devices          []Device
	Links            []Link `json:",omitempty"` // NVLinks between those
	Conditions       []Condition
	GPUs             map[DeviceID]GPUHistory `json:"Charts"`
	KernelLog        uint64                  `json:",omitempty"` // sequence number to go on with in the log of that boot; 0 = unknown

	// UnconfirmedGPUs are the GPUs of the history before, sorted, if it may be another machine's. The other GPUs in the record were read
	// on this machine.
	UnconfirmedGPUs []DeviceID `json:"Inherited,omitempty"`
}

// Checkpoint is the state to keep; boot is the machine's boot id. Rehearsals, and what only this process can know, are left out.
func (s State) Checkpoint(boot string) Checkpoint {
	r := Checkpoint{
		BootID: boot, BootTime: s.bootTime, Maintenance: s.Maintenance, Binding: s.Binding,
		Devices: slices.Clone(s.Snapshot.Devices), Links: s.Snapshot.NVLinks(),
		KernelLog: s.kernelLog.nextSequence, UnconfirmedGPUs: slices.Clone(s.unconfirmedGPUs),
	}
	if s.priorDevices != nil {
		r.Devices, r.Links, r.NotReadSinceBoot = slices.Clone(s.priorDevices), slices.Clone(s.priorLinks), s.rebooted
	}
	return r.withLedger(s.Ledger.Checkpoint())
}

func (r Checkpoint) ledger() LedgerCheckpoint {
	return LedgerCheckpoint{Driver: r.Driver, Conditions: r.Conditions, GPUs: r.GPUs}
}

func (r Checkpoint) withLedger(l LedgerCheckpoint) Checkpoint {
	r.Driver, r.Conditions, r.GPUs = l.Driver, l.Conditions, l.GPUs
	return r
}

// Restore is the state that follows from a record: nothing is offered before the driver was asked, but what
// stood still stands. A reboot is evidence for what it clears; what only an operator can clear outlives it. The times of r
// are on the present clock: see Record.Rebase.
func Restore(cfg Config, r Checkpoint, boot string) State {
	s := NewState(cfg)
	rebooted := r.BootID != boot
	s.Ledger = RestoreLedger(cfg.Health, r.ledger(), rebooted)
	known := NewSnapshot(Snapshot{Devices: r.Devices, Links: r.Links})
	s.priorDevices, s.priorLinks, s.bootTime, s.rebooted = known.Devices, known.Links, r.BootTime, rebooted || r.NotReadSinceBoot
	if s.unconfirmedGPUs = sortedIDs(r.UnconfirmedGPUs); len(s.unconfirmedGPUs) == 0 {
		s.unconfirmedGPUs = r.gpuIDs()
	}
	if !rebooted { // which ends a maintenance, and loads the driver anew anyhow
		s.Maintenance = r.Maintenance
		s.Binding = r.Binding
		s.Binding.Numbering = NewNumbering(r.Binding.Numbering.Generation, r.Binding.Numbering.Numbers)
		if !r.NotReadSinceBoot && len(r.Binding.Numbering.Numbers) == 0 {
			s.Binding.Numbering = s.Binding.Numbering.Initial(known) // a history of an agent that kept no numbers
		}
		s.Binding.Unconfirmed = len(s.unconfirmedGPUs) > 0
		s.Inventory = BuildInventory(s.Snapshot, s.Ledger, cfg.InventoryConfig, cfg.Health.Mode, s.Binding)
	}
	s.kernelLog = restoreKernelLog(r, rebooted || r.NotReadSinceBoot && r.KernelLog == 0)
	return s
}
