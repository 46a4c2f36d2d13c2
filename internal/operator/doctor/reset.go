package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// seesResetter reports whether this process can ask what resets GPUs: the agent's own process is root on the node, a component answers on its socket.
func (f *Facts) seesResetter() bool {
	return f.Resetter != nil && f.UID == 0 && (f.kubernetes() || f.Container == "" && f.HostRoot == "")
}

// readReset asks what resets GPUs whether it can, and looks for processes that have GPUs open.
func readReset(ctx context.Context, o *Options) func(*Facts) {
	f := Facts{Options: *o, UID: o.system.uid(), Container: o.system.container()}
	if !o.Reset.On() {
		return func(*Facts) {}
	}
	var ready error
	if f.seesResetter() {
		ready = o.Resetter.Ready(ctx)
	}
	open := openByGPU(ctx, o)
	closes := func(c gpureset.Client) bool { return releases(c) || o.ResetPause.Has(c.Name) }
	for pci, all := range open {
		open[pci] = slices.DeleteFunc(all, closes)
	}
	var pause error
	if len(o.ResetPause.Programs) > 0 && o.seesProofProgram(f.Container) {
		pause = errors.Join(proofcommand.Check(o.ResetPause.Stop), proofcommand.Check(o.ResetPause.Resume))
	}
	return func(f *Facts) { f.Ready, f.Open, f.PauseCheck = ready, open, pause }
}

// releases reports whether a process closes a GPU for its reset: agents do, and nvidia-persistenced when the persistence mode is turned off. The kernel
// keeps 15 characters of a name.
func releases(c gpureset.Client) bool {
	return slices.Contains([]string{"k8s-gpu", "nomad-gpu", "nvidia-persiste"}, c.Name)
}

// decideReset is about what would keep the agent from resetting GPUs, and what it reports about resets. Without a policy there is nothing to report.
func decideReset(f *Facts) []Finding {
	if !f.Reset.On() {
		return nil
	}
	findings := slices.Concat(cannotTake(f, "reset", "reset", f.ResetSettings), resetter(f), pauseCommands(f), recoveryActions(f), layouts(f), openGPUs(f), waitingResets(f))
	if Problems(findings) == 0 && !f.Late["reset"] && f.seesResetter() && f.Ready == nil {
		findings = append(findings, Finding{"reset", OK, "reset.mode = " + f.Reset.Mode.String(), "a faulty GPU that no work has can be reset", ""})
	}
	return findings
}

// resetter is about what calls nvidia-smi: the agent itself, or a component of its own.
func resetter(f *Facts) []Finding {
	if f.Resetter == nil {
		return nil
	}
	if !f.seesResetter() {
		where := "on the node, without --host-root"
		if f.kubernetes() {
			where = "in the agent's container"
		}
		return []Finding{{"reset", Note, "what runs nvidia-smi", "not checked: doctor lacks the rights or the files of the agent", "run doctor as root " + where}}
	}
	if f.Ready == nil {
		return nil
	}
	text, remedy := f.Ready.Error(), "see docs/reset.md"
	if e, ok := errors.AsType[*gpureset.UnavailableError](f.Ready); ok {
		text, remedy = e.Err.Error(), e.Remedy
	}
	severity := Problem
	if f.Reset.Mode == reset.Report {
		severity = Warning
	}
	return []Finding{{"reset", severity, "what runs nvidia-smi", "no GPU can be reset: " + text, remedy}}
}

// pauseCommands is about the commands that stop and start programs that watch GPUs.
func pauseCommands(f *Facts) []Finding {
	if f.PauseCheck == nil {
		return nil
	}
	text := strings.ReplaceAll(f.PauseCheck.Error(), "\n", "; ")
	return []Finding{{"reset", Problem, "reset.pause", "programs that watch GPUs can't be stopped for a reset and started again: " + text,
		"install the programs where only root can write them"}}
}

