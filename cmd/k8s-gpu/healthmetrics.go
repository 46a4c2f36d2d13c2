package main

import (
	"iter"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// The metrics of health. A device is what is offered, once however many share it; a GPU is physical: faults
// concern GPUs.
var (
	stateDesc = prometheus.NewDesc("tandem_device_health",
		"1 for the state that the device is in, 0 for the others.", []string{"device", "model", "state"}, nil)
	conditionDesc = prometheus.NewDesc("tandem_device_condition",
		"What stands against a GPU or MIG instance (none: the node): 1, or 0 while it is only noted or an operator disregards it.",
		[]string{"gpu", "gi", "ci", "cause", "state", "simulated"}, nil)
	xidsDesc = prometheus.NewDesc("tandem_xids_total",
		"XIDs that were reported. Codes that can make a GPU unhealthy are there from the start; unknown ones are together.",
		[]string{"gpu", "xid"}, nil)
	unlistedDesc = prometheus.NewDesc("tandem_xids_unlisted_total",
		"XIDs in the kernel log of PCI addresses where no GPU is listed; inspect and the log name them.", nil, nil)
	eventsDesc = prometheus.NewDesc("tandem_events_total",
		"Faults that the driver reported as other NVML events than XIDs.", []string{"gpu", "event"}, nil)
	transitionsDesc = prometheus.NewDesc("tandem_health_transitions_total",
		"Changes of the device's state.", []string{"device"}, nil)
	verdictDesc = prometheus.NewDesc("tandem_driver_verdict",
		"1 for what the driver wants done about the GPU (its recovery action), 0 for the others.", []string{"gpu", "verdict"}, nil)
	probesDesc = prometheus.NewDesc("tandem_probe_seconds",
		"Time that checks of all GPUs took.", nil, nil)
	probedDesc = prometheus.NewDesc("tandem_last_probe_timestamp_seconds",
		"End of the latest check; 0 = none yet.", nil, nil)
	stuckDesc = prometheus.NewDesc("tandem_driver_calls_stuck",
		"Driver calls that are past their deadline.", nil, nil)
	sourceDesc = prometheus.NewDesc("tandem_health_source_up",
		"1 if a source of health can be used, for every GPU. One that is switched off has no series.", []string{"source"}, nil)

	healthDescs = []*prometheus.Desc{
		stateDesc, conditionDesc, xidsDesc, unlistedDesc, eventsDesc, transitionsDesc, verdictDesc, probesDesc, probedDesc, stuckDesc, sourceDesc,
	}
)

// collectHealth sends the metrics of health. Their number is bounded by the devices and the table of faults.
func (s *status) collectHealth(metrics chan<- prometheus.Metric, state core.State) {
	send := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, t, v, labels...)
	}
	stats := s.machine.Stats()
	for u := range state.Inventory.Devices() {
		id := string(u.Device.ID)
		for h := core.Healthy; h <= core.GPULost; h++ {
			send(stateDesc, prometheus.GaugeValue, one(u.Health.State == h), id, u.Device.Model, h.String())
		}
		send(transitionsDesc, prometheus.CounterValue, float64(stats.Transitions[u.Device.ID]), id)
	}
	for _, c := range state.Ledger.Conditions() {
		send(conditionDesc, prometheus.GaugeValue, one(c.State > core.Healthy && c.IgnoredUntil.IsZero()),
			string(c.At.GPU), instanceLabel(c.At.GI), instanceLabel(c.At.CI), c.Cause(), c.State.String(), strconv.FormatBool(c.Simulated))
	}
	for gpu, chart := range charts(state) {
		for v := core.RecoveryUnknown; v <= core.RecoveryOther; v++ {
			send(verdictDesc, prometheus.GaugeValue, one(chart.Sample.RecoveryAction == v), gpu, verdictLabel(v))
		}
		xids, events := tallies(chart, s.cfg.Health)
		for code, n := range xids {
			send(xidsDesc, prometheus.CounterValue, float64(n), gpu, code)
		}
		for event, n := range events {
			send(eventsDesc, prometheus.CounterValue, float64(n), gpu, event)
		}
	}
	_, unlisted := state.UnlistedXIDs()
	send(unlistedDesc, prometheus.CounterValue, float64(unlisted))
	metrics <- prometheus.MustNewConstSummary(probesDesc, stats.Checks, stats.CheckTime.Seconds(), nil)
	probed := 0.0
	if !stats.LastCheck.IsZero() {
		probed = float64(stats.LastCheck.UnixMilli()) / 1000
	}
	send(probedDesc, prometheus.GaugeValue, probed)
	send(stuckDesc, prometheus.GaugeValue, float64(stats.Stuck))
	for source, up := range upOf(s.from.Up(), state, stats) {
		send(sourceDesc, prometheus.GaugeValue, one(up), source)
	}
}

