package core

import (
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Checkpoint is the part of a State that is kept on disk over a restart of the agent, so that no fault is cleared
// or forgotten by a restart. Its JSON encoding is the format of the file.
type Checkpoint struct {
	BootID           string             // /proc/sys/kernel/random/boot_id
	BootTime         time.Time          `json:",omitzero"`  // when the node booted, on the clock of the times below; zero = unknown
	NotReadSinceBoot bool               `json:",omitempty"` // devices and links are those of an earlier boot: the driver has not been read in this one
	Driver           string             // version of the driver when it was last ready
	Maintenance      health.Maintenance `json:",omitzero"`
	Binding          inventory.Binding  `json:",omitzero"`
	Devices          []gpu.Device
	Links            []gpu.Link `json:",omitempty"` // NVLinks between the devices
	Conditions       []health.Condition
	GPUs             map[gpu.DeviceID]health.GPUHistory
	KernelLog        uint64 `json:",omitempty"` // next sequence number to read from the kernel log of that boot; 0 = unknown

	// UnconfirmedGPUs are the GPUs, sorted, of a history that may belong to another node. All other GPUs in the
	// checkpoint were read on this node.
	UnconfirmedGPUs []gpu.DeviceID `json:",omitempty"`

	// FaultsUnknown means that a former record could not be read completely: each GPU that is not in GPUs may have
	// a fault. It ends with a snapshot that lists all GPUs.
	FaultsUnknown bool `json:",omitempty"`
}

// Checkpoint returns what to keep of the state. The boot argument is the boot ID of the node. Simulated faults,
// and what is valid only within this process, are left out.
func (s State) Checkpoint(boot string) Checkpoint {
	r := Checkpoint{
		BootID: boot, BootTime: s.bootTime, Maintenance: s.Maintenance, Binding: s.Binding,
		Devices: slices.Clone(s.Snapshot.Devices), Links: s.Snapshot.NVLinks(),
		KernelLog: s.kernelLog.nextSequence, UnconfirmedGPUs: slices.Clone(s.unconfirmedGPUs),
		FaultsUnknown: s.faultsUnknown.pending,
	}
	if s.priorDevices != nil {
		r.Devices, r.Links, r.NotReadSinceBoot = slices.Clone(s.priorDevices), slices.Clone(s.priorLinks), s.rebooted
	}
	return r.withLedger(s.Ledger.Checkpoint())
}

func (r Checkpoint) ledger() health.Checkpoint {
	return health.Checkpoint{Driver: r.Driver, Conditions: r.Conditions, GPUs: r.GPUs}
}

func (r Checkpoint) withLedger(l health.Checkpoint) Checkpoint {
	r.Driver, r.Conditions, r.GPUs = l.Driver, l.Conditions, l.GPUs
	return r
}

// Restore returns the state that follows from a checkpoint. It offers nothing before the first snapshot.
// Conditions remain, except those that a reboot clears. The times of r must be on the present clock: see
// Checkpoint.Rebase.
func Restore(cfg Config, r Checkpoint, boot string) State {
	s := NewState(cfg)
	rebooted := r.BootID != boot
	s.Ledger = health.Restore(cfg.Health, r.ledger(), rebooted)
	if r.FaultsUnknown && (!rebooted || !health.UnknownFaultsEnd(cfg.Health)) {
		s.faultsUnknown = unknownFaults{pending: true, seen: sortedIDs(slices.Collect(maps.Keys(r.GPUs)))}
	}
	known := gpu.NewSnapshot(gpu.Snapshot{Devices: r.Devices, Links: r.Links})
	s.priorDevices, s.priorLinks, s.bootTime, s.rebooted = known.Devices, known.Links, r.BootTime, rebooted || r.NotReadSinceBoot
	if s.unconfirmedGPUs = sortedIDs(r.UnconfirmedGPUs); len(s.unconfirmedGPUs) == 0 {
		s.unconfirmedGPUs = r.gpuIDs()
	}
	if !rebooted { // a reboot ends maintenance, loads the driver again and begins another kernel log
		s.Maintenance = r.Maintenance
		s.kernelLog.nextSequence = r.KernelLog
		s.Binding = r.Binding
		s.Binding.Numbering = inventory.NewNumbering(r.Binding.Numbering.Generation, r.Binding.Numbering.Numbers)
		s.Binding.Unconfirmed = len(s.unconfirmedGPUs) > 0
		s.Inventory = inventory.Build(s.buildInput(cfg))
		s.Allocatable = s.Inventory.WithoutHost()
	}
	return s
}
