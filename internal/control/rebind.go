package control

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/report"
)

// RebindResult is what the positions of the policy were bound to before an operator's order, and are after it.
type RebindResult struct {
	Was     []report.Binding `json:"was"`
	Is      []report.Binding `json:"is"`
	NotKept string           `json:"notKept,omitempty"` // why a restart of the agent undoes it; "" = it does not
}

// rebind binds the positions of the policy anew: see monitor.Rebind.
func (d desk) rebind(ctx context.Context, _ struct{}) (RebindResult, error) {
	was, is, err := d.Rebind(ctx)
	if err != nil {
		return RebindResult{}, err
	}
	r := RebindResult{Was: report.DescribeBindings(was), Is: report.DescribeBindings(is)}
	if err := keepEnd(ctx, d); err != nil {
		r.NotKept = err.Error()
	}
	return r, nil
}

func (r RebindResult) log(log *slog.Logger, order string, by slog.Attr) {
	for i, b := range r.Is {
		log.Warn("operator bound a position of the policy anew", "at", b.At, "position", b.Position, "was", r.before(i), "is", b.Devices, by)
	}
	if len(r.Is) == 0 {
		log.Warn("operator numbered the devices anew", by)
	}
	if r.NotKept != "" {
		log.Warn("a restart of the agent undoes the operator's order", "order", order, "reason", r.NotKept)
	}
}

// before are the devices that the i-th position was bound to.
func (r RebindResult) before(i int) []core.DeviceID {
	if i < len(r.Was) && r.Was[i].At == r.Is[i].At {
		return r.Was[i].Devices
	}
	return nil
}

// Rebind has the agent bind the positions of its policy anew: see monitor.Rebind.
func (c *Client) Rebind(ctx context.Context) (r RebindResult, err error) {
	return r, c.ask(ctx, http.MethodPost, rebindURL, struct{}{}, &r)
}

// Rebind has the agent at path bind the indices, the numbers of devices and the common MIG profile of its policy to the
// devices that they mean by the driver's present order, and writes what changed.
func Rebind(ctx context.Context, path string, out io.Writer) error {
	r, err := Dial(path).Rebind(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "devices are numbered as the driver lists them now, for all agents of this host that use this state directory")
	for i, b := range r.Is {
		if was := r.before(i); slices.Equal(was, b.Devices) {
			fmt.Fprintf(out, "%s: unchanged\n", b)
		} else {
			fmt.Fprintf(out, "%s; it was %s\n", b, report.IDs(was))
		}
	}
	if r.NotKept != "" {
		_, err = fmt.Fprintf(out, "in force, but a restart of the agent undoes it: %s\n", r.NotKept)
	}
	return err
}
