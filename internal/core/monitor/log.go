package monitor

import (
	"log/slog"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// logChange writes one line per device for each difference between two values, whatever the number of its units.
func logChange(log *slog.Logger, prev, next *inventory.Allocatable) {
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
		if old.Health != u.Health && !driverTextOnly(old.Health, u.Health) {
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

// driverTextOnly reports whether two healths differ only in why the driver can't be used: the line about the driver has that.
func driverTextOnly(old, next health.Health) bool {
	old.Detail = next.Detail
	return next.Reason == health.ReasonDriver && old == next
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

// logDedup holds the warnings that were logged about the policy, other agents, device nodes and the kernel log, so that each
// is logged once when it begins and once when it ends. A kind of operational events is logged once.
type logDedup struct {
	warnings []string // of the policy
	drift    []string
	overlaps []inventory.Overlap
	nodes    []string // missing device nodes
	unlisted []core.UnlistedXID

	operational []operationalKind
}

// operationalKind is a kind of operational events of one GPU.
type operationalKind struct {
	gpu   gpu.DeviceID
	event health.OperationalEvent
}

// maxOperationalKinds bounds the kinds of operational events that are logged: a driver may invent more.
const maxOperationalKinds = 256

// logOperational logs the first operational event of each kind. The counts are in the history.
func (l *logDedup) logOperational(log *slog.Logger, obs []health.Observation) {
	for _, o := range obs {
		kind := operationalKind{o.At.GPU, o.Operational}
		if o.Kind != health.Operational || len(l.operational) >= maxOperationalKinds || slices.Contains(l.operational, kind) {
			continue
		}
		l.operational = append(l.operational, kind)
		line := log.With("id", o.At.GPU, "event", o.Operational.Cause(), "detail", o.Operational.Detail())
		if o.Operational.Dropped() {
			line.Warn("the driver dropped operational events, of which one may have been a fault")
		} else {
			line.Info("operational event of the driver")
		}
	}
}

// log writes the warnings that a state begins and ends.
//
// A warning of the policy ends only if all GPUs were read: while a GPU or the driver does not answer, it is not known which
// devices the policy selects, and the same warning would end and begin with each such reading.
func (l *logDedup) log(log *slog.Logger, state core.State) {
	ready := state.Snapshot.Driver.State == gpu.DriverReady
	warnings, drift := state.Inventory.PolicyWarnings(), state.Inventory.OutdatedBindings()
	if !ready || len(state.Snapshot.Excluded) > 0 {
		warnings, drift = union(l.warnings, warnings), union(l.drift, drift)
	}
	difference(&l.drift, drift, func(d string) {
		log.Warn("device order changed, the policy still selects the same devices", "position", d)
	}, func(d string) {
		log.Info("the policy selects devices by the present order again", "position", d)
	})
	difference(&l.warnings, warnings, func(w string) {
		log.Error("the policy does not match this node", "warning", w)
	}, func(w string) {
		log.Info("the policy matches this node again", "warning", w)
	})
	difference(&l.overlaps, state.Allocatable.Overlaps(), func(o inventory.Overlap) {
		log.Warn("device is also offered by another agent", "id", o.Device, "other", o.Agent, "action", "give the agents different GPUs")
	}, func(o inventory.Overlap) {
		log.Info("device is no longer offered by another agent", "id", o.Device, "other", o.Agent)
	})
	if ready { // without a driver the nodes are unknown
		difference(&l.nodes, nodeWarnings(state.Allocatable), func(n string) {
			log.Warn("device nodes missing, containers that start now do not get them", "missing", n)
		}, func(n string) {
			log.Info("device nodes no longer missing", "missing", n)
		})
	}
	unlisted, _ := state.UnlistedXIDs()
	difference(&l.unlisted, union(l.unlisted, unlisted), func(x core.UnlistedXID) {
		log.Warn("kernel log has an XID for a PCI address without a listed GPU", "pci", x.PCI, "xid", x.Code)
	}, nil)
}

// difference replaces the values in logged by the present ones and calls begin and end for those that are new or gone.
func difference[T comparable](logged *[]T, present []T, begin, end func(T)) {
	for _, v := range without(present, *logged) {
		begin(v)
	}
	for _, v := range without(*logged, present) {
		end(v)
	}
	*logged = present
}

// nodeWarnings are the warnings of missing device nodes in the health of any device, each once.
func nodeWarnings(inv *inventory.Allocatable) (warnings []string) {
	for u := range inv.Devices() {
		if w := u.Health.MissingNodes; w != "" && !slices.Contains(warnings, w) {
			warnings = append(warnings, w)
		}
	}
	return warnings
}

// without are the elements of all that are not in others, in their order.
func without[T comparable](all, others []T) []T {
	return slices.DeleteFunc(slices.Clone(all), func(v T) bool { return slices.Contains(others, v) })
}

func union[T comparable](a, b []T) []T { return append(slices.Clone(a), without(b, a)...) }
