package nomadadapter

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/hostwatch"
)

// reserveWait is how long a reservation waits for the first snapshot. Nomad waits for Reserve without a limit, and can't
// be interrupted while it does.
const reserveWait = 9 * time.Second

// Reserve returns what a task needs to use the devices: environment and device nodes. It allocates nothing and calls no
// driver: Nomad records allocations, and there is no release. An error, which fails the allocation permanently, names all
// unknown and all unhealthy IDs.
//
// Mounts are never returned: Nomad would drop the task's volumes in their favour
// (client/allocrunner/taskrunner/task_runner_hooks.go, setMounts).
func (p *Plugin) Reserve(ids []string) (*device.ContainerReservation, error) {
	if len(ids) == 0 {
		return &device.ContainerReservation{}, nil
	}
	r := p.currentRun()
	if !r.enabled {
		return nil, device.ErrPluginDisabled
	}
	units := make([]inventory.UnitID, len(ids))
	for i, id := range ids {
		units[i] = inventory.UnitID(id)
	}
	inv := r.inventory()
	plan, err := inv.Reserve(units...)
	if d := inv.Driver(); err != nil && d.State != gpu.DriverReady {
		err = fmt.Errorf("%w (driver %s: %s)", err, d.State, d.Reason)
	}
	if err != nil {
		p.log.Warn("reservation refused", "error", err)
		return nil, err
	}
	r.source.Reserved(plan.Devices)
	return newReservation(plan, r.settings), nil
}

// inventory returns the current inventory; a provisional one only after reserveWait:
//
//	agent   GPU-1 fingerprinted        starts a task: Reserve(GPU-1)
//	plugin  crashes . started again .................^ .... driver answers
//
// In the new process GPU-1 is not unknown: the driver was not read yet.
func (r *run) inventory() *inventory.Inventory {
	if inv := r.source.Current(); !inv.Provisional() {
		return inv
	}
	ctx, cancel := context.WithTimeout(context.Background(), reserveWait)
	defer cancel()
	ctx, stop := withDone(ctx, r.done)
	defer stop()
	return awaitFirstSnapshot(ctx, r.source)
}

// mpsPipeEnv is the environment variable with the pipe directory of the MPS control daemon of a CUDA client.
const mpsPipeEnv = "CUDA_MPS_PIPE_DIRECTORY"

// newReservation returns a plan as Nomad's type. The pipe directory has its path on the host: a job whose driver isolates
// the file system mounts it under that path (see the package's documentation).
func newReservation(plan inventory.Plan, s Settings) *device.ContainerReservation {
	r := &device.ContainerReservation{Envs: make(map[string]string, len(plan.Env)+2)}
	if plan.Injection.Runtime {
		r.Envs[inventory.VisibleDevices] = plan.VisibleDevices()
	}
	for _, e := range plan.Env {
		r.Envs[e.Name] = e.Value
	}
	if plan.MPS != "" {
		r.Envs[mpsPipeEnv] = hostwatch.MPSPipe(s.MPSRoot, plan.MPS)
	}
	for _, n := range plan.Nodes {
		r.Devices = append(r.Devices, &device.DeviceSpec{
			TaskPath:    n.Path,
			HostPath:    filepath.Join("/", s.Core.Roots.Dev, n.Path),
			CgroupPerms: n.Permissions,
		})
	}
	return r
}
