package control

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// rebindResult has the bindings of the policy before and after Rebind.
type rebindResult struct {
	Previous []report.Binding `json:"previous"`
	Current  []report.Binding `json:"current"`
	persistence
}

func (h handler) rebind(ctx context.Context, _ struct{}) (rebindResult, error) {
	previous, current, err := h.Rebind(ctx)
	if err != nil {
		return rebindResult{}, err
	}
	return rebindResult{report.DescribeBindings(previous), report.DescribeBindings(current), newPersistence(saveEnd(ctx, h))}, nil
}

func (r rebindResult) log(log *slog.Logger, command string, peer slog.Attr) {
	for i, b := range r.Current {
		log.Warn("policy position rebound by operator", "location", b.Location, "position", b.Position,
			"previous", r.previous(i), "current", b.Devices, peer)
	}
	if len(r.Current) == 0 {
		log.Warn("devices renumbered by operator", peer)
	}
	r.logReverted(log, command)
}

// previous are the devices that the i-th position was bound to.
func (r rebindResult) previous(i int) []gpu.DeviceID {
	if i < len(r.Previous) && r.Previous[i].Location == r.Current[i].Location {
		return r.Previous[i].Devices
	}
	return nil
}

// Rebind has the agent at path bind the indices, the numbers of devices and the common MIG profile of its policy to the
// devices that they select in the driver's present order, and writes the changes.
func Rebind(ctx context.Context, path string, out io.Writer) error {
	r, err := call[rebindResult](ctx, path, rebindURL, struct{}{})
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "devices are numbered as the driver lists them now, for all agents of this node that use this state directory")
	for i, b := range r.Current {
		if previous := r.previous(i); slices.Equal(previous, b.Devices) {
			fmt.Fprintf(out, "%s: unchanged\n", b)
		} else {
			fmt.Fprintf(out, "%s, previously to %s\n", b, report.IDs(previous))
		}
	}
	return r.writeReverted(out)
}
