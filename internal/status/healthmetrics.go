package status

import (
	"iter"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// The metrics of health. The label "device" is an offered device, once however many share it; "gpu" is a physical GPU, as faults
// are faults of GPUs.
var (
	stateDesc     = newDesc("device_health", "1 for the state of the device, 0 for the other states.", "device", "model", "state")
	conditionDesc = newDesc("device_condition",
		"An active condition of a GPU or MIG instance (no gpu: of the node): 1, or 0 if it has no effect or an operator ignores it.",
		"gpu", "gi", "ci", "cause", "state", "simulated")
	xidsDesc = newDesc("xid_errors_total",
		"XID errors reported. Codes that can make a GPU unhealthy have a series from the start; unknown codes share one.", "gpu", "xid")
	unlistedDesc = newDesc("xid_errors_unlisted_total",
		"XIDs in the kernel log with PCI addresses where the driver lists no GPU; inspect and the log name them.")
	eventsDesc      = newDesc("events_total", "Faults that the driver reported as NVML events other than XIDs.", "gpu", "event")
	transitionsDesc = newDesc("health_transitions_total", "Changes of the device's health state.", "device")
	actionDesc      = newDesc("gpu_recovery_action",
		"1 for the recovery action that the driver reports for the GPU, 0 for the other actions.", "gpu", "action")
	checksDesc    = newDesc("health_check_duration_seconds", "Duration of health checks of all GPUs.")
	lastCheckDesc = newDesc("last_health_check_timestamp_seconds", "End of the latest health check; 0 = none yet.")
	stuckDesc     = newDesc("driver_calls_stuck", "Driver calls that are past their deadline.")
	sourceDesc    = newDesc("health_source_up",
		"1 if a source of health information can be used for every GPU. A source that is switched off has no series.", "source")
)

// collectHealth sends the metrics of health. The devices and the table of XIDs bound their number.
func (s *Server) collectHealth(metrics chan<- prometheus.Metric, state core.State) {
	gauge, count := newSender(metrics, prometheus.GaugeValue), newSender(metrics, prometheus.CounterValue)
	stats := s.Agent.Stats()
	for u := range state.Inventory.Devices() {
		id := string(u.Device.ID)
		for h := health.Healthy; h <= health.GPULost; h++ {
			gauge(stateDesc, boolValue(u.Health.State == h), id, u.Device.Model, h.String())
		}
		count(transitionsDesc, float64(stats.Transitions[u.Device.ID]), id)
	}
	for _, c := range state.Ledger.Conditions() {
		gauge(conditionDesc, boolValue(c.State > health.Healthy && c.IgnoredUntil.IsZero()),
			string(c.At.GPU), instanceLabel(c.At.GI), instanceLabel(c.At.CI), c.Cause(), c.State.String(), strconv.FormatBool(c.Simulated))
	}
	for id, history := range histories(state) {
		for a := health.RecoveryUnknown; a <= health.RecoveryOther; a++ {
			gauge(actionDesc, boolValue(history.Sample.RecoveryAction == a), id, actionLabel(a))
		}
		xids, events := faultCounts(history, s.Config.Health)
		for code, n := range xids {
			count(xidsDesc, float64(n), id, code)
		}
		for event, n := range events {
			count(eventsDesc, float64(n), id, event)
		}
	}
	_, unlisted := state.UnlistedXIDs()
	count(unlistedDesc, float64(unlisted))
	metrics <- prometheus.MustNewConstSummary(checksDesc, stats.Checks, stats.CheckTime.Seconds(), nil)
	last := 0.0
	if !stats.LastCheck.IsZero() {
		last = float64(stats.LastCheck.UnixMilli()) / 1000
	}
	gauge(lastCheckDesc, last)
	gauge(stuckDesc, float64(stats.Stuck))
	for source, up := range withDriverSources(s.Sources(), state, stats) {
		gauge(sourceDesc, boolValue(up), source)
	}
}

// withDriverSources adds the driver's own sources to those beside it.
func withDriverSources(up map[string]bool, state core.State, stats monitor.Stats) map[string]bool {
	const events, action = "events", "recovery_action"
	ready := state.Snapshot.Driver.State == gpu.DriverReady
	up[events], up[action] = ready && !stats.EventsFail, ready
	for _, history := range histories(state) {
		up[events] = up[events] && history.Sample.Events != health.No
		up[action] = up[action] && history.Sample.RecoveryAction != health.RecoveryUnknown
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

// faultCounts counts the XIDs and events of a GPU by label.
func faultCounts(history health.GPUHistory, p health.Policy) (xids, events map[string]uint64) {
	xids, events = map[string]uint64{otherXIDs: 0}, map[string]uint64{}
	known := map[uint64]bool{}
	add := func(code uint64, worst xid.Effect) {
		if known[code] = true; worst >= xid.Withdraws {
			xids[xidLabel(code)] = 0
		}
	}
	for r := range xid.XIDs() {
		add(r.Code, max(r.Effect, r.SettledEffect, r.RepeatEffect))
	}
	for code, effect := range p.XIDs {
		add(code, effect)
	}
	for r := range xid.Events() {
		events[eventLabel(r)] = 0
	}
	for _, t := range history.FaultCounts {
		switch event, isEvent := xid.Event(t.Code); {
		case t.Reason == health.ReasonXID && known[t.Code]:
			xids[xidLabel(t.Code)] += t.Count
		case t.Reason == health.ReasonXID:
			xids[otherXIDs] += t.Count
		case isEvent:
			events[eventLabel(event)] += t.Count
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
