package agent

import "github.com/tandem-gpu/tandem/internal/util/problem"

// ProofSettings has a problem for each setting because of which an agent proves no GPU. There is none without a policy for that.
func ProofSettings(o Options) []problem.Problem {
	if !o.Prove.On() {
		return nil
	}
	return takeSettings(o, problem.ProofNotRun, "proved")
}

// LimitSettings has a problem for each setting because of which it is not known which work has a share with a limit of memory, or whether the limit holds, whatever the policy
// is.
func LimitSettings(o Options) []problem.Problem {
	return recordSettings(o, problem.LimitUnsupported)
}

// ResetSettings has a problem for each setting because of which an agent can reset no GPU, whatever the policy for that is.
func ResetSettings(o Options) []problem.Problem { return takeSettings(o, problem.ResetCannot, "reset") }
