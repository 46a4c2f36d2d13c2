package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/hardware/cuda"
)

// heldMemory is what the CUDA program allocates. Its context takes more beside it.
const heldMemory = 256 << 20

// useCUDA runs the CUDA program in the environment of a reservation of each device. Only CUDA_VISIBLE_DEVICES limits a process
// without a container.
func (r *run) useCUDA(ctx context.Context) {
	const part = "cuda"
	if !r.runs(part) {
		return
	}
	program, err := cuda.Compile(ctx, r.dir)
	if err != nil {
		r.add(part, "program", Failed, err.Error())
		return
	}
	for _, id := range r.devices() {
		grant, err := r.nomad.Reserve(id)
		if err != nil {
			r.check(part, id, "", err)
			continue
		}
		before := r.usedMemory(ctx, id)
		p, err := cuda.Start(ctx, program, r.cuda, grant.Env)
		if err != nil {
			r.check(part, id, "", err)
			continue
		}
		if len(p.Devices) == 0 && len(p.Failures) > 0 && strings.Contains(p.Failures[0], "dlopen") {
			r.add(part, "all", LeftOut, p.Failures[0])
			return
		}
		r.check(part, id, "a process in the reserved environment sees this device alone; memory was copied there and back, and a kernel ran", seesOnly(p, id))
		if p.PID() != 0 {
			r.checkHeld(ctx, p, id, before)
		}
		r.check(part, id+", program ends", "", p.End())
	}
}

// seesOnly checks what a program saw.
func seesOnly(p *cuda.Process, id string) error {
	_, bare, _ := strings.Cut(id, "-")
	if len(p.Failures) > 0 {
		return errors.New(strings.Join(p.Failures, "; "))
	}
	if !slices.Equal(p.Devices, []string{bare}) || p.Kernels != 1 {
		return fmt.Errorf("it sees %v, and used %d", p.Devices, p.Kernels)
	}
	return nil
}

// usedMemory is the used memory of a device that each agent shows.
func (r *run) usedMemory(ctx context.Context, id string) map[string]uint64 {
	used := map[string]uint64{}
	for _, name := range agents {
		all, _ := r.inspectRunning(ctx, name) // its error is reported when the process is looked for
		used[name] = usedBytes(all, id)
	}
	return used
}

// usedBytes is the used memory of a device in a report; 0 if it is not there.
func usedBytes(all report.Report, id string) uint64 {
	for _, d := range all.Devices {
		if string(d.ID) == id && d.Usage != nil && d.Usage.MemoryUsedBytes != nil {
			return *d.Usage.MemoryUsedBytes
		}
	}
	return 0
}

// checkHeld checks that both agents show a process that holds memory of a device of which less was used before.
func (r *run) checkHeld(ctx context.Context, p *cuda.Process, id string, before map[string]uint64) {
	if r.whileHeld != nil {
		if err := r.whileHeld(p.PID(), id); err != nil {
			r.add("cuda", id+", simulation", Failed, err.Error())
			return
		}
	}
	for _, name := range agents {
		at := held{name, id, p.PID(), before[name] + heldMemory}
		if r.whileHeld != nil {
			at.used = 0 // the simulated driver has no memory of processes
		}
		used, err := r.awaitProcess(ctx, at)
		r.check("cuda", fmt.Sprintf("%s, shown by %s", id, name), fmt.Sprintf("process with memory of the device; %d MiB are used, before it were %d", used>>20, before[name]>>20), err)
	}
}

// held is a process that holds memory, as an agent should show it.
type held struct {
	agent, device string
	pid           int
	used          uint64 // least used memory of the device
}

// awaitProcess waits until an agent shows a process on its device and on no other, and returns the used memory of the device.
func (r *run) awaitProcess(ctx context.Context, want held) (used uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, 45*time.Second)
	defer cancel()
	for {
		all, inspectErr := r.inspectRunning(ctx, want.agent)
		if inspectErr != nil {
			return 0, inspectErr
		}
		used = usedBytes(all, want.device)
		var on []string
		for _, d := range all.Devices {
			if slices.ContainsFunc(d.Processes, func(p report.Process) bool { return p.PID == want.pid }) {
				on = append(on, string(d.ID))
			}
		}
		if slices.Equal(on, []string{want.device}) && used >= want.used {
			return used, nil
		}
		if !watch.Sleep(ctx, 500*time.Millisecond) {
			return used, fmt.Errorf("process %d is shown on %v with %d MiB used, want at least %d (in a container the driver may list other PIDs than procfs)", want.pid, on, used>>20, want.used>>20)
		}
	}
}
