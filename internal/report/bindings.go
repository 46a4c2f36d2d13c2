package report

import (
	"fmt"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Binding is a position of the policy (an index, a number of devices, the common MIG profile) and the devices that it means
// until a reboot or the command rebind.
type Binding struct {
	At       string          `json:"at"`       // where the policy says it
	Position string          `json:"position"` // "index 5, 6", "the first 2", "profile 1g.10gb"
	Devices  []core.DeviceID `json:"devices"`
}

// String is the binding in a line.
func (b Binding) String() string {
	return strings.TrimPrefix(fmt.Sprintf("%s: %s is bound to %s", b.At, b.Position, IDs(b.Devices)), ": ")
}

// IDs are the devices of a binding in a line.
func IDs(devices []core.DeviceID) string {
	if len(devices) == 0 {
		return "no device"
	}
	var texts []string
	for _, id := range devices {
		texts = append(texts, string(id))
	}
	return strings.Join(texts, ", ")
}

// DescribeBindings describes what the positions of a policy mean.
func DescribeBindings(bound []core.PositionBinding) []Binding {
	bindings := []Binding{}
	for _, b := range bound {
		bindings = append(bindings, Binding{At: b.At, Position: b.Position, Devices: append([]core.DeviceID{}, b.Devices...)})
	}
	return bindings
}
