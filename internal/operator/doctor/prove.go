package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/node/cudaproof"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// seesProofProgram reports whether this process has the files of the agent: those of its pod, or for Nomad those of the node.
func (o *Options) seesProofProgram(container string) bool {
	if o.kubernetes() {
		return container != "" || o.HostRoot != ""
	}
	return container == "" && o.HostRoot == ""
}

func readProofProgram(_ context.Context, o *Options) func(*Facts) {
	if !o.Prove.On() || !o.seesProofProgram(o.system.container()) {
		return func(*Facts) {}
	}
	err := proofcommand.Check(o.Prove.Command)
	return func(f *Facts) { f.Check = err }
}

// decideProve is about what would keep the agent from proving GPUs, and what it reports about proofs. Without a policy there is nothing to report.
func decideProve(f *Facts) []Finding {
	if !f.Prove.On() {
		return nil
	}
	findings := slices.Concat(cannotTake(f, "prove", "proved", f.ProofSettings), proofProgram(f), proofTimeout(f.Prove), unprovenByAgent(f))
	if Problems(findings) == 0 && !f.Late["prove"] {
		findings = append(findings, Finding{"prove", OK, strings.Join(f.Prove.Command, " "), provedText(f), ""})
	}
	return findings
}

// cannotTake is about the settings, and rights of the agent, without which no GPU is taken to be proved or reset. What keeps it from both is reported once, about both.
func cannotTake(f *Facts, check, does string, settings []problem.Problem) (findings []Finding) {
	add := func(place, text, remedy string, both bool) {
		found := Finding{check, Problem, place, "no GPU is " + does + ": " + text, remedy}
		if both && f.Prove.On() && f.Reset.On() {
			found.Found = "no GPU is proved or reset: " + text
		}
		findings = append(findings, found)
	}
	for _, p := range settings {
		same := func(o problem.Problem) bool { return o.Text == p.Text }
		add("configuration", p.Text, p.Remedy, slices.ContainsFunc(f.ProofSettings, same) && slices.ContainsFunc(f.ResetSettings, same))
	}
	if u := f.Agent.Report.OwnersUnknown; u != nil && u.Remedy != "" && len(findings) == 0 {
		add("the agent's record of work", "it is not known which work has the devices: "+cmp.Or(u.Reason, "not read"), u.Remedy, len(f.ProofSettings)+len(f.ResetSettings) == 0)
	}
	return findings
}

// proofProgram is about the program of the command: each reason why it is not run.
func proofProgram(f *Facts) (findings []Finding) {
	if !f.seesProofProgram(f.Container) {
		where := "on the node, without --host-root"
		if f.kubernetes() {
			where = "in the agent's container"
		}
		return []Finding{{"prove", Note, f.Prove.Command[0], "not checked: the agent runs it, and has other files than doctor", "run doctor " + where}}
	}
	severity := Problem
	if f.UID != 0 { // what this user may read and execute is not what the agent may
		severity = Warning
	}
	all := []error{f.Check}
	if joined, ok := f.Check.(interface{ Unwrap() []error }); ok { // of errors.Join
		all = joined.Unwrap()
	}
	for _, err := range all {
		if e, ok := errors.AsType[*proofcommand.ProgramError](err); ok {
			findings = append(findings, Finding{"prove", severity, "prove.command", "the check of GPUs can't run: " + e.About() + ": " + e.Err.Error(), e.Remedy})
		}
	}
	return findings
}

// proofTimeout is about a timeout that ends prove-gpu before its own does: the proof would have no result then.
func proofTimeout(p proof.Policy) []Finding {
	needs, ok := ownTimeout(p.Command)
	if !ok || p.Timeout > needs {
		return nil
	}
	return []Finding{{"prove", Warning, "prove.timeout", fmt.Sprintf("the check is ended after %v, and prove-gpu takes up to %v: it may have no result", p.Timeout, needs),
		fmt.Sprintf("set prove.timeout to %v or more, or give prove-gpu a shorter --timeout", needs+proofStart)}}
}

// proofStart is for the start and the end of prove-gpu.
const proofStart = 15 * time.Second

// ownTimeout is how long the command prove-gpu takes; false if a command is another one, or its flag is not understood.
func ownTimeout(command []string) (time.Duration, bool) {
	at := slices.Index(command, "prove-gpu")
	if at < 1 {
		return 0, false
	}
	for i, arg := range command[at:] {
		name, value, given := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if name != "timeout" || !strings.HasPrefix(arg, "-") {
			continue
		}
		if !given && at+i+1 < len(command) {
			value = command[at+i+1]
		}
		d, err := time.ParseDuration(value)
		return d, err == nil
	}
	return cudaproof.DefaultTimeout, true
}

// unprovenByAgent is what the running agent reports of GPUs that have not passed, but for what is among its conditions and warnings.
func unprovenByAgent(f *Facts) (findings []Finding) {
	r := f.Agent.Report
	if !f.Agent.Running || r.Driver.State != "ready" {
		return nil
	}
	if len(r.Proofs) == 0 && len(r.Devices) > 0 {
		return []Finding{{"prove", Warning, "the agent's proofs", "the agent proves no GPU: it runs with another configuration", "have it read its configuration again: " + f.Program + " reload"}}
	}
	for _, p := range r.Proofs {
		if found, remedy := unproven(f.Program, r, p); found != "" {
			findings = append(findings, Finding{"prove", Warning, "the agent's proofs", string(p.GPU) + " " + found, remedy})
		}
	}
	return findings
}

// unproven is what there is to do about a GPU; "" = nothing.
func unproven(program string, r report.Report, p report.Proof) (found, remedy string) {
	condition := slices.ContainsFunc(r.Conditions, func(c report.Condition) bool {
		return c.GPU == p.GPU && (c.Cause == "PROOF_FAILED" || c.Cause == "NEEDS_SERVICE")
	})
	warned := slices.ContainsFunc(r.Problems, func(one problem.Problem) bool { return one.Code == problem.ProofNotRun && one.Object == string(p.GPU) })
	switch code := proof.Code(p.WaitsFor); {
	case code == proof.WaitService && !condition:
		return "failed its proof again after a reset or a boot: " + p.Summary, "have the GPU serviced, then: " + program + " clear --gpu " + string(p.GPU)
	case code == proof.WaitRepair && !condition:
		return "failed its proof: " + p.Summary, "reset the GPU: it is proved again after that"
	case code == proof.WaitOften:
		return "takes no work: " + p.Waits, "run diagnostics, and replace the GPU if it fails them; to go on: " + program + " reset " + string(p.GPU)
	case code == proof.WaitBackOff && p.CouldNotRun > 0 && !warned:
		return "is not proved: " + p.Waits, "run the command of prove.command by hand, and correct what it reports; it is tried again at " + p.WaitsUntil.UTC().Format(time.RFC3339)
	}
	return "", ""
}

// provedText is how many GPUs have passed.
func provedText(f *Facts) string {
	if len(f.Agent.Report.Proofs) == 0 {
		return "the command can run"
	}
	passed := 0
	for _, p := range f.Agent.Report.Proofs {
		if p.Result == proof.Passed.String() {
			passed++
		}
	}
	return fmt.Sprintf("%d of %s passed the latest proof", passed, report.Noun(len(f.Agent.Report.Proofs), "GPU"))
}
