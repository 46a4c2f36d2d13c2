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
//
// PIDs are those of this process's PID namespace: the driver leaves out processes that are not in it (os_find_ns_pid in NVIDIA's
// open kernel module). Older drivers return PIDs of the host. A process that procfs does not show is left out, so a PID that
// means nothing here has no effect.
func (r *healthRecord) readProcesses(c *caller, h nvml.Device, p checkPlan) {
	r.processes = nil
	if c.err != nil || p.proc == nil || r.processesCall.unsupported {
		return
	}
	infos, err := call(c.slot, processesCall, c.at, h.GetComputeRunningProcesses)
	if endsCheck(err) {
		c.err = err
		return
	}
	if r.processesCall.update(err); err != nil {
		return
	}
	found := make([]gpu.Process, 0, len(infos))
	for _, info := range infos {
		one := gpu.Process{At: gpu.Placement{GPU: r.id, GI: info.GpuInstanceId, CI: info.ComputeInstanceId}, PID: int(info.Pid)}
		if info.UsedGpuMemory != memoryNotAvailable {
			one.Memory = gpu.OptionalUint64Of(info.UsedGpuMemory)
		}
		var running bool
		if one.Started, running = processStart(p.proc, one.PID); running {
			found = append(found, one)
		}
	}
	slices.SortFunc(found, func(a, b gpu.Process) int {
		return cmp.Or(cmp.Compare(a.PID, b.PID), gpu.ComparePlacements(a.At, b.At))
	})
	r.processes = &found
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
// has not waited for it yet (zombie): its memory is free by then (do_exit in the kernel).
func processStart(proc fs.FS, pid int) (ticks uint64, running bool) {
	text, err := fs.ReadFile(proc, path.Join(strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, false
	}
	name := strings.LastIndexByte(string(text), ')') // the second field, which may contain anything
	fields := strings.Fields(string(text[name+1:]))
	const state, started = 0, 19 // numbers 3 and 22 in proc_pid_stat(5), of which the first two are before fields
	if len(fields) <= started || slices.Contains([]string{"Z", "X", "x"}, fields[state]) {
		return 0, false
	}
	ticks, err = strconv.ParseUint(fields[started], 10, 64)
	return ticks, err == nil
}
