package metrics

import (
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/util/metric"
)

// The metrics of health. The label "device" is an offered device, once however many share it; "gpu" is a physical GPU, as faults
// are faults of GPUs.
var (
	deviceHealth = shared.Gauge("device_health", "1 for the state of the device, 0 for the other states.", "device", "model", "state")
	condition    = shared.Gauge("device_condition",
		"An active condition of a GPU or MIG instance (no gpu: of the node), or another cause for which it takes no work, such as HELD: 1, or 0 if it has no effect or an operator ignores it. action is what to do about it.",
		"gpu", "gi", "ci", "cause", "state", "simulated", "action")
	xidErrors = shared.Counter("xid_errors_total",
		"XID errors reported. Codes that can make a GPU unhealthy have a series from the start; unknown codes share one.", "gpu", "xid")
	unlistedXIDs = shared.Counter("xid_errors_unlisted_total",
		"XIDs in the kernel log with PCI addresses where the driver lists no GPU; inspect and the log name them.")
	nvmlEvents  = shared.Counter("events_total", "Faults that the driver reported as NVML events other than XIDs.", "gpu", "event")
	operational = shared.Counter("operational_events_total",
		"Operational events of the driver (from 615 on), which are no faults. Severities that have no name share one series.", "gpu", "severity")
	eventsDropped  = shared.Counter("operational_events_dropped_total", "Operational events before which the driver dropped others.", "gpu")
	transitions    = shared.Counter("health_transitions_total", "Changes of the device's health state.", "device")
	recoveryAction = shared.Gauge("gpu_recovery_action",
		"1 for the recovery action that the driver reports for the GPU, 0 for the other actions.", "gpu", "action")
	checks    = shared.Summary("health_check_duration_seconds", "Duration of health checks of all GPUs.")
	lastCheck = shared.Gauge("last_health_check_timestamp_seconds", "End of the latest health check; 0 = none yet.")
	stuck     = shared.Gauge("driver_calls_stuck", "Driver calls that are past their deadline.")
	sourceUp  = shared.Gauge("health_source_up",
		"1 if a source of health information can be used for every GPU. A source that is switched off has no series.", "source")
)

// collectHealth adds the metrics of health. The devices and the table of XIDs bound their number.
func collectHealth(p *metric.Samples, s Source) {
	for u := range s.State.Allocatable.Devices() {
		id := string(u.Device.ID)
		for h := health.Healthy; h <= health.GPULost; h++ {
			p.AddBool(deviceHealth, u.Health.State == h, id, u.Device.Model, h.String())
		}
		p.Add(transitions, float64(s.Stats.Transitions[u.Device.ID]), id)
	}
	for _, c := range s.State.Ledger.Conditions() {
		p.AddBool(condition, c.State > health.Healthy && c.IgnoredUntil.IsZero(),
			string(c.At.GPU), instanceLabel(c.At.GI), instanceLabel(c.At.CI), c.Cause(), c.State.String(), strconv.FormatBool(c.Simulated), c.Action())
	}
	collectUnitCauses(p, s)
	collectFaults(p, s)
	_, unlisted := s.State.UnlistedXIDs()
	p.Add(unlistedXIDs, float64(unlisted))
	p.AddSummary(checks, s.Stats.Checks, s.Stats.CheckTime.Seconds())
	p.Add(lastCheck, timestamp(s.Stats.LastCheck))
	p.Add(stuck, float64(s.Stats.Stuck))
	up := withDriverSources(s.Sources, s.State, s.Stats)
	for _, source := range slices.Sorted(maps.Keys(up)) {
		p.AddBool(sourceUp, up[source], source)
	}
}

// collectUnitCauses adds the causes for which a device takes no work that are no conditions of it (health.Reason.OfUnit). Two devices may have one
// place: a MIG instance, and the one before it.
func collectUnitCauses(p *metric.Samples, s Source) {
	seen := map[[4]string]bool{}
	for u := range s.State.Allocatable.Devices() {
		h, at := u.Health, u.Device.At
		labels := [4]string{string(at.GPU), instanceLabel(at.GI), instanceLabel(at.CI), h.Cause()}
		if !h.Reason.OfUnit() || seen[labels] {
			continue
		}
		seen[labels] = true
		p.AddBool(condition, true, append(labels[:], h.State.String(), strconv.FormatBool(h.Simulated), h.Action)...)
	}
}

// collectFaults adds the recovery action and the counts of faults of each GPU.
func collectFaults(p *metric.Samples, s Source) {
	known := newKnownFaults(s.Config.Health)
	actions := make([]string, health.RecoveryOther+1)
	for a := range actions {
		actions[a] = actionLabel(health.RecoveryAction(a))
	}
	for id, history := range histories(s.State) {
		for a, label := range actions {
			p.AddBool(recoveryAction, history.Sample.RecoveryAction == health.RecoveryAction(a), id, label)
		}
		xids, events := known.counts(history)
		for _, x := range xids {
			p.Add(xidErrors, float64(x.n), id, x.label)
		}
		for _, e := range events {
			p.Add(nvmlEvents, float64(e.n), id, e.label)
		}
		collectOperational(p, id, history)
	}
}

