package dra

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// freeze makes a folder read-only until the returned function is called.
func (n *node) freeze(dir string) (thaw func()) {
	n.Helper()
	n.Must(syscall.Mount(dir, dir, "", syscall.MS_BIND, ""))
	n.Must(syscall.Mount("", dir, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	thaw = sync.OnceFunc(func() { n.Must(syscall.Unmount(dir, syscall.MNT_DETACH)) })
	n.Cleanup(thaw)
	return thaw
}

// unresolved are the CDI names that a container runtime would not find, after it has read the folder anew.
func (n *node) unresolved(names []string) []string {
	n.Helper()
	cache, err := cdi.NewCache(cdi.WithSpecDirs(n.cdiDir), cdi.WithAutoRefresh(false))
	n.Must(err)
	missing, err := cache.InjectDevices(&oci.Spec{}, names...)
	if err != nil && len(missing) == 0 {
		n.Fatal(err)
	}
	return missing
}

func (n *node) mustResolve(names []string) {
	n.Helper()
	if len(names) == 0 {
		n.Error("no CDI names")
	}
	if missing := n.unresolved(names); len(missing) > 0 {
		n.Errorf("a container runtime does not find %v", missing)
	}
}

// specs are the CDI specifications of the machine.
func (n *node) specs() (paths []string) {
	n.Helper()
	entries, err := os.ReadDir(n.cdiDir)
	n.Must(err)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			paths = append(paths, filepath.Join(n.cdiDir, e.Name()))
		}
	}
	return paths
}
