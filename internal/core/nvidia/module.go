package nvidia

import (
	"os"
	"path/filepath"
	"sync"

	"github.com/tandem-gpu/tandem/internal/core"
)

// module notes where the kernel module was seen: in /sys/module and /proc/driver of one host, by path. Not every
// container sees both, or any; what was never seen is not gone.
var module = struct {
	sync.Mutex
	seen map[string]bool
}{seen: map[string]bool{}}

// moduleSigns are files that exist while the kernel module is loaded.
func moduleSigns(r core.Roots) []string {
	return []string{
		filepath.Join(rooted(r.Sys, "/sys"), "module/nvidia/version"),
		filepath.Join(rooted(r.Proc, "/proc"), "driver/nvidia/version"),
	}
}

// lookForModule reports whether the kernel module is seen, and whether it was seen before and is gone. Neither is
// possible where it can't be seen.
func lookForModule(r core.Roots) (loaded, gone bool) {
	module.Lock()
	defer module.Unlock()
	for _, sign := range moduleSigns(r) {
		if _, err := os.Stat(sign); err == nil {
			module.seen[sign] = true
			loaded = true
		}
		gone = gone || module.seen[sign]
	}
	return loaded, gone && !loaded
}

// unloadedError is the reason why there is no driver, with the evidence that the kernel module was unloaded.
type unloadedError struct{ error }

func (e unloadedError) Unwrap() []error { return []error{e.error, core.ErrUnloaded} }
