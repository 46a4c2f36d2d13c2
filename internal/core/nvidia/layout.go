package nvidia

import (
	"io/fs"
	"slices"
	"time"
)

// layout watches the folders under /proc that come and go with GPUs and with MIG instances (kernel module:
// nv-procfs.c, nv-caps.c): not every driver tells of a new layout (nvmlEventMigConfigChange), or of a GPU that it
// was bound to. Listing them asks the kernel and not NVML, takes 0.1 ms, and can't hang; procfs has no file events.
// Where a container hides them nothing is seen, and readings find out in their own time.
type layout struct {
	seen []string // nil = not looked yet
	at   time.Time
}

var layouts = []string{"driver/nvidia/gpus/*", "driver/nvidia/capabilities/gpu*/mig/gi*", "driver/nvidia/capabilities/gpu*/mig/gi*/ci*"}

// layoutEvery is the least time between two looks.
const layoutEvery = time.Second

// changed reports whether GPUs or instances came or went since the last look.
func (l *layout) changed(proc fs.FS) bool {
	if l.seen != nil && time.Since(l.at) < layoutEvery {
		return false
	}
	now := []string{}
	for _, pattern := range layouts {
		names, _ := fs.Glob(proc, pattern) // only a bad pattern is an error
		now = append(now, names...)
	}
	before := l.seen
	l.seen, l.at = now, time.Now()
	return before != nil && !slices.Equal(before, now)
}
