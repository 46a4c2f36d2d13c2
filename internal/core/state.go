package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// State is all that is known of a node: the latest snapshot (including devices that stopped responding), the
// ledger of conditions, the inventory that follows from both, and what of it takes work on this node now. It is immutable: each method
// returns another State. NewState and Restore make one.
type State struct {
	Snapshot    gpu.Snapshot
	Ledger      health.Ledger
	Inventory   *inventory.Inventory
	Host        inventory.Host
	Allocatable *inventory.Allocatable // follows from Inventory and Host
	Binding     inventory.Binding
	Incarnation int                // of the driver: see Inventory.Incarnation
	Maintenance health.Maintenance // the zero value while the driver may be called
	Release     Release
	Foreign     *ForeignHistory // the health history that was dropped because it belongs to another node; nil = none was

	// priorDevices are the devices of the checkpoint, until the first snapshot shows which of them exist. If
	// rebooted, they are those of an earlier boot.
	priorDevices []gpu.Device
	priorLinks   []gpu.Link // links between priorDevices
	rebooted     bool
	bootTime     time.Time // when the node booted; zero = unknown

	unconfirmedGPUs []gpu.DeviceID // GPUs of the checkpoint, sorted, until one of them is found or the checkpoint proves to be another node's

	nodesSeen []string // device nodes of the latest snapshot and those added since, sorted

	kernelLog     kernelLogState
	faultsUnknown unknownFaults

	built inventory.Config // that Inventory was built with
}

// NewState returns the state before the first snapshot.
func NewState(cfg Config) State {
	s := State{Snapshot: gpu.NoDriver(gpu.DriverPending, "not asked yet"), built: cfg.Config}
	s.Inventory = Build(s.Snapshot, s.Ledger, cfg)
	s.Allocatable = s.Inventory.WithoutHost()
	return s
}

// Read applies a snapshot and the health checks that were made with it. If the node was rebooted and the driver is not
// ready, the devices of the checkpoint stay pending until it is. While the driver has not answered, they are listed:
// see ListPrior.
func (s State) Read(cfg Config, now time.Time, reading gpu.Snapshot, checks ...health.Observation) State {
	s = s.withoutForeign(reading)
	prev := s.Snapshot
	if s.Host.Ownership.DriverReleased == "" {
		s.Release = Release{}
	}
	if s.priorDevices != nil {
		switch state := reading.Driver.State; {
		case state == gpu.DriverReady || !s.rebooted:
			prev.Devices, prev.Links = s.priorDevices, s.priorLinks
			s.priorDevices, s.priorLinks = nil, nil
		case state == gpu.DriverPending:
			prev.Devices, prev.Links = s.priorDevices, s.priorLinks
		default: // listed while the driver had not answered
			prev.Devices, prev.Links = nil, nil
		}
	}
	prev.Driver.Version = s.Ledger.LoadedDriver()
	prev.Devices = s.withoutForgotten(cfg.Health, now, prev.Devices, reading)
	if reading.Driver.State == gpu.DriverReady && s.Snapshot.Driver.State != gpu.DriverReady {
		s.Incarnation++
	}
	snapshot, obs := Reconcile(prev, reading)
	s.Snapshot, s.nodesSeen = snapshot, snapshot.Nodes
	s.Ledger = s.Ledger.Relocate(s.Snapshot)
	s = s.withUnlisted(now, reading).withUnknownFaults(cfg, now, reading)
	if reading.Driver.State == gpu.DriverReady {
		obs = append(obs, s.takePending()...)
	}
	return s.Observe(cfg, now, slices.Concat(obs, checks)...)
}

// AwaitsDriver reports whether the devices of the checkpoint are not listed because the driver has not answered yet.
func (s State) AwaitsDriver() bool {
	return s.Snapshot.Driver.State == gpu.DriverPending && len(s.priorDevices) > 0 && len(s.Snapshot.Devices) == 0
}

// ListPrior lists the devices of the checkpoint, unhealthy, until the driver has answered: nvmlInit takes 20 seconds
// after a reset of a large machine, and an orchestrator would take a list without devices for their removal. The
// checkpoint may be of an earlier boot, or of another node (UnconfirmedGPUs): what the driver does not list leaves with
// its first answer. No position is bound to such devices.
func (s State) ListPrior(cfg Config, now time.Time) State {
	if !s.AwaitsDriver() {
		return s
	}
	return s.Read(cfg, now, gpu.NoDriver(gpu.DriverPending, "it has not answered since the agent started"))
}

