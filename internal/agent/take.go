package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
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

// MPSError means that the MPS control daemon of a GPU that was taken has not ended.
type MPSError struct {
	GPU   gpu.DeviceID
	Pools []string // by which the GPU is shared
}

// Error names what keeps a daemon from ending.
func (e *MPSError) Error() string {
	return fmt.Sprintf("the MPS control daemon of pool %s has not ended for GPU %s: it has clients, "+
		"or mps-daemon does not run it; see the log of mps-daemon", strings.Join(e.Pools, ", "), e.GPU)
}

// Take takes a GPU away from every API for this process, and looks whether processes use it: see ownership.Watcher.Take for what it waits for and
// for its other errors. It waits until the MPS control daemon of the GPU has ended, which mps-daemon ends for that. It
// fails with *UsedError, *MPSError, ErrProcessesUnknown, or why the GPU can't be read; the GPU is given back then.
func (a *Agent) Take(ctx context.Context, id gpu.DeviceID, p inventory.Purpose) (*ownership.Taken, error) {
	t, err := a.sources.host.agents.Take(ctx, id, p)
	if err != nil {
		return nil, err
	}
	if err := a.awaitUnused(ctx, t, id); err != nil {
		t.Release()
		return nil, err
	}
	return t, nil
}

// daemonEvery is the time between two looks for the end of an MPS control daemon.
const daemonEvery = time.Second

// errWantedBack is why a GPU that was taken is given back before it is used.
var errWantedBack = errors.New("it is wanted back")

// awaitUnused returns nil when no process uses a GPU that was taken, and mps-daemon has ended its MPS control daemon
// and given back its compute mode. It waits for nothing else.
func (a *Agent) awaitUnused(ctx context.Context, t *ownership.Taken, id gpu.DeviceID) error {
	daemon := &MPSError{GPU: id, Pools: mpsPools(id, a.Current())}
	waits := false
	for {
		usage, err := a.Usage(ctx)
		switch {
		case err != nil && waits && ctx.Err() != nil:
			return daemon
		case err != nil:
			return err
		}
		servers, err := unused(id, usage, a.Current().Placements(), mpsServers(a.Use()))
		if err != nil {
			return err
		}
		waits = servers || slices.ContainsFunc(daemon.Pools, a.sources.host.daemons.Recorded)
		if !waits {
			return nil
		}
		select {
		case <-time.After(daemonEvery):
		case <-t.WantedBack():
			return &ownership.NotFreeError{GPU: id, Err: errWantedBack}
		case <-ctx.Done():
			return daemon
		}
	}
}

// mpsServers returns a function that reports whether a process is an MPS server by a table.
func mpsServers(table use.Table) func(gpu.Process) bool {
	servers := map[int]uint64{}
	for _, d := range table.Devices {
		for i := range d.Processes {
			if p := &d.Processes[i]; p.MPSServer {
				servers[p.PID] = p.Started
			}
		}
	}
	return func(p gpu.Process) bool {
		started, ok := servers[p.PID]
		return ok && started == p.Started
	}
}

// unused returns why a GPU may be used by a process, by a reading of all devices at their placements; nil = none uses
// it. servers means that MPS servers are on it.
func unused(
	id gpu.DeviceID, all []gpu.Usage, placements map[gpu.DeviceID]gpu.Placement, isServer func(gpu.Process) bool,
) (servers bool, err error) {
	used, read := UsedError{GPU: id}, false
	for i := range all {
		u := &all[i]
		if placements[u.Device].GPU != id {
			continue
		}
		if u.At.IsZero() || u.Processes == nil {
			return false, fmt.Errorf("GPU %s: %w", id, ErrProcessesUnknown)
		}
		read = true
		for _, p := range *u.Processes {
			if isServer(p) {
				servers = true
				continue
			}
			used.Processes = append(used.Processes, p.String())
		}
	}
	switch {
	case !read:
		return false, fmt.Errorf("GPU %s: %w", id, ErrProcessesUnknown)
	case len(used.Processes) > 0:
		return servers, &used
	}
	return servers, nil
}
