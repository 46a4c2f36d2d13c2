package driverfiles

import (
	"debug/elf"
	"path/filepath"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/cdi/spec"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// sonames are mounts of libraries under the names by which programs load them: the SONAME, and libcuda.so, for which programs
// use dlopen. A container without hooks has no links and no cache of the linker that has them. The paths of the mounts are
// those of this process.
func (r Request) sonames(mounts []*specs.Mount) (links []inventory.Mount) {
	for _, m := range mounts {
		name := filepath.Base(m.ContainerPath)
		rest, ok := spec.Below(r.Root, m.HostPath)
		if !ok || !strings.Contains(name, ".so.") {
			continue
		}
		names := []string{soname(m.HostPath)}
		if strings.HasPrefix(name, "libcuda.so.") {
			names = append(names, "libcuda.so")
		}
		for _, n := range names {
			if n != "" && n != name && filepath.Base(n) == n {
				links = append(links, inventory.Mount{
					HostPath: spec.Join(r.HostRoot, rest), ContainerPath: filepath.Join(filepath.Dir(m.ContainerPath), n), ReadOnly: true,
				})
			}
		}
	}
	return links
}

// soname is the DT_SONAME of a library; "" if it has none or can't be read.
func soname(path string) string {
	f, err := elf.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }() // opened for reading only
	names, err := f.DynString(elf.DT_SONAME)
	if err != nil || len(names) != 1 {
		return ""
	}
	return names[0]
}
