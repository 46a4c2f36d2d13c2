package coretest

import (
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// Held are holders of whole GPUs, by the text that names the work of each: "pod default/a", "claim default/a" or "job a (allocation 1)".
func Held(id gpu.DeviceID, names ...string) (all []holders.Holder) {
	for _, name := range names {
		kind, of, _ := strings.Cut(name, " ")
		w := holders.Work{Orchestrator: holders.Kubernetes}
		namespace, rest, _ := strings.Cut(of, "/")
		switch kind {
		case "pod":
			w.Namespace, w.Name = namespace, rest
		case "claim":
			w.Namespace, w.Claim = namespace, rest
		case "job":
			w.Orchestrator = holders.Nomad
			w.Name, w.ID, _ = strings.Cut(strings.TrimSuffix(of, ")"), " (allocation ")
		}
		all = append(all, holders.Holder{Work: w, Device: id, At: gpu.WholeGPU(id)})
	}
	return all
}
