package agent

import (
	"cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// seesProcesses reports whether this process sees those of the node.
func seesProcesses(c core.Config) bool { return gpureset.SeesProcesses(cmp.Or(c.Roots.Proc, "/proc")) }

// processProblems has one problem for each setting that needs the processes of the node, if this process does not see them.
func processProblems(c core.Config) []problem.Problem {
	if seesProcesses(c) {
		return nil
	}
	const unseen = "processes outside of the agent's PID namespace are not seen: set hostPID: true in its pod"
	var lines []string
	if c.ReservationCheck.Enabled() {
		lines = append(lines, "reservation check: "+unseen)
	}
	if c.Occupancy == inventory.OccupancyWithhold {
		lines = append(lines, "occupancy = withhold has no effect: "+unseen)
	}
	return problem.Each(problem.HiddenProcess, lines...)
}

// readsUsers reports whether the processes of each device are read with its usage. In another PID namespace the driver would leave most
// out, and a device would seem to have none.
func readsUsers(c core.Config) bool { return c.Occupancy != inventory.OccupancyOff && seesProcesses(c) }
