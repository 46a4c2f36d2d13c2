package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// DescribeState describes a state: the devices on offer, the conditions and how often each GPU has reported which
// event. The problems are those of the agent itself.
func DescribeState(s core.State, cfg core.Config, problems ...problem.Problem) Report {
	r := describeInventory(s)
	r.markAPI(s.Allocatable, cfg.API)
	r.Injections, r.CDI = describeInjections(s.Allocatable), describeCDI(s.Allocatable)
	r = r.WithProblems(problems...).WithProblems(describeUnlisted(s, r.Excluded)...)
	if limits := s.Ledger.DriverLimits(); limits != "" && len(r.Devices) > 0 {
		r.HealthLimitations = append(r.HealthLimitations, limits)
	}
	r.Conditions = append(r.Conditions, DescribeConditions(s, cfg, s.Ledger.Conditions())...)
	counted := map[gpu.DeviceID]bool{}
	for _, d := range s.Snapshot.Devices {
		r.addProcesses(d.ID, s.Ledger.LastCheck(d.At.GPU).OnDevice(d.At))
		history, ok := s.Ledger.History(d.At.GPU)
		if !ok || counted[d.At.GPU] {
			continue
		}
		counted[d.At.GPU] = true
		for _, t := range slices.SortedFunc(slices.Values(history.FaultCounts), func(a, b health.FaultCount) int {
			return cmp.Or(cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Code, b.Code))
		}) {
			cause := health.Condition{Reason: t.Reason, Code: t.Code}.Cause()
			r.Counts = append(r.Counts, Count{GPU: d.At.GPU, Index: d.Index, Cause: cause, Count: t.Count, LastSeen: t.Last})
		}
		for _, o := range slices.SortedFunc(slices.Values(history.Operational), func(a, b health.OperationalCount) int {
			return cmp.Or(cmp.Compare(a.Event.Cause(), b.Event.Cause()), cmp.Compare(a.Event.Detail(), b.Event.Detail()))
		}) {
			r.Counts = append(r.Counts, Count{
				GPU: d.At.GPU, Index: d.Index, Cause: o.Event.Cause(), Count: o.Count, LastSeen: o.Last, Detail: o.Event.Detail(),
			})
		}
	}
	return r
}

// withoutKernelLog adds what an agent does not see that does not read the kernel log, unless a problem of it shows that.
func (r Report) withoutKernelLog(s core.State) Report {
	_, read := s.KernelLog()
	if read || s.Snapshot.Driver.State == gpu.DriverPending || slices.ContainsFunc(r.Problems, func(p problem.Problem) bool { return p.Code == problem.KernelLog }) {
		return r
	}
	r.HealthLimitations = append(slices.Clip(r.HealthLimitations), "the kernel log is not read: "+health.WithoutKernelLog)
	return r
}

// DescribeAgent is DescribeState for an agent that runs.
func DescribeAgent(s core.State, cfg core.Config, problems ...problem.Problem) Report {
	r := DescribeState(s, cfg, problems...).withoutKernelLog(s)
	r.Source = FromAgent
	return r
}

// WithProblems returns the report with problems after those that it has.
func (r Report) WithProblems(all ...problem.Problem) Report {
	for _, p := range all {
		r.Problems, r.Warnings = append(slices.Clip(r.Problems), p), append(slices.Clip(r.Warnings), p.String())
	}
	return r
}

// markAPI adds to each device through which API it is offered, if the agent offers any through DRA.
func (r Report) markAPI(inv *inventory.Allocatable, api inventory.API) {
	for i := range r.Devices {
		d := &r.Devices[i]
		for u := range inv.Devices() {
			if u.Device.ID == d.ID && (api == inventory.DRA || u.API == inventory.DRA) {
				d.API = string(u.API)
			}
		}
	}
}