// upOf adds the driver's own sources to those beside it.
func upOf(up map[string]bool, state core.State, stats monitor.Stats) map[string]bool {
	up["events"] = state.Snapshot.Driver.State == core.DriverReady && !stats.EventsFail
	up["verdict"] = state.Snapshot.Driver.State == core.DriverReady
	for _, chart := range charts(state) {
		up["events"] = up["events"] && chart.Sample.Events != core.No
		up["verdict"] = up["verdict"] && chart.Sample.RecoveryAction != core.RecoveryUnknown
	}
	return up
}

// charts yields what is remembered of each physical GPU that the latest reading knows of.
func charts(state core.State) iter.Seq2[string, core.GPUHistory] {
	return func(yield func(string, core.GPUHistory) bool) {
		seen := map[core.DeviceID]bool{"": true} // a GPU whose UUID can't be read has no chart
		var gpus []core.DeviceID
		for _, d := range state.Snapshot.Devices {
			gpus = append(gpus, d.At.GPU)
		}
		for _, e := range state.Snapshot.Excluded {
			gpus = append(gpus, e.At.GPU)
		}
		for _, gpu := range gpus {
			if seen[gpu] {
				continue
			}
			seen[gpu] = true
			if chart, _ := state.Ledger.History(gpu); !yield(string(gpu), chart) {
				return
			}
		}
	}
}

// otherXIDs is the label of all codes that neither the table nor a setting names: a driver that makes codes up
// makes no series.
const otherXIDs = "other"

// tallies counts the XIDs and events of a GPU by label.
func tallies(chart core.GPUHistory, p core.HealthPolicy) (xids, events map[string]uint64) {
	xids, events = map[string]uint64{otherXIDs: 0}, map[string]uint64{}
	known := map[uint64]bool{}
	know := func(code uint64, worst xid.Effect) {
		if known[code] = true; worst >= xid.Withdraws {
			xids[xidLabel(code)] = 0
		}
	}
	for r := range xid.XIDs() {
		know(r.Code, max(r.Effect, r.SettledEffect, r.RepeatEffect))
	}
	for code, effect := range p.XIDs {
		know(code, effect)
	}
	for r := range xid.Events() {
		events[eventLabel(r)] = 0
	}
	for _, t := range chart.FaultCounts {
		switch event, isEvent := xid.Event(t.Code); {
		case t.Reason == core.ReasonXID && known[t.Code]:
			xids[xidLabel(t.Code)] += t.Count
		case t.Reason == core.ReasonXID:
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

// verdictLabel spells a verdict as labels are: "gpu_reset".
func verdictLabel(v core.RecoveryAction) string {
	return strings.ToLower(strings.ReplaceAll(v.String(), " ", "_"))
}

// instanceLabel is the number of a MIG instance; "" for all of them, which is as good as no label.
func instanceLabel(n uint32) string {
	if n == core.Whole {
		return ""
	}
	return strconv.FormatUint(uint64(n), 10)
}
