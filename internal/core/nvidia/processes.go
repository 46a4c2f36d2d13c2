package nvidia

import (
	"cmp"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// processesCall lists the processes with a compute context on a GPU. In MIG mode it lists those of all instances, with the instance
// of each, if the caller has the privileges for that (nvml.h).
const processesCall = "nvmlDeviceGetComputeRunningProcesses"

// readProcesses reads the processes with memory of the GPU. They are unknown (nil) if the call fails, which is no fault of
// the GPU.
func (r *healthRecord) readProcesses(c *caller, h nvml.Device, p checkPlan) {
	r.processes = nil
	if c.err != nil || p.proc == nil || r.processesCall.unsupported {
		return
	}
	found, err := listProcesses(c, h, p.proc)
	if endsCheck(err) {
		c.err = err
		return
	}
	if r.processesCall.update(err); err == nil {
		r.processes = &found
	}
}

// readUsedBy is readProcesses for a reading of usage: a call that is not supported is made again with the values that change slowly.
// It belongs to the running query.
func (w *gpuWorker) readUsedBy(c *caller, h nvml.Device, proc fs.FS) *[]gpu.Process {
	if c.err != nil || proc == nil || w.usedByUnsupported {
		return nil
	}
	found, err := listProcesses(c, h, proc)
	if endsCheck(err) {
		c.err = err
	}
	if w.usedByUnsupported = isUnsupported(err); err != nil {
		return nil
	}
	return &found
}

// listProcesses makes the call and returns the processes of a GPU by PID.
//
// PIDs are those of this process's PID namespace: the driver leaves out processes that are not in it (os_find_ns_pid in NVIDIA's
// open kernel module). Older drivers return PIDs of the host. A process that procfs does not show is left out, so a PID that
// means nothing here has no effect.
//
// Processes that only draw (nvmlDeviceGetGraphicsRunningProcesses) are not read: a display server holds its GPU for good, and no
// orchestrator gives a GPU out for that.
func listProcesses(c *caller, h nvml.Device, proc fs.FS) ([]gpu.Process, error) {
	infos, err := call(c.slot, processesCall, c.at, h.GetComputeRunningProcesses)
	if err != nil {
		return nil, err
	}
	found := make([]gpu.Process, 0, len(infos))
	for _, info := range infos {
		one := gpu.Process{At: gpu.Placement{GPU: c.at.GPU, GI: info.GpuInstanceId, CI: info.ComputeInstanceId}, PID: int(info.Pid)}
		if info.UsedGpuMemory != memoryNotAvailable {
			one.Memory = gpu.OptionalUint64Of(info.UsedGpuMemory)
		}
		var running bool
		if one.Started, running = processStart(proc, one.PID); running {
			found = append(found, one)
		}
	}
	slices.SortFunc(found, func(a, b gpu.Process) int {
		return cmp.Or(cmp.Compare(a.PID, b.PID), gpu.ComparePlacements(a.At, b.At))
	})
	return found, nil
}

// processesAt are those of a GPU that use the device at a placement; nil if they are unknown.
func processesAt(all *[]gpu.Process, at gpu.Placement) *[]gpu.Process {
	if all == nil {
		return nil
	}
	of := slices.DeleteFunc(slices.Clone(*all), func(p gpu.Process) bool { return !at.Covers(p.At) })
	return &of
}

// memoryNotAvailable is NVML_VALUE_NOT_AVAILABLE as an unsigned long long (nvml.h): the memory of a process is not known.
const memoryNotAvailable = ^uint64(0)

// ProcessRunning reports whether a process that was read has not ended. It reads procfs, which waits for no disk, and makes no
// driver call. It is safe for concurrent use.
func ProcessRunning(r core.Roots, p gpu.Process) bool {
	started, running := processStart(os.DirFS(cmp.Or(r.Proc, "/proc")), p.PID)
	return running && started == p.Started
}

// processStart reads when a process started, in clock ticks since boot; false if there is none, or it has ended and its parent
// has not waited for it yet (zombie): its memory is free by then (do_exit in the kernel). A zombie with more than one thread has not ended: its
// main thread has, and the others, which keep the memory, are removed when they end.
func processStart(proc fs.FS, pid int) (ticks uint64, running bool) {
	text, err := fs.ReadFile(proc, path.Join(strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, false
	}
	name := strings.LastIndexByte(string(text), ')') // the second field, which may contain anything
	fields := strings.Fields(string(text[name+1:]))
	const state, threads, started = 0, 17, 19 // numbers 3, 20 and 22 in proc_pid_stat(5), of which the first two are before fields
	if len(fields) <= started || fields[state] == "Z" && slices.Contains([]string{"0", "1"}, fields[threads]) || strings.EqualFold(fields[state], "X") {
		return 0, false
	}
	ticks, err = strconv.ParseUint(fields[started], 10, 64)
	return ticks, err == nil
}
