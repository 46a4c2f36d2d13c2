package nomadadapter

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
)

// reserveWait bounds how long a reservation waits for a driver that was never asked. Nomad waits for
// ever and can't be interrupted while it does.
const reserveWait = 9 * time.Second

// ReservationObserver is a Source that wants to know which devices were given to new work.
type ReservationObserver interface {
	// Reserved is called while Nomad waits, from several goroutines at once. It must not block.
	Reserved([]core.Device)
}

// Reserve says what a task needs to use the devices: environment and device nodes. It takes nothing and
// calls no driver; Nomad keeps the books, and there is no release. Every unknown and every unhealthy ID
// is named in the error, which fails the allocation for good.
//
// Mounts are never returned: Nomad would drop the task's volumes in their favour
// (client/allocrunner/taskrunner/task_runner_hooks.go, setMounts).
func (p *Plugin) Reserve(ids []string) (*device.ContainerReservation, error) {
	if len(ids) == 0 {
		return &device.ContainerReservation{}, nil
	}
	l := p.currentRun()
	if !l.enabled {
		return nil, device.ErrPluginDisabled
	}
	units := make([]core.UnitID, len(ids))
	for i, id := range ids {
		units[i] = core.UnitID(id)
	}
	inv := l.asked()
	plan, err := inv.Reserve(units...)
	if d := inv.Driver(); err != nil && d.State != core.DriverReady {
		err = fmt.Errorf("%w (driver %s: %s)", err, d.State, d.Reason)
	}
	if err != nil {
		p.log.Warn("reservation refused", "error", err)
		return nil, err
	}
	if to, ok := l.source.(ReservationObserver); ok {
		to.Reserved(plan.Devices)
	}
	return reservation(plan, l.settings), nil
}

// asked returns the current inventory, of a driver that was asked at least once if that can be had soon:
//
//	agent   GPU-1 fingerprinted        starts a task: Reserve(GPU-1)
//	plugin  crashes . started again .................^ .... driver answers
//
// To the new process GPU-1 is not unknown, it was not read yet.
func (l *run) asked() *core.Inventory {
	if inv := l.source.Current(); !inv.Provisional() {
		return inv
	}
	ctx, cancel := context.WithTimeout(context.Background(), reserveWait)
	defer cancel()
	ctx, stop := withDone(ctx, l.done)
	defer stop()
	return awaitFirstSnapshot(ctx, l.source)
}

// mpsPipeEnv is the variable by which CUDA finds the MPS control daemon that it is to be a client of.
const mpsPipeEnv = "CUDA_MPS_PIPE_DIRECTORY"

// reservation puts a plan into Nomad's words. A task sees the pipe directory of its MPS daemon where the host has it:
// a job whose driver isolates mounts that directory there itself (see the package's documentation).
func reservation(plan core.Plan, s Settings) *device.ContainerReservation {
	r := &device.ContainerReservation{Envs: make(map[string]string, len(plan.Env)+1)}
	for _, e := range plan.Env {
		r.Envs[e.Name] = e.Value
	}
	if plan.MPS != "" {
		r.Envs[mpsPipeEnv] = filepath.Join(s.MPSRoot, "nvidia.com", plan.MPS, "pipe")
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
