package hostwatch

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

var errNoFolder = errors.New("state_dir is empty")

// setProblem records why overlaps are not seen, or why other agents do not see the claims of this one, and logs it when it
// changes.
func (w *Watcher) setProblem(err error) {
	message, detail := "", ""
	switch _, notWritten := errors.AsType[writeError](err); {
	case err == nil:
	case errors.Is(err, errDuplicateAgent):
		message, detail = "another process of this agent uses the same state_dir", "give each its own, or stop one"
	case notWritten:
		message, detail = "claims not written, other agents can't see what this agent offers", oneLine(err)
	default:
		message, detail = "claims not read, overlaps with other agents are unknown", oneLine(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if detail != "" && w.host.Own.Else != "" {
		detail += "; until that is over GPUs that this agent has not claimed take no new work (overlap = refuse)"
	}
	text := strings.TrimSuffix(message+": "+detail, ": ")
	if text == w.problem {
		return
	}
	w.problem = text
	switch {
	case text == "":
		w.log.Info("overlaps with other agents known again")
	case errors.Is(err, errNoFolder) && !w.refuse: // configured so
		w.log.Info(message, "reason", detail)
	case errors.Is(err, errDuplicateAgent):
		w.log.Error(message, "agent", w.claims.agent, "remedy", detail)
	default:
		w.log.Warn(message, "error", detail)
	}
}

// setAssignmentsProblem records why the file of assignments is not in force, and logs it when it changes.
func (w *Watcher) setAssignmentsProblem(err error) {
	text := ""
	if err != nil {
		text = "assignments of GPUs not read or not written, the last good ones stay in force and no GPU changes its API: " + oneLine(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if text == w.unassigned {
		return
	}
	if w.unassigned = text; text == "" {
		w.log.Info("assignments of GPUs known again")
		return
	}
	w.log.Warn(text, "remedy", "correct the file, or put back a copy; without any, take the work from the GPUs and delete it")
}

// setStopped records the agents that claim devices offered here and do not run, and logs each once.
func (w *Watcher) setStopped(stopped []otherAgent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range stopped {
		if !slices.ContainsFunc(w.stopped, func(b otherAgent) bool { return b.agent == a.agent }) {
			w.log.Warn("agent not running, its claims stay", "agent", a.agent, "devices", a.devices, "file", a.file,
				"remedy", "delete the file if the agent was removed")
		}
	}
	w.stopped = stopped
}

// setFaults records the files of claims that can't be used, and logs each when it changes.
func (w *Watcher) setFaults(faults []fault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range faults {
		if !slices.ContainsFunc(w.faults, func(g fault) bool { return g.text(w.refuse) == f.text(w.refuse) }) {
			w.log.Warn("claims of an agent can't be read", "agent", f.agent, "file", f.path, "error", oneLine(f.err),
				"effect", f.effect(w.refuse), "remedy", f.remedy())
		}
	}
	for _, f := range w.faults {
		if !slices.ContainsFunc(faults, func(g fault) bool { return g.agent == f.agent }) {
			w.log.Info("claims of an agent known again", "agent", f.agent)
		}
	}
	w.faults = faults
}

func (f fault) text(refuse bool) string {
	return fmt.Sprintf("claims of %s can't be read, %s: %s: %s: %s", f.agent, f.effect(refuse), f.path, oneLine(f.err), f.remedy())
}

func (f fault) effect(refuse bool) string {
	switch {
	case refuse:
		return "GPUs that this agent has not claimed take no new work"
	case f.remembered:
		return "what was read before counts"
	}
	return "overlaps with it are unknown"
}

func (f fault) remedy() string {
	if errors.Is(f.err, errUnwritten) {
		return "see the warnings of " + f.agent
	}
	return "start " + f.agent + ", which writes it again; if it was removed, delete the file"
}

func (a otherAgent) String() string {
	return fmt.Sprintf("agent %s is not running and claims %d of the devices offered here, as its workloads may still run: if it was removed, delete %s",
		a.agent, a.devices, a.file)
}

// Warnings are the problems of the host that an operator has to know, one a line.
func (w *Watcher) Warnings() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var warnings []string
	if w.problem != "" {
		warnings = append(warnings, w.problem)
	}
	if w.unassigned != "" {
		warnings = append(warnings, w.unassigned)
	}
	for _, f := range w.faults {
		warnings = append(warnings, f.text(w.refuse))
	}
	for _, a := range w.stopped {
		warnings = append(warnings, a.String())
	}
	for _, k := range w.kept {
		if line := k.warning(w.claims.path(w.claims.agent, ".json")); line != "" {
			warnings = append(warnings, line)
		}
	}
	return warnings
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
