package agent

import (
	"cmp"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// ProofSettings has a problem for each setting because of which an agent proves no GPU. There is none without a policy for that.
func ProofSettings(o Options) (all []problem.Problem) {
	if !o.Prove.On() {
		return nil
	}
	add := func(text, remedy string) {
		all = append(all, problem.Problem{Code: problem.ProofNotRun, Object: o.Name, Text: text, Remedy: remedy})
	}
	if o.Core.Occupancy == inventory.OccupancyOff {
		add("with occupancy = off the processes on a GPU are not read", "set occupancy to report or withhold")
	}
	if o.Health.StateDir == "" {
		add("without a state directory no other agent of the node knows that a GPU is proved", "set the state directory")
	}
	if !seesProcesses(o.Core) {
		add("processes outside of the agent's PID namespace are not seen, so a GPU may be in use", "set hostPID: true in its pod")
	}
	if u := o.NoRecord; u != nil {
		add("it is not known which work has a GPU: "+cmp.Or(u.Reason, "the record of the orchestrator is not read"), u.Remedy)
	}
	return all
}
