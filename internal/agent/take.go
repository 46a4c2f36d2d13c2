package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// ErrProcessesUnknown means that the driver shows no list of the processes on a GPU, or that this process does not see those of the node.
var ErrProcessesUnknown = errors.New("the processes on the GPU are not known: occupancy must be report or withhold, and a pod needs hostPID: true")

// UsedError means that processes use a GPU that no work has.
type UsedError struct {
	GPU       gpu.DeviceID
	Processes []string
}

// Error lists the processes.
func (e *UsedError) Error() string {
	return fmt.Sprintf("GPU %s is used by processes without a reservation: %s", e.GPU, inventory.ProcessList(e.Processes))
}

// Take takes a GPU away from every API for this process, and looks whether processes use it: see ownership.Watcher.Take for what it waits for and
// for its other errors. It fails with *UsedError, ErrProcessesUnknown, or why the GPU can't be read; the GPU is given back then.
func (a *Agent) Take(ctx context.Context, id gpu.DeviceID, p inventory.Purpose) (*ownership.Taken, error) {
	t, err := a.sources.host.agents.Take(ctx, id, p)
	if err != nil {
		return nil, err
	}
	usage, err := a.Usage(ctx)
	if err == nil {
		err = unused(id, usage, a.Current().Placements())
	}
	if err != nil {
		t.Release()
		return nil, err
	}
	return t, nil
}

// unused returns why a GPU may be used by a process, by a reading of all devices at their placements; nil = none uses it.
func unused(id gpu.DeviceID, all []gpu.Usage, placements map[gpu.DeviceID]gpu.Placement) error {
	used, read := UsedError{GPU: id}, false
	for i := range all {
		u := &all[i]
		if placements[u.Device].GPU != id {
			continue
		}
		if u.At.IsZero() || u.Processes == nil {
			return fmt.Errorf("GPU %s: %w", id, ErrProcessesUnknown)
		}
		read = true
		for _, p := range *u.Processes {
			used.Processes = append(used.Processes, p.String())
		}
	}
	switch {
	case !read:
		return fmt.Errorf("GPU %s: %w", id, ErrProcessesUnknown)
	case len(used.Processes) > 0:
		return &used
	}
	return nil
}