// collectOperational adds the operational events of a GPU that has any, or whose driver can report some.
func collectOperational(p *metric.Samples, id string, history health.GPUHistory) {
	if history.Sample.OperationalEvents == health.NotReported && len(history.Operational) == 0 {
		return
	}
	bySeverity := map[string]uint64{}
	for _, s := range []health.Severity{0, health.SeverityInformational, health.SeverityCorrected, health.SeverityRecoverable, health.SeverityFatal} {
		bySeverity[s.Label()] = 0
	}
	for _, o := range history.Operational {
		bySeverity[o.Event.Severity.Label()] += o.Count
	}
	for _, label := range slices.Sorted(maps.Keys(bySeverity)) {
		p.Add(operational, float64(bySeverity[label]), id, label)
	}
	p.Add(eventsDropped, float64(history.EventsDropped), id)
}

// withDriverSources adds the driver's own sources to those beside it. Operational events are one where the driver has them for a GPU.
func withDriverSources(up map[string]bool, state core.State, stats monitor.Stats) map[string]bool {
	const events, action, operational = "events", "recovery_action", "operational_events"
	ready := state.Snapshot.Driver.State == gpu.DriverReady
	received := ready && !stats.EventsFail
	up[events], up[action] = received, ready
	var structured []health.Tristate
	for _, history := range histories(state) {
		up[events] = up[events] && history.Sample.Events != health.No
		up[action] = up[action] && history.Sample.RecoveryAction != health.RecoveryUnknown
		if got := history.Sample.OperationalEvents; got != health.NotReported {
			structured = append(structured, got)
		}
	}
	if len(structured) > 0 {
		up[operational] = received && !slices.Contains(structured, health.No)
	}
	return up
}

// histories yields the history of each physical GPU that is in the latest snapshot.
func histories(state core.State) iter.Seq2[string, health.GPUHistory] {
	return func(yield func(string, health.GPUHistory) bool) {
		seen := map[gpu.DeviceID]bool{"": true} // a GPU whose UUID can't be read has no history
		var ids []gpu.DeviceID
		for _, d := range state.Snapshot.Devices {
			ids = append(ids, d.At.GPU)
		}
		for _, e := range state.Snapshot.Excluded {
			ids = append(ids, e.At.GPU)
		}
		for _, id := range ids {
			if seen[id] {
				continue
			}
			seen[id] = true
			if history, _ := state.Ledger.History(id); !yield(string(id), history) {
				return
			}
		}
	}
}

// otherXIDs is the label of all codes that neither the table nor a setting names, so that unknown codes make no series.
const otherXIDs = "other"

// faultCount is how often a GPU had faults that have one label.
type faultCount struct {
	label string
	n     uint64
}

// knownFaults are the codes of XIDs and events with a label of their own. They are the same for all GPUs.
type knownFaults struct {
	codes        map[uint64]bool // of XIDs; the value: the series is there from the start
	xids, events []faultCount    // those that are there from the start
}

func newKnownFaults(p health.Policy) knownFaults {
	k := knownFaults{codes: map[uint64]bool{}}
	add := func(code uint64, worst xid.Effect) { k.codes[code] = k.codes[code] || worst >= xid.Withdraws }
	for r := range xid.XIDs() {
		add(r.Code, max(r.Effect, r.SettledEffect, r.RepeatEffect))
	}
	for code, effect := range p.XIDs {
		add(code, effect)
	}
	for _, code := range slices.Sorted(maps.Keys(k.codes)) {
		if k.codes[code] {
			k.xids = append(k.xids, faultCount{label: xidLabel(code)})
		}
	}
	k.xids = append(k.xids, faultCount{label: otherXIDs})
	for r := range xid.Events() {
		k.events = append(k.events, faultCount{label: eventLabel(r)})
	}
	return k
}

// counts counts the XIDs and events of a GPU by label.
func (k knownFaults) counts(history health.GPUHistory) (xids, events []faultCount) {
	xids, events = k.xids, k.events
	if len(history.FaultCounts) == 0 {
		return xids, events
	}
	xids, events = slices.Clone(xids), slices.Clone(events)
	add := func(all []faultCount, label string, n uint64) []faultCount {
		i := slices.IndexFunc(all, func(f faultCount) bool { return f.label == label })
		if i < 0 {
			return append(all, faultCount{label, n})
		}
		all[i].n += n
		return all
	}
	for _, t := range history.FaultCounts {
		_, known := k.codes[t.Code]
		switch event, isEvent := xid.Event(t.Code); {
		case t.Reason == health.ReasonXID && known:
			xids = add(xids, xidLabel(t.Code), t.Count)
		case t.Reason == health.ReasonXID:
			xids = add(xids, otherXIDs, t.Count)
		case isEvent:
			events = add(events, eventLabel(event), t.Count)
		}
	}
	return xids, events
}

func xidLabel(code uint64) string { return strconv.FormatUint(code, 10) }

// eventLabel is the name of an event in nvml.h without its prefix: "FatalPoisonError".
func eventLabel(r xid.Rule) string { return strings.TrimPrefix(r.Name, "nvmlEventType") }

// actionLabel is a recovery action as a label value: "gpu_reset".
func actionLabel(a health.RecoveryAction) string {
	return strings.ToLower(strings.ReplaceAll(a.String(), " ", "_"))
}

// instanceLabel is the number of a MIG instance; "" for the whole GPU, which Prometheus treats like no label.
func instanceLabel(n uint32) string {
	if n == gpu.Whole {
		return ""
	}
	return strconv.FormatUint(uint64(n), 10)
}