// addProcesses adds the processes with memory of a device to it.
func (r Report) addProcesses(id gpu.DeviceID, processes []gpu.Process) {
	for i := range r.Devices {
		if r.Devices[i].ID != id {
			continue
		}
		for _, p := range processes {
			r.Devices[i].Processes = append(r.Devices[i].Processes, Process{PID: p.PID, MemoryBytes: number(p.Memory)})
		}
	}
}

// DescribeDriver describes the state of the driver.
func DescribeDriver(inv *inventory.Allocatable) Driver {
	d := inv.Driver()
	return Driver{State: d.State.String(), Version: d.Version, CUDA: d.CUDA, Reason: d.Reason, ResetOf: inv.ResetOf()}
}

// describeInventory has empty lists where there is nothing: JSON has [] there and not null.
func describeInventory(s core.State) Report {
	inv := s.Allocatable
	r := Report{
		Driver: DescribeDriver(inv), Provisional: inv.Provisional(), Devices: describeDevices(inv),
		Excluded: []Excluded{}, Conditions: []Condition{}, Counts: []Count{}, Overlaps: []Overlap{},
		PolicyWarnings: append(append([]string{}, inv.PolicyWarnings()...), inv.OutdatedBindings()...), Bindings: DescribeBindings(inv.PositionBindings()),
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		if at, ok := s.Numbering().Of(d.ID); ok && at.String() != d.CurrentIndex() {
			d.PolicyIndex = at.String()
		}
	}
	for _, e := range inv.Excluded() {
		x := Excluded{Index: e.Index, PCI: e.PCI, Reason: e.Reason, Failed: e.Failure != gpu.NotFailed}
		if e.At.GPU != "" {
			x.ID = e.At.String()
		}
		r.Excluded = append(r.Excluded, x)
	}
	for _, c := range inv.Overlaps() {
		i := slices.IndexFunc(r.Devices, func(d Device) bool { return d.ID == c.Device })
		r.Overlaps = append(r.Overlaps, Overlap{c.Device, r.Devices[i].Index, c.Agent})
	}
	return r
}

// describeDevices merges the equal units of a device into one Device.
func describeDevices(inv *inventory.Allocatable) []Device {
	devices := []Device{}
	var first inventory.Unit // of the last device
	for u := range inv.Units() {
		if u.Device.ID == first.Device.ID && u.Pool == first.Pool && u.Sharing == first.Sharing && u.Health == first.Health {
			devices[len(devices)-1].Replicas++
			continue
		}
		d := describeUnit(u)
		d.MemoryNotLimited = inv.NotLimited(u)
		if missing, _ := inv.MissingNodes(u.Device); len(missing) > 0 {
			d.MissingNodes, d.CreateNodesCommand = missing, u.Device.CreateNodesCommand(missing)
		}
		devices, first = append(devices, d), u
	}
	return devices
}

func describeUnit(u inventory.Unit) Device {
	d := Device{
		ID: u.Device.ID, GPU: u.Device.At.GPU, Index: u.Device.Index, Model: u.Device.Model, Profile: u.Device.Profile,
		PCI: u.Device.PCI, NUMANode: u.Device.NUMANode, MemoryBytes: u.Device.Memory,
		Schedulable: u.Health.Schedulable(), Health: u.Health.String(),
		State: u.Health.State, Cause: u.Health.Cause(), Since: u.Health.Since, Action: u.Health.Action,
		Clears: u.Health.Clears, HealthLimitations: u.Health.Limitations, Simulated: u.Health.Simulated, Advisory: u.Health.Advisory,
		Pool: u.Pool, Sharing: u.Sharing.Mode.String(), OnePerRequest: u.Sharing.OnePerRequest,
		MemoryLimit: u.Sharing.Limit.String(), MemoryLimitBytes: u.Memory,
		Serial: u.Device.Serial, Architecture: u.Device.Architecture, Brand: u.Device.Brand,
		ECC: u.Device.ECC.String(), NVLinks: u.Device.NVLinks,
	}
	if u.Sharing.Mode != inventory.Exclusive {
		d.Replicas = 1
	}
	if u.Sharing.Mode == inventory.MPS {
		d.MPSMemoryBytes, d.MPSThreadPercent = u.Sharing.Memory, u.Sharing.Threads
	}
	if u.Device.Profile != "" {
		d.Instance = new(u.Device.Instance)
	}
	if u.Device.Compute != (gpu.Compute{}) {
		d.ComputeCapability = u.Device.Compute.String()
	}
	if u.Health.RecoveryAction > health.RecoveryNone {
		d.RecoveryAction = u.Health.RecoveryAction.String()
	}
	return d
}

