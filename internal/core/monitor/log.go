package monitor

import (
	"log/slog"

	"github.com/tandem-gpu/tandem/internal/core"
)

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
		case old.Health != u.Health:
			logTransition(log, u, old.Health)
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

// logTransition says what a device is now and why: the cause, what the driver wants, what to do and what
// clears it; or, when it got well, what it got well from and what that took.
func logTransition(log *slog.Logger, u core.Unit, old core.Health) {
	line := log.With("id", u.ID, "pci", u.Device.PCI)
	if u.Health.State == core.Healthy {
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
