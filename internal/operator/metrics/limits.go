package metrics

import (
	"cmp"
	"maps"
	"slices"
	"strconv"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/util/metric"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// The labels of a share are those of device_owner, with its pool: so that the two can be joined. There is a share for each work on a device that is shared with a
// limit, as there is an owner for each.
var shareLabels = []string{"device", "pool", "orchestrator", "namespace", "name", "container", "id"}

// The metrics of limits of device memory: of the shares of the policy, and of work for which another program has set one. Without either there are none.
var (
	limitBytes    = shared.Gauge("memory_limit_bytes", "Limit of the memory of a device for the control group of work, as the driver returns it. No series without a limit, or if it was not read.", shareLabels...)
	limitUsed     = shared.Gauge("memory_limit_used_bytes", "What the driver has counted for that limit. CUDA contexts and managed memory are not in it, or not completely.", shareLabels...)
	limitProcess  = shared.Gauge("memory_limit_process_bytes", "Memory of the device that the processes of the work have by the driver's list of processes, with their CUDA contexts. No series if it has no process there.", shareLabels...)
	limitState    = shared.Gauge("memory_limit_state", "1 for the state of the limit: limited, late, not limited, foreign, unknown. No series for the other states. required: by the policy. begun: false while the work has no process that may use the GPU, and its limit may not be known.", append(slices.Clone(shareLabels), "required", "begun", "state")...)
	limitProblems = shared.Gauge("memory_limit_problems", "Present problems of limits by their code, such as STALE_LIMIT; inspect names the work.", "code")

	limitsSet        = shared.Counter("memory_limits_set_total", "Limits of device memory that the agent has set since its start.")
	limitsFailed     = shared.Counter("memory_limits_failed_total", "Limits of device memory that the agent could not set.")
	limitsOverridden = shared.Counter("memory_limits_overridden_total", "Limits of containers that were not those of the policy, and that the agent has corrected: their variable was overridden.")
	limitsStale      = shared.Counter("memory_limits_stale_total", "Limits of control groups that have ended, found on another group and ended.")
	limitsLate       = shared.Counter("memory_limits_late_total", "Shares whose work used the GPU before the limit was set.")
)

// limitCodes are the problems that have a series also while there is none.
var limitCodes = []problem.Code{
	problem.LimitUnsupported, problem.LimitsUnknown, problem.LimitNotCounted, problem.LimitController, problem.LimitOverridden, problem.StaleLimit, problem.LimitState,
	problem.MemoryTotal,
}

// collectLimits adds the metrics of limits of device memory.
func collectLimits(p *metric.Samples, s Source) {
	t := s.Limits
	if t == nil {
		return
	}
	gpus, seen := s.State.Inventory.GPUs(), map[limitKey]bool{}
	for _, share := range t.Shares {
		share.Work.Claim = "" // no label: a pod that has a GPU through two claims is one series
		key := limitKey{share.GPU, share.Pool, share.Work}
		if seen[key] || !slices.Contains(gpus, share.GPU) {
			continue
		}
		seen[key] = true
		collectShare(p, s, share)
	}
	problems := map[problem.Code]float64{}
	for _, code := range limitCodes {
		problems[code] = 0
	}
	for _, one := range t.Problems {
		problems[one.Code]++
	}
	for _, code := range slices.Sorted(maps.Keys(problems)) {
		p.Add(limitProblems, problems[code], string(code))
	}
	p.Add(limitsSet, float64(t.Counts.Set))
	p.Add(limitsFailed, float64(t.Counts.Failed))
	p.Add(limitsOverridden, float64(t.Counts.Overridden))
	p.Add(limitsStale, float64(t.Counts.Stale))
	p.Add(limitsLate, float64(t.Counts.Late))
}

// limitKey is what the labels of a series distinguish.
type limitKey struct {
	gpu  gpu.DeviceID
	pool string
	work holders.Work
}

func collectShare(p *metric.Samples, s Source, share limit.Share) {
	w := share.Work
	labels := []string{string(share.GPU), share.Pool, w.Orchestrator, w.Namespace, w.Name, w.Container, w.ID}
	if share.Read {
		p.Add(limitUsed, float64(share.Driver.Used), labels...)
		if share.Driver.Hard != gpu.NoMemoryLimit {
			p.Add(limitBytes, float64(share.Driver.Hard), labels...)
		}
	}
	if n, ok := processBytes(s, share); ok {
		p.Add(limitProcess, float64(n), labels...)
	}
	p.Add(limitState, 1, append(labels, strconv.FormatBool(share.Required), strconv.FormatBool(share.Begun), string(cmp.Or(share.State, limit.Unknown)))...)
}

// processBytes is the memory of the processes of a share's work; false if it has none with a number.
func processBytes(s Source, share limit.Share) (sum uint64, ok bool) {
	d, _ := s.Use.Device(share.GPU)
	for _, one := range d.Processes {
		w := one.Owner
		if w.ID == "" || w.ID != share.Work.ID || w.Orchestrator != share.Work.Orchestrator || share.Work.Container != "" && w.Container != share.Work.Container {
			continue
		}
		if one.Memory.OK {
			sum, ok = sum+one.Memory.Value, true
		}
	}
	return sum, ok
}
