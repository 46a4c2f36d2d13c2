package monitor

import (
	"log/slog"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// logChange writes one line per device for each difference between two inventories, whatever the number of its units.
func logChange(log *slog.Logger, prev, next *inventory.Inventory) {
	switch d := next.Driver(); {
	case d == prev.Driver():
	case d.State == gpu.DriverReady:
		log.Info("driver ready", "version", d.Version, "cuda", d.CUDA)
	default:
		log.Info("driver "+d.State.String(), "reason", d.Reason)
	}
	was, is := byDevice(prev), byDevice(next)
	for u := range next.Devices() {
		old, known := was[u.Device.ID]
		if !known {
			log.Info("device found", "id", u.Device.ID, "model", u.Device.Model, "pci", u.Device.PCI,
				"pool", u.Pool, "sharing", u.Sharing.String(), "health", u.Health.String())
			continue
		}
		if old.Pool != u.Pool || old.Sharing != u.Sharing {
			log.Info("device pool or sharing changed", "id", u.Device.ID, "pci", u.Device.PCI, "pool", u.Pool, "sharing", u.Sharing.String(),
				"was", old.Pool+" "+old.Sharing.String())
		}
		old.Health.MissingNodes = u.Health.MissingNodes // logDedup logs these, once for all devices
		if old.Health != u.Health {
			logTransition(log, u, old.Health)
		}
	}
	for u := range prev.Devices() {
		if _, ok := is[u.Device.ID]; !ok {
			log.Info("device gone", "id", u.Device.ID, "pci", u.Device.PCI)
		}
	}
	for _, e := range without(next.Excluded(), prev.Excluded()) {
		id := "unknown"
		if e.At.GPU != "" {
			id = e.At.String()
		}
		log.Warn("device excluded", "index", e.Index, "id", id, "pci", e.PCI, "reason", e.Reason)
	}
}

// logTransition writes the new health of a device with its cause, the driver's recovery action, the remedy and what clears it;
// or, when the device recovered, the health and cause before, and what cleared them.
func logTransition(log *slog.Logger, u inventory.Unit, old health.Health) {
	line := log.With("id", u.Device.ID, "pci", u.Device.PCI)
	if u.Health.State == health.Healthy {
		line.Info("device healthy", "was", old.String(), "cause", old.Cause(), "clears", old.Clears)
		return
	}
	write := line.Info
	if !u.Health.Schedulable() {
		write = line.Warn
	}
	write("device "+u.Health.State.String(), "health", u.Health.String(), "cause", u.Health.Cause(),
		"action", u.Health.Action, "clears", u.Health.Clears, "was", old.State.String())
}
