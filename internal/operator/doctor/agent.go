package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// decideConfig has one finding for each problem of the configuration.
func decideConfig(f *Facts) (findings []Finding) {
	if f.Config == nil {
		return nil
	}
	for line := range strings.Lines(f.Config.Error()) {
		findings = append(findings, Finding{"configuration", Problem, "flags, variables, file", strings.TrimSpace(line),
			"correct it; a running agent keeps its earlier configuration, a new one does not start"})
	}
	return findings
}

// decideAgent compares what the running agent reports with what was read here.
func decideAgent(f *Facts) []Finding {
	socket := control.Path(f.StateDir, f.Program)
	switch {
	case f.Late["driver"]:
		return nil
	case f.Agent.Err != nil:
		severity := Problem
		if f.UID != 0 && errors.Is(f.Agent.Err, syscall.EACCES) {
			severity = Warning
		}
		return []Finding{{"agent", severity, socket, "the agent does not report: " + firstLine(f.Agent.Err.Error()),
			"run doctor as the user of the agent; if that is so, look at its log, and restart it"}}
	case !f.Agent.Running && f.StateDir == "":
		return []Finding{{"agent", Note, "state_dir", "no state directory, so a running agent can't be asked: this is what a new agent would offer", ""}}
	case !f.Agent.Running && !f.kubernetes() && slices.ContainsFunc(f.Running("nomad"), isAgent):
		return []Finding{{"agent", Note, socket, "the Nomad agent runs without the plugin, or with another state directory: this is what a new plugin would offer",
			"systemctl restart nomad: Nomad reads plugin_dir and the plugin's block when it starts; tasks keep running"}}
	case !f.Agent.Running:
		return []Finding{{"agent", Note, socket, "no agent runs with this state directory: this is what a new agent would offer", ""}}
	}
	findings := disagreement(f)
	for _, p := range f.Agent.Report.Problems {
		if p.Code == problem.KernelLog && f.KernelErr != nil || slices.Contains(f.decided, p.Code) {
			continue // decideKernelLog or a check has it
		}
		severity := Warning
		if p.Code == problem.DuplicateAgent {
			severity = Problem
		}
		findings = append(findings, Finding{"agent", severity, "the agent's warnings", p.Text, cmp.Or(p.Remedy, "see docs/operations.md")})
	}
	if u := f.Agent.Report.OwnersUnknown; u != nil && u.Remedy != "" && !f.Prove.On() && !f.Reset.On() {
		findings = append(findings, Finding{"owners", Note, "the agent's record of work", "it is not known which work has the devices: " + cmp.Or(u.Reason, "not read"), u.Remedy})
	}
	for _, w := range f.Agent.Report.PolicyWarnings {
		findings = append(findings, Finding{"policy", Warning, "the agent's policy", w, "follow the warning, or correct the rule; ignore it if the rule is for another node"})
	}
	if Problems(findings) == 0 {
		findings = append(findings, Finding{"agent", OK, socket, fmt.Sprintf("runs, driver %s, %s offered", f.Agent.Report.Driver.State, report.Noun(len(f.Agent.Report.Devices), "device")), ""})
	}
	return findings
}

// isAgent reports whether a process of the program nomad is an agent.
func isAgent(p Process) bool { return slices.Contains(p.Args, "agent") }

// justStarted is what to do about what an agent has not done in its first moments.
const justStarted = "run doctor again in a few seconds: the agent has just started"

// disagreement is what the agent and this process read differently: one of them has other mounts, permissions or libraries.
func disagreement(f *Facts) []Finding {
	a, d := f.Agent.Report, f.Driver
	if f.Agent.released() || d.Driver.State != "ready" {
		return nil
	}
	switch a.Driver.State {
	case "ready":
	case gpu.DriverPending.String():
		return []Finding{{"agent", Note, "driver state", "the agent has not read the driver so far", justStarted}}
	default:
		return []Finding{{"agent", Problem, "driver state", fmt.Sprintf("the driver works here, but the agent reports it as %s: %s", a.Driver.State, a.Driver.Reason),
			"restart the agent: its process has other mounts, permissions or an older library"}}
	}
	if a.Driver.Version != d.Driver.Version {
		return []Finding{{"agent", Problem, "driver version", fmt.Sprintf("the agent uses driver %s, here it is %s", a.Driver.Version, d.Driver.Version), "restart the agent"}}
	}
	var here, there []string // by GPU: the settings of this command, such as the MIG strategy, may differ from the agent's
	for _, g := range d.Devices {
		if !has(a, g) && !slices.Contains(here, string(g.GPU)) {
			here = append(here, string(g.GPU))
		}
	}
	for _, g := range a.Devices {
		if !has(d, g) && g.Schedulable && !slices.Contains(there, string(g.GPU)) {
			there = append(there, string(g.GPU))
		}
	}
	switch {
	case len(here) > 0:
		return []Finding{{"agent", Problem, "devices", "listed here and not by the agent: " + list(here),
			"if it stays so for a minute: compare its configuration (" + f.Program + " inspect), and NVIDIA_VISIBLE_DEVICES of its container"}}
	case len(there) > 0:
		return []Finding{{"agent", Warning, "devices", "offered by the agent and not listed here: " + list(there), "run doctor with the flags and as the user of the agent"}}
	}
	return nil
}

func has(r report.Report, d report.Device) bool {
	return slices.ContainsFunc(r.Devices, func(o report.Device) bool { return o.GPU == d.GPU }) ||
		slices.ContainsFunc(r.Excluded, func(e report.Excluded) bool { return strings.HasPrefix(e.ID, string(d.GPU)) })
}

// decideOverlaps is about devices that another agent of the node offers.
func decideOverlaps(f *Facts) (findings []Finding) {
	type kind struct {
		agent   string
		refused bool // this agent gives the devices no new work
	}
	devices := map[kind][]string{}
	var kinds []kind
	r := f.Offered()
	for _, o := range r.Overlaps {
		k := kind{o.Agent, slices.ContainsFunc(r.Devices, func(d report.Device) bool {
			return d.ID == o.ID && d.Cause == health.ReasonOverlap.String()
		})}
		if len(devices[k]) == 0 {
			kinds = append(kinds, k)
		}
		devices[k] = append(devices[k], fmt.Sprintf("GPU %d", o.Index))
	}
	for _, k := range kinds {
		level, effect, also := Problem, ": two workloads may get it", ", or set overlap to refuse"
		if k.refused {
			level, effect, also = Warning, ", which offered it first: this agent gives it no work", ""
		}
		findings = append(findings, Finding{"overlap", level, filepath.Join(f.StateDir, "agents"), list(devices[k]) + " is also offered by " + k.agent + effect,
			"split the GPUs in the policy (for: nomad, for: kubernetes)" + also + "; if " + k.agent + " was removed, delete its file"})
	}
	return findings
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}
