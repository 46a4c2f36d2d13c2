package control

import (
	"os"
	"runtime"
	"runtime/metrics"
	"time"

	"github.com/tandem-gpu/tandem/internal/report"
)

// debug is the agent from the inside, now.
func (d desk) debug() report.Debug {
	stats := d.Stats()
	view := report.Debug{
		PID: os.Getpid(), Goroutines: runtime.NumGoroutine(), Threads: entries("/proc/self/task"), Descriptors: entries("/proc/self/fd"),
		DriverFiles: driverFiles(), HeapBytes: heap(), Checks: stats.Checks, LastCheck: stats.LastCheck, Stacks: report.Stacks(),
	}
	now := time.Now()
	for _, s := range d.Watchdog().Tasks() {
		view.Tasks = append(view.Tasks, report.Task{Name: s.Name, Last: s.Last, Turns: s.Beats, Late: s.Late(now)})
	}
	for _, c := range stats.Calls {
		view.Calls = append(view.Calls, report.Call{Name: c.Name, Index: c.Index, Since: c.Since})
	}
	if d.Endpoints != nil {
		view.Endpoints = d.Endpoints()
	}
	return view
}

func entries(dir string) int {
	all, _ := os.ReadDir(dir) // 0 where there is no procfs
	return len(all)
}

func heap() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return sample[0].Value.Uint64()
}
