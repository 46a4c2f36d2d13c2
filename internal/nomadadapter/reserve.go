package nomadadapter

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/mps"
)

// reserveWait is how long a reservation waits for the first snapshot. Nomad waits for Reserve without a limit, and can't
// be interrupted while it does.
const reserveWait = 9 * time.Second

// Reserve returns what a task needs to use the devices, by the injection of their pool. It allocates nothing and calls no
// driver: Nomad records allocations, and there is no release. An error, which fails the allocation permanently, names all
// unknown and all unhealthy IDs.
func (p *Plugin) Reserve(ids []string) (*device.ContainerReservation, error) {
	if len(ids) == 0 {
		return &device.ContainerReservation{}, nil
	}
	began := time.Now()
	reservation, err := p.reserve(ids)
	p.counters.reserved(began, err)
	p.streams.reserved(func() { p.log.Warn(unreadWarning) })
	return reservation, err
}

func (p *Plugin) reserve(ids []string) (*device.ContainerReservation, error) {
	r := p.currentRun()
	if !r.enabled {
		return nil, device.ErrPluginDisabled
	}
	units := make([]inventory.UnitID, len(ids))
	for i, id := range ids {
		units[i] = inventory.UnitID(id)
	}
	inv := r.source.Current()
	plan, err := inv.Reserve(units...)
	if err != nil && inv.Provisional() {
		inv = r.awaitInventory()
		plan, err = inv.Reserve(units...)
	}
	if d := inv.Driver(); err != nil && d.State != gpu.DriverReady && !strings.Contains(err.Error(), d.Reason) {
		err = fmt.Errorf("%w (driver %s: %s)", err, d.State, d.Reason)
	}
	if err == nil {
		var findings []inventory.Finding
		findings, err = r.source.CheckReservation(plan.Units)
		for _, f := range findings {
			p.log.Warn("device reserved despite the reservation check", "id", f.Device.ID, "pci", f.Device.PCI, "reason", f.Reason())
		}
	}
	if err != nil {
		p.log.Warn("reservation refused", "error", err)
		return nil, err
	}
	r.source.Reserved(plan.Devices)
	return newReservation(plan, r.settings), nil
}

// awaitInventory returns an inventory that is not provisional; a provisional one only after reserveWait:
//
//	agent   GPU-1 fingerprinted        starts a task: Reserve(GPU-1)
//	plugin  crashes . started again .................^ .... driver answers
//
// In the new process GPU-1 is not unknown: the driver was not read yet.
func (r *run) awaitInventory() *inventory.Allocatable {
	ctx, cancel := context.WithTimeout(context.Background(), reserveWait)
	defer cancel()
	ctx, stop := withDone(ctx, r.done)
	defer stop()
	return awaitFirstSnapshot(ctx, r.source)
}

// Environment variables of a task.
const (
	cudaDevicesEnv = "CUDA_VISIBLE_DEVICES"    // of CUDA: UUIDs
	cdiDevicesEnv  = "CDI_DEVICES"             // qualified names of CDI devices, a list in JSON
	nodesEnv       = "TANDEM_GPU_NODES"        // paths of the device nodes without which CUDA does not work, separated by colons
	mpsPipeEnv     = "CUDA_MPS_PIPE_DIRECTORY" // of CUDA: the pipe directory of the MPS control daemon
)

// newReservation returns a plan as Nomad's type. The pipe directory has its path on the host: a job whose driver isolates
// the file system mounts it under that path (see the package's documentation).
func newReservation(plan inventory.Plan, s Settings) *device.ContainerReservation {
	r := &device.ContainerReservation{Envs: make(map[string]string, len(plan.Env)+4)}
	if plan.Injection.Runtime {
		r.Envs[inventory.VisibleDevices] = plan.VisibleDevices()
	} else {
		r.Envs[cudaDevicesEnv] = plan.VisibleDevices()
	}
	if len(plan.CDI) > 0 {
		names, _ := json.Marshal(plan.CDI) // strings: never an error
		r.Envs[cdiDevicesEnv] = string(names)
	}
	for _, e := range plan.Env {
		r.Envs[e.Name] = e.Value
	}
	if plan.MPS != "" {
		r.Envs[mpsPipeEnv] = mps.Pipe(s.MPSRoot, plan.MPS)
	}
	addNodes(r, plan, s.Core.Roots.Dev)
	addMounts(r, plan)
	return r
}

// Response returns what Reserve responds to a request for the units of a plan, which was made by inventory.Reserve.
func Response(plan inventory.Plan, s Settings) *device.ContainerReservation {
	return newReservation(plan, s)
}

// addNodes adds the device nodes. Nomad forgets them when its agent restarts, and a task that restarts after that gets the
// environment only (nomad#9473): by nodesEnv a task can find out. It has no optional node, which NVIDIA's container runtime may
// leave out.
func addNodes(r *device.ContainerReservation, plan inventory.Plan, devRoot string) {
	if len(plan.Nodes) == 0 {
		return
	}
	var required, present []string
	for _, d := range plan.Devices {
		required = append(required, d.RequiredNodes()...)
	}
	for _, n := range plan.Nodes {
		r.Devices = append(r.Devices, &device.DeviceSpec{
			TaskPath:    n.Path,
			HostPath:    filepath.Join("/", devRoot, n.Path),
			CgroupPerms: n.Permissions,
		})
		if slices.Contains(required, n.Path) {
			present = append(present, n.Path)
		}
	}
	if present != nil {
		r.Envs[nodesEnv] = strings.Join(present, ":")
	}
}

// addMounts adds the driver's files. With any mount Nomad drops the volume_mounts of the task at its first start
// (client/allocrunner/taskrunner/task_runner_hooks.go, setMounts), so there is none unless the pool's injection has libraries.
// A client of an MPS control daemon then gets its pipe directory and the /dev/shm of the host, where the daemon runs, as mounts, too,
// because a volume_mount can't be used for them.
func addMounts(r *device.ContainerReservation, plan inventory.Plan) {
	for _, m := range plan.Mounts {
		r.Mounts = append(r.Mounts, &device.Mount{TaskPath: m.ContainerPath, HostPath: m.HostPath, ReadOnly: m.ReadOnly})
	}
	if pipe := r.Envs[mpsPipeEnv]; pipe != "" && plan.Injection.Libraries {
		for _, path := range []string{pipe, "/dev/shm"} {
			r.Mounts = append(r.Mounts, &device.Mount{TaskPath: path, HostPath: path})
		}
	}
}
