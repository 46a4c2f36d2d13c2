package control

import (
	"os"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/report"
)

func (h handler) debug() report.Debug {
	stats := h.Stats()
	d := report.Debug{
		PID: os.Getpid(), Goroutines: runtime.NumGoroutine(), Threads: entries("/proc/self/task"), FileDescriptors: entries("/proc/self/fd"),
		OpenDeviceNodes: openDeviceNodes(), HeapBytes: heap(), HealthChecks: stats.Checks, LastHealthCheck: stats.LastCheck, Stacks: stacks(),
	}
	now := time.Now()
	for _, t := range h.Watchdog().Tasks() {
		d.Tasks = append(d.Tasks, report.Task{Name: t.Name, LastHeartbeat: t.Last, Heartbeats: t.Beats, Overdue: t.Late(now)})
	}
	for _, c := range stats.Calls {
		d.Calls = append(d.Calls, report.Call{Name: c.Name, Index: c.Index, Since: c.Since})
	}
	if h.Endpoints != nil {
		d.Endpoints = h.Endpoints()
	}
	return d
}

// openDeviceNodes are NVIDIA's device nodes that this process has open (proc(5): /proc/self/fd).
func openDeviceNodes() []string {
	links, _ := filepath.Glob("/proc/self/fd/*") // its only error is a bad pattern
	var nodes []string
	for _, link := range links {
		if path, err := os.Readlink(link); err == nil && strings.Contains(path, "/dev/nvidia") {
			nodes = append(nodes, path)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// entries is the number of entries of a directory; 0 without procfs.
func entries(dir string) int {
	all, _ := os.ReadDir(dir)
	return len(all)
}

// heap is the size of all objects on the heap, in bytes.
func heap() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return sample[0].Value.Uint64()
}

// stacks returns the stacks of all goroutines, as in the trace of a panic.
func stacks() string {
	buf := make([]byte, 64<<10)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			return string(buf[:n])
		}
		buf = make([]byte, 2*len(buf))
	}
}
