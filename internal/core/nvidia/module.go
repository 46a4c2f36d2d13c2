package nvidia

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// moduleSeen holds the paths of moduleFiles that existed before. Not every container has both, or any: a file that
// never existed is no evidence that the module was unloaded.
var moduleSeen = struct {
	sync.Mutex
	seen map[string]bool
}{seen: map[string]bool{}}

// moduleFiles are files that exist while the kernel module is loaded.
func moduleFiles(r core.Roots) []string {
	return []string{
		filepath.Join(cmp.Or(r.Sys, "/sys"), "module/nvidia/version"),
		filepath.Join(cmp.Or(r.Proc, "/proc"), "driver/nvidia/version"),
	}
}

// checkModule reports whether the kernel module is loaded, and whether it was loaded before and no longer is. Both
// are false where this process can't see the module.
func checkModule(r core.Roots) (loaded, unloaded bool) {
	moduleSeen.Lock()
	defer moduleSeen.Unlock()
	for _, path := range moduleFiles(r) {
		if _, err := os.Stat(path); err == nil {
			moduleSeen.seen[path] = true
			loaded = true
		}
		unloaded = unloaded || moduleSeen.seen[path]
	}
	return loaded, unloaded && !loaded
}

// unloadedError adds gpu.ErrUnloaded to the reason why there is no driver.
type unloadedError struct{ error }

func (e unloadedError) Unwrap() []error { return []error{e.error, gpu.ErrUnloaded} }

// DriverFingerprint identifies the driver's files without a driver call: while it is unchanged, another Open is
// expected to end the same way. It covers the kernel module (/sys/module/nvidia and its version), the device node
// that every use of the driver opens first (/dev/nvidiactl), and the paths of the library.
func DriverFingerprint(r core.Roots) string {
	module := filepath.Join(cmp.Or(r.Sys, "/sys"), "module/nvidia")
	version, _ := os.ReadFile(filepath.Join(module, "version")) // missing if the module is not loaded
	found := []string{strings.TrimSpace(string(version))}
	paths := []string{module, filepath.Join(cmp.Or(r.Dev, "/"), "dev/nvidiactl")}
	for _, folder := range libraryFolders {
		paths = append(paths, filepath.Join("/", r.Driver, folder, libraryName))
	}
	for _, path := range paths {
		var file syscall.Stat_t
		if syscall.Stat(path, &file) == nil {
			found = append(found, fmt.Sprintf("%s %d:%d", path, file.Dev, file.Ino))
		}
	}
	return strings.Join(found, "; ")
}
