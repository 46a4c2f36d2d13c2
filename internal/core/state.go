package core

import (
	"fmt"
	"slices"
	"time"
)

// State is everything that is known of a machine: the last reading (with the devices that fell silent
// since), the ledger, and the inventory that follows from both. It is immutable: each method returns
// another. Make one with NewState or Restore.
type State struct {
	Snapshot    Snapshot
	Ledger      Ledger
	Inventory   *Inventory
	Host        Host
	Binding     Binding
	Maintenance Maintenance     // the zero value while the driver may be asked
	Foreign     *ForeignHistory // the history that was dropped, as it is another machine's; nil = none was

	// priorDevices are the devices of an earlier process of the agent, until the first reading shows what became of
	// them; of an earlier boot of the machine too, if rebooted.
	priorDevices []Device
	priorLinks   []Link // between those
	rebooted     bool
	bootTime     time.Time // when the machine booted; zero = unknown

	unconfirmedGPUs []DeviceID // GPUs of the history, sorted, until one of them is read or the history is another machine's

	nodesSeen []string // device nodes of the last complete reading and those that came since, sorted

	kernelLog kernelLogState
}

// NewState is the state before anybody has asked the driver.
func NewState(cfg Config) State {
	s := State{Snapshot: NoDriver(DriverPending, "not asked yet")}
	s.Inventory = Build(s.Snapshot, s.Ledger, cfg)
	return s
}

// Read takes in a reading and what the checks that came with it said. After a reboot a driver that can't
// be asked says nothing about the devices of before.
func (s State) Read(cfg Config, now time.Time, reading Snapshot, checks ...Observation) State {
	s = s.withoutForeign(reading)
	prev := s.Snapshot
	if s.priorDevices != nil && (reading.Driver.State == DriverReady || !s.rebooted) {
		prev.Devices, prev.Links = s.priorDevices, s.priorLinks
		s.priorDevices, s.priorLinks = nil, nil
	}
	prev.Devices = s.withoutForgotten(cfg.Health, now, prev.Devices, reading)
	snapshot, obs := Reconcile(prev, reading)
	s.Snapshot, s.nodesSeen = snapshot, snapshot.Nodes
	s.Ledger = s.Ledger.Relocate(s.Snapshot)
	if reading.Driver.State == DriverReady {
		obs = append(obs, s.takePending()...)
	}
	return s.Observe(cfg, now, slices.Concat(obs, checks)...)
}

// Observe takes in what happened. Without observations it lets the time pass.
func (s State) Observe(cfg Config, now time.Time, obs ...Observation) State {
	located := make([]Observation, 0, len(obs))
	for _, o := range obs {
		if o, ok := s.locate(o); ok {
			located = append(append(located, o), expandToInstances(s.Snapshot, o)...)
		}
	}
	s.Ledger = s.Ledger.Apply(cfg.Health, now, located...)
	return s.rebuild(cfg, now)
}

// WithHost takes in what the host has beside the driver.
func (s State) WithHost(cfg Config, now time.Time, h Host) State {
	s.Host = h
	return s.rebuild(cfg, now)
}

// Clear drops conditions by an operator's order: see Ledger.Clear.
func (s State) Clear(cfg Config, now time.Time, o Command) (State, []Condition, error) {
	ledger, cleared, err := s.Ledger.Clear(cfg.Health, now, o)
	if err != nil {
		return s, nil, err
	}
	s.Ledger = ledger
	return s.rebuild(cfg, now), cleared, nil
}

// Ignore disregards conditions by an operator's order: see Ledger.Ignore.
func (s State) Ignore(cfg Config, now time.Time, o Command, until time.Time) (State, []Condition, error) {
	ledger, ignored, err := s.Ledger.Ignore(cfg.Health, now, o, until)
	if err != nil {
		return s, nil, err
	}
	s.Ledger = ledger
	return s.rebuild(cfg, now), ignored, nil
}