// Observe applies observations. Without any it applies the passage of time.
func (s State) Observe(cfg Config, now time.Time, obs ...health.Observation) State {
	located := make([]health.Observation, 0, len(obs))
	for _, o := range obs {
		if o.Reported.IsZero() {
			o.Reported = now
		}
		if o, ok := s.locate(o); ok {
			located = append(append(located, o), expandToInstances(s.Snapshot, o)...)
		}
	}
	s.Ledger = s.Ledger.Apply(cfg.Health, now, located...)
	complete := slices.ContainsFunc(obs, func(o health.Observation) bool { return o.Complete })
	if complete && len(s.kernelLog.pending) == 0 { // otherwise it waits, too
		s = s.withKnownFaults(cfg, now)
	}
	return s.rebuild(cfg, now)
}

// WithHost applies the state of the node apart from the driver.
func (s State) WithHost(cfg Config, now time.Time, h inventory.Host) State {
	if !h.Ownership.Equal(s.Host.Ownership) {
		s.Ledger = s.Ledger.WithTaken(now, h.Ownership.Taken())
	}
	if id := h.Ownership.DriverReleased; id != "" && id != s.Host.Ownership.DriverReleased {
		s = s.releaseDriver(now, id)
	}
	s.Host = h
	return s.rebuild(cfg, now)
}

// Clear removes conditions by an operator's command: see Ledger.Clear.
func (s State) Clear(cfg Config, now time.Time, o health.Command) (State, []health.Condition, error) {
	ledger, cleared, err := s.Ledger.Clear(cfg.Health, now, o)
	if err != nil {
		return s, nil, err
	}
	s.Ledger = ledger
	return s.rebuild(cfg, now), cleared, nil
}

// Ignore ignores conditions by an operator's command: see Ledger.Ignore.
func (s State) Ignore(cfg Config, now time.Time, o health.Command, until time.Time) (State, []health.Condition, error) {
	ledger, ignored, err := s.Ledger.Ignore(cfg.Health, now, o, until)
	if err != nil {
		return s, nil, err
	}
	s.Ledger = ledger
	return s.rebuild(cfg, now), ignored, nil
}

// ProofFailed records that a GPU failed its proof: see Ledger.ProofFailed.
func (s State) ProofFailed(cfg Config, now time.Time, id gpu.DeviceID, f health.ProofFailure) State {
	s.Ledger = s.Ledger.ProofFailed(cfg.Health, now, id, f)
	return s.rebuild(cfg, now)
}

// ProofPassed records that a GPU passed its proof: see Ledger.ProofPassed.
func (s State) ProofPassed(cfg Config, now time.Time, id gpu.DeviceID) State {
	s.Ledger = s.Ledger.ProofPassed(cfg.Health, now, id)
	return s.rebuild(cfg, now)
}

func (s State) rebuild(cfg Config, now time.Time) State {
	before, ofEarlierBoot := s.Binding, s.priorDevices != nil && len(s.Snapshot.Devices) > 0
	// Until a GPU of the checkpoint is found, the numbers in it may be another node's: no number is added, none is
	// shared.
	doubtful := len(s.unconfirmedGPUs) > 0
	if !doubtful || s.Snapshot.Driver.State != gpu.DriverReady {
		s.Binding.Numbering, s.Binding.Proposed = s.Binding.Numbering.Update(s.Snapshot, s.Host)
	}
	s.Binding.Unconfirmed = doubtful
	s.built = cfg.Config
	s.Inventory = inventory.Build(s.buildInput(cfg)).WithNodeWarnings(s.nodesSeen)
	if s.Binding = s.Inventory.Binding(); ofEarlierBoot {
		s.Binding = before
	}
	host := s.Host
	host.Ownership.DriverReleased = s.Release.GPU
	s.Allocatable = s.Inventory.WithHost(host, cfg.Overlap).WithRetiring(s.Allocatable, now, cfg.Retire)
	return s
}

// Rebind binds the positions of the policy (indices, counts, the common MIG profile) to devices by their present
// order. This can change what a device is offered as, so no work should run on it. A GPU that the driver does not
// list gets a number only if no listed GPU has that number. Rebind returns ErrNoDriver, and does not change the
// state, unless the driver is ready.
func (s State) Rebind(cfg Config, now time.Time) (State, error) {
	if s.Snapshot.Driver.State != gpu.DriverReady {
		return s, fmt.Errorf("the present order of devices is unknown: %w", gpu.ErrNoDriver)
	}
	lost, present := s.Ledger.Lost(s.Snapshot.Devices), s.Snapshot
	present.Devices = slices.DeleteFunc(slices.Clone(present.Devices), func(d gpu.Device) bool { return lost[d.ID] })
	next := inventory.Numbering{Generation: s.Binding.Numbering.Generation + 1}
	s.Binding = inventory.Binding{Numbering: next.Initial(present)}
	return s.rebuild(cfg, now), nil
}

// Numbering returns the numbers of the devices. It is empty while they may be those of another node.
func (s State) Numbering() inventory.Numbering { return s.confirmedBinding().Numbering }

