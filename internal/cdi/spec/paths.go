package spec

import (
	"cmp"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Join returns an absolute path below a root, which may be "/" or "".
func Join(root, path string) string { return filepath.Join("/", root, path) }

// Below returns the path that is p below a root, with a leading slash; false if p is not below it.
func Below(root, p string) (string, bool) {
	root, p = filepath.Clean("/"+root), filepath.Clean(p)
	if root == "/" {
		return p, strings.HasPrefix(p, "/")
	}
	rest, ok := strings.CutPrefix(p, root)
	return rest, ok && strings.HasPrefix(rest, "/")
}

// Mounts are the mounts of edits as mounts of a plan, sorted by container path, with further ones. Of two for a path the first
// stays.
func Mounts(e specs.ContainerEdits, further ...inventory.Mount) []inventory.Mount {
	var mounts []inventory.Mount
	for _, m := range e.Mounts {
		mounts = append(mounts, inventory.Mount{HostPath: m.HostPath, ContainerPath: m.ContainerPath, ReadOnly: slices.Contains(m.Options, "ro")})
	}
	mounts = append(mounts, further...)
	slices.SortStableFunc(mounts, func(x, y inventory.Mount) int { return cmp.Compare(x.ContainerPath, y.ContainerPath) })
	return slices.CompactFunc(mounts, func(x, y inventory.Mount) bool { return x.ContainerPath == y.ContainerPath })
}

// WithMounts returns edits with further mounts of files, read-only.
func WithMounts(e specs.ContainerEdits, further []inventory.Mount) specs.ContainerEdits {
	e.Mounts = slices.Clip(e.Mounts)
	for _, m := range further {
		e.Mounts = append(e.Mounts, &specs.Mount{
			HostPath: m.HostPath, ContainerPath: m.ContainerPath, Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"},
		})
	}
	return e
}