// describeUnlisted reports XIDs of the kernel log at PCI addresses where no GPU is listed: in the reason of an excluded
// GPU at that address, else in a warning.
func describeUnlisted(s core.State, excluded []Excluded) (problems []problem.Problem) {
	codes := map[gpu.PCIAddress]string{}
	each, _ := s.UnlistedXIDs()
	for _, x := range each {
		codes[x.PCI] += fmt.Sprintf(", %d", x.Code)
	}
	for i, e := range excluded {
		if of, ok := codes[e.PCI]; ok && e.ID == "" {
			excluded[i].Reason += "; the kernel log has XID " + of[len(", "):]
			delete(codes, e.PCI)
		}
	}
	for _, pci := range slices.Sorted(maps.Keys(codes)) {
		problems = append(problems, problem.Problem{
			Code: problem.UnlistedGPU, Object: string(pci), Text: fmt.Sprintf("the kernel log has XID %s of %s, where no GPU is listed", codes[pci][len(", "):], pci)})
	}
	return problems
}

// DescribeConditions describes conditions of a state: those of the node first, then by GPU index.
func DescribeConditions(s core.State, cfg core.Config, conditions []health.Condition) []Condition {
	now := time.Now()
	described := make([]Condition, 0, len(conditions))
	for _, c := range conditions {
		d := Condition{
			Placement: c.At.String(), GPU: c.At.GPU, Index: index(s, c.At.GPU), Cause: c.Cause(), State: c.State,
			RecordedOnly: c.State == health.Healthy, Detail: c.Detail, Since: c.Since, LastSeen: c.Last, Count: c.Count,
			Action: c.Action(), Clears: c.Clears(), Simulated: c.Simulated,
		}
		switch {
		case c.IgnoredUntil.Equal(health.IgnoredForever):
			d.IgnoredUntilGone = true
		case !c.IgnoredUntil.IsZero():
			d.IgnoredUntil = c.IgnoredUntil
		case !c.ClearingSince.IsZero() && !d.RecordedOnly:
			dwell := s.Ledger.Dwell(cfg.Health, now, c)
			d.Recovery = &Recovery{
				Since: c.ClearingSince, ChecksPassed: min(c.CleanChecks, cfg.Health.CleanChecks), ChecksRequired: cfg.Health.CleanChecks,
				SecondsElapsed: int(min(now.Sub(c.ClearingSince), dwell).Seconds()), SecondsRequired: int(dwell.Seconds()),
			}
		}
		described = append(described, d)
	}
	slices.SortStableFunc(described, func(a, b Condition) int { return cmp.Compare(a.Index, b.Index) })
	return described
}

// DescribeBindings describes bindings; the result is never nil.
func DescribeBindings(bound []inventory.PositionBinding) []Binding {
	bindings := []Binding{}
	for _, b := range bound {
		bindings = append(bindings, Binding{b.At, b.Position, append([]gpu.DeviceID{}, b.Devices...)})
	}
	return bindings
}

// index is that of a physical GPU; -1 if it has none.
func index(s core.State, id gpu.DeviceID) int {
	for _, d := range s.Snapshot.Devices {
		if d.At.GPU == id {
			return d.Index
		}
	}
	return -1
}
