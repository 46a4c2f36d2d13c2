package monitor

import (
	"log/slog"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core"
)

// said is what was logged of the policy, of other agents and of device nodes, so that each line is written once: when it becomes true,
// and when it ends.
type said struct {
	findings []string
	drift    []string
	contests []core.Overlap
	nodes    []string // warnings of missing device nodes
	unlisted []core.UnlistedXID
}

// log writes what is new in a state and what is over.
//
// Findings that are missing are over only if the machine was read completely: while a GPU or the driver does not
// answer, nobody can say whom the policy means, and the same finding would come and go with each such reading.
func (s *said) log(log *slog.Logger, state core.State) {
	findings, drift := state.Inventory.PolicyWarnings(), state.Inventory.OutdatedBindings()
	if state.Snapshot.Driver.State != core.DriverReady || len(state.Snapshot.Excluded) > 0 {
		findings, drift = union(s.findings, findings), union(s.drift, drift)
	}
	for _, d := range without(drift, s.drift) {
		log.Warn("the order of devices has changed, the policy goes on meaning the same ones", "position", d)
	}
	for _, d := range without(s.drift, drift) {
		log.Info("the policy means the devices of the present order again", "position", d)
	}
	s.drift = drift
	for _, f := range without(findings, s.findings) {
		log.Error("the policy does not fit this machine", "finding", f)
	}
	for _, f := range without(s.findings, findings) {
		log.Info("the policy fits this machine again", "finding", f)
	}
	contests := state.Inventory.Overlaps()
	for _, c := range without(contests, s.contests) {
		log.Warn("device is offered by another agent, too", "id", c.Device, "other", c.Agent,
			"action", "give the agents different GPUs")
	}
	for _, c := range without(s.contests, contests) {
		log.Info("device is no longer offered by another agent, too", "id", c.Device, "other", c.Agent)
	}
	nodes := nodeWarnings(state.Inventory)
	if state.Snapshot.Driver.State != core.DriverReady {
		nodes = s.nodes // without a driver nothing is known of them
	}
	for _, n := range without(nodes, s.nodes) {
		log.Warn("device nodes are missing: containers that start now do not get them", "missing", n)
	}
	for _, n := range without(s.nodes, nodes) {
		log.Info("device nodes are no longer missing", "missing", n)
	}
	unlisted, _ := state.UnlistedXIDs()
	for _, x := range without(unlisted, s.unlisted) {
		log.Warn("the kernel log has an XID of a PCI address where no GPU is listed", "pci", x.PCI, "xid", x.Code)
	}
	s.findings, s.contests, s.nodes, s.unlisted = findings, contests, nodes, union(s.unlisted, unlisted)
}

// nodeWarnings are the warnings of missing device nodes that the health of any device has, each once.
func nodeWarnings(inv *core.Inventory) (warnings []string) {
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