// ProposedNumbering returns Numbering with the numbers that new devices will have when the agents of the node have shared them.
func (s State) ProposedNumbering() inventory.Numbering { return s.confirmedBinding().Proposed }

func (s State) confirmedBinding() inventory.Binding {
	if s.Binding.Unconfirmed {
		return inventory.Binding{}
	}
	return s.Binding
}

// NeedsTick reports whether the passage of time can change the state. If so, call Observe periodically.
func (s State) NeedsTick() bool {
	return s.Ledger.NeedsTick() && !s.keepsVerdicts() || s.Allocatable.Retiring()
}

// withoutForgotten returns the devices without those that the driver has not listed for health.Policy.RemoveLostAfter. None is removed while the
// driver lists a GPU that can't be identified: it may be one of them.
func (s State) withoutForgotten(p health.Policy, now time.Time, devices []gpu.Device, reading gpu.Snapshot) []gpu.Device {
	if !listsAll(reading) {
		return devices
	}
	forgotten := func(d gpu.Device) bool {
		since := s.Ledger.UnlistedSince(d.At.GPU)
		if since.IsZero() {
			return false
		}
		if s.bootTime.After(since) {
			since = s.bootTime // how long the node was off is unknown: the wall clock may have changed at the boot
		}
		return now.Sub(since) >= p.RemoveLostAfter
	}
	return slices.DeleteFunc(slices.Clone(devices), func(d gpu.Device) bool { return forgotten(d) && !lists(reading, d) })
}

// withUnlisted records which GPUs of the present snapshot a reading does not list.
func (s State) withUnlisted(now time.Time, reading gpu.Snapshot) State {
	if !listsAll(reading) {
		return s
	}
	unlisted := map[gpu.DeviceID]bool{}
	for _, d := range s.Snapshot.Devices {
		if !lists(reading, d) {
			unlisted[d.At.GPU] = true
		}
	}
	s.Ledger = s.Ledger.WithUnlisted(now, unlisted)
	return s
}

// listsAll reports whether a GPU that a reading does not list was not there.
func listsAll(reading gpu.Snapshot) bool {
	return reading.Driver.State == gpu.DriverReady && !slices.ContainsFunc(reading.Excluded, gpu.Exclusion.Unidentified)
}

// lists reports whether a reading has the GPU of a device, whether that could be read or not.
func lists(reading gpu.Snapshot, d gpu.Device) bool {
	return slices.ContainsFunc(reading.Devices, func(e gpu.Device) bool { return e.At.GPU == d.At.GPU }) ||
		slices.ContainsFunc(reading.Excluded, func(e gpu.Exclusion) bool { return e.Matches(d) })
}

// WithNodes applies a new list of the node's device nodes, in sorted order.
//
// Plans and MissingNodes change immediately. The warning in a unit's health ends immediately too, but begins only
// with a complete snapshot: each change of a health text is a write on Nomad's servers, and this limits a node
// that comes and goes to one change per snapshot (once a minute by default).
func (s State) WithNodes(cfg Config, now time.Time, nodes []string) State {
	s.Snapshot.Nodes = nodes
	s.nodesSeen = slices.Compact(slices.Sorted(slices.Values(slices.Concat(s.nodesSeen, nodes))))
	return s.rebuild(cfg, now)
}

func (s State) buildInput(cfg Config) inventory.Input {
	return inventory.Input{
		Snapshot: s.Snapshot, Ledger: s.Ledger, Config: cfg.Config, Mode: cfg.Health.Mode, Binding: s.Binding, Incarnation: s.Incarnation,
	}
}

// Decisions returns what the configuration makes of each device of the state, and which part of it decides: see inventory.Decisions.
func (s State) Decisions() []inventory.Decision {
	return inventory.Decisions(inventory.Input{Snapshot: s.Snapshot, Ledger: s.Ledger, Config: s.built, Binding: s.Binding})
}

// Config returns what Inventory was built with.
func (s State) Config() inventory.Config { return s.built }

// Build returns the inventory of a node that is read for the first time: positions in the policy mean the present
// order of devices.
func Build(s gpu.Snapshot, l health.Ledger, c Config) *inventory.Inventory {
	state := State{Snapshot: s, Ledger: l, Binding: inventory.Binding{Numbering: inventory.Numbering{}.Initial(s)}}
	return inventory.Build(state.buildInput(c))
}

// EnterMaintenance records that the driver is not called from now on. Units stay in the inventory, but take no
// work.
func (s State) EnterMaintenance(cfg Config, now time.Time, m health.Maintenance) State {
	s.Maintenance = m
	return s.Read(cfg, now, gpu.NoDriver(gpu.DriverReleased, m.String()))
}

// ExitMaintenance records that the driver may be called again. The inventory changes with the next snapshot.
func (s State) ExitMaintenance() State {
	s.Maintenance = health.Maintenance{}
	return s
}