func (s State) rebuild(cfg Config, now time.Time) State {
	// Until a GPU of the history is read, its numbers may be another machine's: none is given beside them, or told to others.
	doubtful := len(s.unconfirmedGPUs) > 0
	if !doubtful || s.Snapshot.Driver.State != DriverReady {
		s.Binding.Numbering, s.Binding.Proposed = s.Binding.Numbering.Update(s.Snapshot, s.Host)
	}
	s.Binding.Unconfirmed = doubtful
	inv := BuildInventory(s.Snapshot, s.Ledger, cfg.InventoryConfig, cfg.Health.Mode, s.Binding)
	s.Binding = inv.Binding()
	s.Inventory = inv.WithHost(s.Host, cfg.Overlap).WithNodeWarnings(s.nodesSeen).WithRetiring(s.Inventory, now, cfg.Retire)
	return s
}

// Rebind binds the positions of the policy to the devices that they mean by the present order: numbers are those of the
// driver, counts and the common MIG profile are decided anew. A device may be offered as something else then, so no work
// should be on it. A GPU that the driver does not list gets a number only if none that is listed has it. It fails with
// ErrNoDriver, and changes nothing, while the driver does not answer.
func (s State) Rebind(cfg Config, now time.Time) (State, error) {
	if s.Snapshot.Driver.State != DriverReady {
		return s, fmt.Errorf("the present order of devices is unknown: %w", ErrNoDriver)
	}
	lost, present := s.Ledger.Lost(s.Snapshot.Devices), s.Snapshot
	present.Devices = slices.DeleteFunc(slices.Clone(present.Devices), func(d Device) bool { return lost[d.ID] })
	next := Numbering{Generation: s.Binding.Numbering.Generation + 1}
	s.Binding = Binding{Numbering: next.Initial(present)}
	return s.rebuild(cfg, now), nil
}

// NeedsTick reports whether time alone can change the state: Observe now and then.
func (s State) NeedsTick() bool { return s.Ledger.NeedsTick() || s.Inventory.Retiring() }

// withoutForgotten are the devices without those that the driver has not listed for so long that they are not
// coming back.
func (s State) withoutForgotten(p HealthPolicy, now time.Time, devices []Device, reading Snapshot) []Device {
	if reading.Driver.State != DriverReady {
		return devices
	}
	listed := func(d Device) bool {
		return slices.ContainsFunc(reading.Devices, func(e Device) bool { return e.At.GPU == d.At.GPU }) ||
			slices.ContainsFunc(reading.Excluded, func(e Exclusion) bool { return e.Matches(d) })
	}
	conditions := s.Ledger.Conditions()
	lost := func(d Device) bool {
		return slices.ContainsFunc(conditions, func(c Condition) bool {
			since := c.Last
			if s.bootTime.After(since) {
				since = s.bootTime // how long the machine was off is unknown: the wall clock may have jumped at the boot
			}
			return c.At == WholeGPU(d.At.GPU) && c.Reason == ReasonLost && now.Sub(since) >= p.Forget
		})
	}
	return slices.DeleteFunc(slices.Clone(devices), func(d Device) bool { return lost(d) && !listed(d) })
}

// WithNodes takes in which device nodes the host has now, in sorted order.
//
// Plans and MissingNodes change at once. The warning in a unit's health ends at once, but begins with a complete reading of
// the machine only: each change of a health line makes Nomad's servers write, and a node that comes and goes changes it
// not more often than the machine is read (once a minute).
func (s State) WithNodes(cfg Config, now time.Time, nodes []string) State {
	s.Snapshot.Nodes = nodes
	s.nodesSeen = slices.Compact(slices.Sorted(slices.Values(slices.Concat(s.nodesSeen, nodes))))
	return s.rebuild(cfg, now)
}

// Build returns the inventory of a machine that is read for the first time: positions in the policy mean the present order.
func Build(s Snapshot, l Ledger, c Config) *Inventory {
	return BuildInventory(s, l, c.InventoryConfig, c.Health.Mode, Binding{Numbering: Numbering{}.Initial(s)})
}

// EnterMaintenance enters that the driver is left alone from now on. Units stay, and take no work.
func (s State) EnterMaintenance(cfg Config, now time.Time, m Maintenance) State {
	s.Maintenance = m
	return s.Read(cfg, now, NoDriver(DriverReleased, m.String()))
}

// ExitMaintenance enters that the driver may be asked again. What is offered changes with the first reading.
func (s State) ExitMaintenance() State {
	s.Maintenance = Maintenance{}
	return s
}
