package nvidia

import (
	"io/fs"
	"slices"
	"time"
)

// This file detects added and removed GPUs and MIG instances, from procfs, on the waiter. It makes no NVML call.

// procfsWatch detects added and removed GPUs and MIG instances by the folders that the kernel module has for them under
// /proc (nv-procfs.c, nv-caps.c). Not every driver raises an event for a changed MIG layout (nvmlEventMigConfigChange),
// or for a GPU that it was bound to. Listing the folders makes no NVML call, takes 0.1 ms and can't hang; procfs has no
// inotify events. In a container without these folders nothing is detected, and only the periodic Snapshot shows
// changes.
type procfsWatch struct {
	names []string // nil = not listed yet
	at    time.Time
}

var procfsPatterns = []string{"driver/nvidia/gpus/*", "driver/nvidia/capabilities/gpu*/mig/gi*", "driver/nvidia/capabilities/gpu*/mig/gi*/ci*"}

// procfsInterval is the least time between two listings.
const procfsInterval = time.Second

// changed reports whether GPUs or instances were added or removed since the last listing.
func (w *procfsWatch) changed(proc fs.FS) bool {
	if w.names != nil && time.Since(w.at) < procfsInterval {
		return false
	}
	now := []string{}
	for _, pattern := range procfsPatterns {
		names, _ := fs.Glob(proc, pattern) // fails only for a malformed pattern
		now = append(now, names...)
	}
	before := w.names
	w.names, w.at = now, time.Now()
	return before != nil && !slices.Equal(before, now)
}
