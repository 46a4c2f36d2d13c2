package shadow

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

const notOffered = "not offered"

// WithReasons adds to differences why this agent does not offer a device. A GPU that it can't read, and whose ID it does not know
// therefore, is a difference of its own.
func WithReasons(differences []Difference, inv *inventory.Allocatable) []Difference {
	why := map[string]string{}
	var all []Difference
	for _, e := range inv.Excluded() {
		if e.At.GPU != "" && e.Failure == gpu.NotFailed {
			why[string(e.At.GPU)] = e.Reason
		}
		if e.Failure != gpu.NotFailed {
			all = append(all, Difference{
				Kind: KindHealth, Device: strings.TrimSpace(fmt.Sprintf("GPU %d %s", e.Index, e.PCI)),
				Here: notOffered + ", it can't be read: " + e.Reason, There: cmp.Or(offeredThere(differences, string(e.At.GPU)), "perhaps a device that is offered there only"),
			})
		}
	}
	for _, d := range differences {
		id, _, _ := strings.Cut(d.Device, "::")
		if reason := why[id]; d.Here == notOffered && reason != "" {
			d.Here += ": " + reason
		}
		all = append(all, d)
	}
	return all
}

func offeredThere(differences []Difference, id string) string {
	for _, d := range differences {
		if d.Device == id && id != "" {
			return d.There
		}
	}
	return ""
}
