package monitor

import (
	"errors"
	"log/slog"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// fold is the monitor's memory: the last reading (with the devices that fell silent since) and the
// ledger. Its methods return the inventory that follows.
type fold struct {
	cfg       core.Config
	snapshot  core.Snapshot
	ledger    core.Ledger
	inventory *core.Inventory
}

// read takes in a full reading.
func (f *fold) read(reading core.Snapshot) *core.Inventory {
	snapshot, obs := core.Reconcile(f.snapshot, reading)
	f.snapshot = snapshot
	return f.observe(obs...)
}

// observe takes in what happened.
func (f *fold) observe(obs ...core.Observation) *core.Inventory {
	now := time.Now()
	located := make([]core.Observation, len(obs))
	for i, o := range obs {
		located[i] = f.snapshot.Locate(o)
	}
	f.ledger = f.ledger.Apply(f.cfg.Health, now, located...)
	f.inventory = core.Build(f.snapshot, f.ledger, f.cfg).Succeed(f.inventory, now, f.cfg.Retire)
	return f.inventory
}

// noDriver takes in that there is no session, and why. Devices that were seen stay, unhealthy.
func (f *fold) noDriver(err error) *core.Inventory {
	state := core.DriverFailed
	if errors.Is(err, core.ErrNoDriver) {
		state = core.DriverAbsent
	}
	return f.read(core.NoDriver(state, err.Error()))
}

// logChange writes one line per difference between two inventories.
func logChange(log *slog.Logger, prev, next *core.Inventory) {
	switch d := next.Driver(); {
	case d == prev.Driver():
	case d.State == core.DriverReady:
		log.Info("driver ready", "version", d.Version, "cuda", d.CUDA)
	default:
		log.Info("driver "+d.State.String(), "reason", d.Reason)
	}
	for u := range next.Units() {
		old, known := prev.Unit(u.ID)
		switch {
		case !known:
			log.Info("device found", "id", u.ID, "model", u.Device.Model, "pci", u.Device.PCI, "health", u.Health.String())
		case old.Health != u.Health && u.Health.Schedulable():
			log.Info("device "+u.Health.String(), "id", u.ID, "pci", u.Device.PCI, "was", old.Health.String())
		case old.Health != u.Health:
			log.Warn("device "+u.Health.String(), "id", u.ID, "pci", u.Device.PCI, "was", old.Health.String())
		}
	}
	for u := range prev.Units() {
		if _, ok := next.Unit(u.ID); !ok {
			log.Info("device gone", "id", u.ID, "pci", u.Device.PCI)
		}
	}
	seen := map[core.Exclusion]bool{}
	for _, e := range prev.Excluded() {
		seen[e] = true
	}
	for _, e := range next.Excluded() {
		if !seen[e] {
			id := "unknown"
			if e.At.GPU != "" {
				id = e.At.String()
			}
			log.Warn("device excluded", "index", e.Index, "id", id, "pci", e.PCI, "reason", e.Reason)
		}
	}
}
