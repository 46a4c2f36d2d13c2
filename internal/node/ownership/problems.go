package ownership

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/util/problem"
)

var errNoFolder = errors.New("state_dir is empty")

// setProblem records why overlaps are not seen, or why other agents do not see what this one offers, and logs it when it
// changes.
func (w *Watcher) setProblem(err error) {
	var p problem.Problem
	message, detail := "", ""
	switch _, notWritten := errors.AsType[writeError](err); {
	case err == nil:
	case errors.Is(err, errDuplicateAgent):
		p = problem.Problem{Code: problem.DuplicateAgent, Text: "another process of this agent uses the same state_dir", Remedy: "give each its own, or stop one"}
	case notWritten:
		p.Code, message, detail = problem.AgentFileWrite, "devices of this agent not recorded, other agents can't see what it offers", oneLine(err)
	default:
		p.Code, message, detail = problem.AgentFileRead, "devices of the agents not read, overlaps with other agents are unknown", oneLine(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	const untilThen = "; until that is over GPUs that this agent has not recorded take no new work (overlap = refuse)"
	switch refused := w.host.Recorded.Reason != ""; {
	case detail != "" && refused:
		detail += untilThen
		fallthrough
	case detail != "":
		p.Text = message + ": " + detail
	case p.Remedy != "" && refused:
		p.Remedy += untilThen
	}
	if p == w.problem {
		return
	}
	w.problem = p
	switch {
	case p == (problem.Problem{}):
		w.log.Info("overlaps with other agents known again")
	case errors.Is(err, errNoFolder) && !w.refuse: // configured so
		w.log.Info(message, "reason", detail)
	case p.Code == problem.DuplicateAgent:
		w.log.Error(p.Text, "agent", w.store.agent, "remedy", p.Remedy)
	default:
		w.log.Warn(message, "error", detail)
	}
}

// setOwnershipProblem records why the file of the node is not in force, and logs it when it changes.
func (w *Watcher) setOwnershipProblem(err error) {
	var p problem.Problem
	if err != nil {
		p = problem.Problem{Code: problem.OwnershipFile,
			Text: "owners of GPUs not read or not written, the last good ones stay in force and no GPU changes its API: " + oneLine(err)}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if p == w.ownershipProblem {
		return
	}
	if w.ownershipProblem = p; err == nil {
		w.log.Info("owners of GPUs known again")
		return
	}
	const remedy = "put back a copy of the file, or correct it and remove its checksum; " +
		"without any, take the work from the GPUs and delete it"
	w.log.Warn(p.Text, "remedy", remedy)
}

// setStopped records the agents that offer devices of this agent, too, and do not run, and logs each once.
func (w *Watcher) setStopped(stopped []otherAgent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range stopped {
		if !slices.ContainsFunc(w.stopped, func(b otherAgent) bool { return b.agent == a.agent }) {
			w.log.Warn("agent not running, its devices stay recorded", "agent", a.agent, "devices", a.devices, "file", a.file,
				"remedy", "delete the file if the agent was removed")
		}
	}
	w.stopped = stopped
}

// setFaults records the files of agents that can't be used, and logs each when it changes.
func (w *Watcher) setFaults(faults []fault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range faults {
		if !slices.ContainsFunc(w.faults, func(g fault) bool { return g.problem(w.refuse) == f.problem(w.refuse) }) {
			w.log.Warn("devices of an agent can't be read", "agent", f.agent, "file", f.path, "error", oneLine(f.err),
				"effect", f.effect(w.refuse), "remedy", f.remedy())
		}
	}
	for _, f := range w.faults {
		if !slices.ContainsFunc(faults, func(g fault) bool { return g.agent == f.agent }) {
			w.log.Info("devices of an agent known again", "agent", f.agent)
		}
	}
	w.faults = faults
}

func (f fault) problem(refuse bool) problem.Problem {
	return problem.Problem{
		Code: problem.AgentFileDamaged, Object: f.path,
		Text:   fmt.Sprintf("devices of %s can't be read, %s: %s: %s", f.agent, f.effect(refuse), f.path, oneLine(f.err)),
		Remedy: f.remedy(),
	}
}

func (f fault) effect(refuse bool) string {
	switch {
	case refuse:
		return "GPUs that this agent has not recorded take no new work"
	case f.remembered:
		return "what was read before counts"
	}
	return "overlaps with it are unknown"
}

func (f fault) remedy() string {
	switch {
	case errors.Is(f.err, errUnwritten):
		return "see the warnings of " + f.agent
	case errors.Is(f.err, errUnrecorded):
		return "make room on the disk and start " + f.agent + ", which records them; if it was removed, delete the file"
	case errors.Is(f.err, errUnseen):
		return "let " + f.agent + " write to the directory; if it was removed and has no work, restart this agent"
	}
	return "start " + f.agent + ", which writes it again; if it was removed, delete the file"
}

func (a otherAgent) problem() problem.Problem {
	return problem.Problem{
		Code: problem.StoppedAgent, Object: a.agent,
		Text:   fmt.Sprintf("agent %s is not running and offers %d of the devices offered here, as its workloads may still run", a.agent, a.devices),
		Remedy: "if it was removed, delete " + a.file,
	}
}

// Problems are those of the node that an operator has to know.
func (w *Watcher) Problems() (all []problem.Problem) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range []problem.Problem{w.problem, w.ownershipProblem} {
		if p != (problem.Problem{}) {
			all = append(all, p)
		}
	}
	for _, f := range w.faults {
		all = append(all, f.problem(w.refuse))
	}
	for _, a := range w.stopped {
		all = append(all, a.problem())
	}
	for _, k := range w.kept {
		if p, ok := k.problem(w.store.path(w.store.agent, ".json")); ok {
			all = append(all, p)
		}
	}
	return all
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
