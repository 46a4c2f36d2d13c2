package nvidia

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/core"
)

// DriverFingerprint says what there is of a driver, without asking it: another text means that another try to open it may
// end otherwise. It looks at the kernel module (/sys/module/nvidia and its version), at the node that every use of
// the driver begins with (/dev/nvidiactl) and at where the library is looked for.
func DriverFingerprint(r core.Roots) string {
	module := filepath.Join(rooted(r.Sys, "/sys"), "module/nvidia")
	version, _ := os.ReadFile(filepath.Join(module, "version")) // without a module there is none
	signs := []string{strings.TrimSpace(string(version))}
	look := []string{module, filepath.Join(rooted(r.Dev, "/"), "dev/nvidiactl")}
	for _, folder := range libraryFolders {
		look = append(look, filepath.Join("/", r.Driver, folder, libraryName))
	}
	for _, path := range look {
		var file syscall.Stat_t
		if syscall.Stat(path, &file) == nil {
			signs = append(signs, fmt.Sprintf("%s %d:%d", path, file.Dev, file.Ino))
		}
	}
	return strings.Join(signs, "; ")
}