// recoveryActions is about a driver that never asks for a reset.
func recoveryActions(f *Facts) []Finding {
	d := f.Offered().Driver
	if d.State != "ready" || health.ReportsRecoveryAction(d.Version) {
		return nil
	}
	return []Finding{{"reset", Warning, "driver " + d.Version, "no reset begins by itself: this driver does not report which GPU needs one",
		fmt.Sprintf("install driver %d or newer, or reset a GPU by hand: %s reset GPU", health.RecoveryActionBranch, f.Program)}}
}

// layouts is about GPUs with MIG instances, which a reset removes.
func layouts(f *Facts) []Finding {
	var names []string
	for _, d := range f.Offered().Devices {
		if name := fmt.Sprintf("GPU %d", d.Index); d.Instance != nil && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if len(names) == 0 || f.Reset.LoseMIG {
		return nil
	}
	return []Finding{{"reset", Note, "reset.migLayout = keep", "not reset, because a reset removes their MIG instances: " + list(names),
		"nothing; if another program makes the instances again: set reset.migLayout to lost"}}
}

// openGPUs is about processes that have GPUs open which no work has: programs that watch GPUs. Those of work are no obstacle, as a reset waits for its end.
func openGPUs(f *Facts) (findings []Finding) {
	r := f.Agent.Report
	if !f.Agent.Running || r.OwnersUnknown != nil {
		return nil
	}
	in := map[string][]string{} // names of GPUs by process
	for _, d := range r.Devices {
		if slices.ContainsFunc(r.Devices, func(o report.Device) bool { return o.GPU == d.GPU && len(o.Owners) > 0 }) {
			continue
		}
		for _, c := range f.Open[d.PCI] {
			if name := fmt.Sprintf("GPU %d", d.Index); !slices.Contains(in[c.String()], name) {
				in[c.String()] = append(in[c.String()], name)
			}
		}
	}
	for _, client := range slices.Sorted(maps.Keys(in)) {
		findings = append(findings, Finding{"reset", Warning, f.proc("*/fd"), "a reset is refused while " + client + " has " + list(in[client]) + " open",
			"end it before a reset, or, if it watches GPUs, have it paused for one: see docs/reset.md; the agent ends no process by itself"})
	}
	return findings
}

// waitingResets is what the running agent reports of GPUs that it does not reset without a person. What it can't do at all is among its problems.
func waitingResets(f *Facts) (findings []Finding) {
	for _, r := range f.Agent.Report.Resets {
		code := reset.Code(r.WaitsFor)
		if !r.NeedsPerson || code == reset.WaitCannot {
			continue
		}
		remedy := strings.ReplaceAll(cmp.Or(resetRemedies[code], "see docs/reset.md"), "PROGRAM", f.Program)
		findings = append(findings, Finding{"reset", Warning, "the agent's resets", string(r.GPU) + " is not reset: " + r.Waits, strings.ReplaceAll(remedy, "GPU-ID", string(r.GPU))})
	}
	return findings
}

// resetRemedies are what a person does about a GPU that is not reset.
var resetRemedies = map[reset.Code]string{
	reset.WaitHandedOver: "do what the driver asks for, such as a reboot of the node; without a recovery action: PROGRAM reset GPU-ID",
	reset.WaitService:    "have the GPU serviced, then: PROGRAM clear --gpu GPU-ID",
	reset.WaitAttempts:   "reboot the node; if the fault comes back, run diagnostics, and replace the GPU",
	reset.WaitOften:      "run diagnostics, and replace the GPU if it fails them; to have it reset again: PROGRAM reset GPU-ID",
	reset.WaitRefused:    "reboot the node",
	reset.WaitMIG:        "remove its MIG instances, run PROGRAM reset GPU-ID, and make them again; or set reset.migLayout to lost, if another program does that",
	reset.WaitBackOff:    "end the process, or have it leave the GPU (docs/reset.md about one that watches GPUs); then: PROGRAM reset GPU-ID",
	reset.WaitUnread:     "what the text names: without a complete record of work no GPU is reset",
}
