package metrics

import (
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/util/metric"
)

// The metrics of proofs: of the GPUs that are listed, if the configuration has a section prove. A GPU without a result has no series of one.
var (
	provePassed  = shared.Gauge("prove_passed", "1 if the GPU passed its latest proof with a result, 0 if it failed.", "gpu")
	proveTime    = shared.Gauge("prove_timestamp_seconds", "When the latest proof with a result ended.", "gpu")
	proveSeconds = shared.Gauge("prove_duration_seconds", "How long the command of that proof ran.", "gpu")
	proveValue   = shared.Gauge("prove_value", "What the command of that proof measured, by the name that it gave. Compare it over the fleet.", "gpu", "name")
	proveNotRun  = shared.Gauge("prove_could_not_run", "Proofs since the latest result whose check could not run. They have no result.", "gpu")
	proveRunning = shared.Gauge("prove_running", "1 while the GPU is proved: it takes no work.", "gpu")
)

// collectProofs adds the metrics of proofs; nil = no GPU is proved.
func collectProofs(p *metric.Samples, s Source) {
	if s.Proofs == nil {
		return
	}
	for _, id := range s.State.Inventory.GPUs() {
		r, known := s.Proofs.State.Of(id)
		if !known {
			continue
		}
		gpu := string(id)
		p.AddBool(proveRunning, r.Running != nil && !r.Running.Runs.IsZero(), gpu)
		p.Add(proveNotRun, float64(tries(r)), gpu)
		if r.Last == nil {
			continue
		}
		p.AddBool(provePassed, r.Last.Passed, gpu)
		p.Add(proveTime, timestamp(r.Last.At), gpu)
		p.Add(proveSeconds, r.Last.Took.Seconds(), gpu)
		for name, v := range r.Last.Values {
			p.Add(proveValue, v, gpu, name)
		}
	}
}

func tries(r proof.Record) int {
	if r.Tries == nil {
		return 0
	}
	return r.Tries.Count
}
