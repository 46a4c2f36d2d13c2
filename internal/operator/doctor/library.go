package doctor

import (
	"cmp"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/nvidia"
)

const libraryName = "libnvidia-ml.so.1"

// library is what is on disk of the driver's library.
type library struct {
	Files     []libraryFile
	Elsewhere []string // folders of the host beneath which there is a library, if there is none in the driver root
}

// libraryFile is a library beneath the driver root.
type libraryFile struct {
	Path    string
	Dangles bool     // a symbolic link without its target
	Version string   // "570.124.06"; "" = unknown
	Reason  string   // why it can't be loaded by its format; "" = it can
	Missing []string // libraries that it needs and that are in no usual folder
}

// otherRoots are where installers put a driver that is not in the root of the host: NVIDIA's driver container, GKE, Bottlerocket,
// Talos, NixOS.
var otherRoots = []string{
	"/run/nvidia/driver", "/home/kubernetes/bin/nvidia", "/opt/nvidia", "/x86_64-bottlerocket-linux-gnu/sys-root", "/usr/local/glibc",
	"/run/opengl-driver", "/usr/local/nvidia", "/host",
}

func readLibrary(_ context.Context, o *Options) func(*Facts) {
	var l library
	root := driverRoot(o)
	for _, folder := range nvidia.LibraryFolders() {
		path := filepath.Join(root, folder, libraryName)
		if _, err := os.Lstat(path); err == nil && !l.has(path) {
			l.Files = append(l.Files, inspectLibrary(root, path))
		}
	}
	if len(l.Files) == 0 {
		l.Elsewhere = searchElsewhere(o, root)
	}
	return func(f *Facts) { f.Library = l }
}

// has reports whether a file is already listed by another path: /lib64 may be a link to /usr/lib64.
func (l library) has(path string) bool {
	real, err := filepath.EvalSymlinks(path)
	return err == nil && slices.ContainsFunc(l.Files, func(f libraryFile) bool {
		other, err := filepath.EvalSymlinks(f.Path)
		return err == nil && other == real
	})
}

func searchElsewhere(o *Options, root string) (found []string) {
	for _, folder := range otherRoots {
		if folder == root {
			continue
		}
		for _, sub := range append([]string{"lib", "lib64", "."}, nvidia.LibraryFolders()...) {
			if exists(filepath.Join(o.host(folder), sub, libraryName)) {
				found = append(found, filepath.Join(folder, sub))
			}
		}
	}
	return found
}

var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

func inspectLibrary(root, path string) libraryFile {
	l := libraryFile{Path: path}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		l.Dangles = true
		return l
	}
	l.Version = libraryVersion(path)
	f, err := elf.Open(path)
	if err != nil {
		l.Reason = "not a shared library (" + strings.TrimPrefix(err.Error(), "open "+path+": ") + ")"
		return l
	}
	defer func() { _ = f.Close() }()
	if want := machines[runtime.GOARCH]; want != elf.EM_NONE && (f.Machine != want || f.Class != elf.ELFCLASS64) {
		l.Reason = fmt.Sprintf("built for %s (%s), this node is %s", archName(f.Machine), f.Class, archName(want))
		return l
	}
	needed, _ := f.ImportedLibraries()
	for _, name := range needed {
		if !findsLibrary(root, filepath.Dir(path), name) {
			l.Missing = append(l.Missing, name)
		}
	}
	return l
}

func archName(m elf.Machine) string { return strings.TrimPrefix(m.String(), "EM_") }

func findsLibrary(root, beside, name string) bool {
	folders := []string{beside}
	for _, r := range []string{root, "/"} {
		for _, f := range append([]string{"lib", "usr/lib", "usr/local/lib"}, nvidia.LibraryFolders()...) {
			folders = append(folders, filepath.Join(r, f))
		}
	}
	return slices.ContainsFunc(folders, func(f string) bool { return exists(filepath.Join(f, name)) })
}

var versioned = regexp.MustCompile(`\.so\.([0-9]+(\.[0-9]+)+)$`)

// libraryVersion is the driver's version in the name of the file that the link leads to, or of the only one beside it.
func libraryVersion(path string) string {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return ""
	}
	if m := versioned.FindStringSubmatch(real); m != nil {
		return m[1]
	}
	beside, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "libnvidia-ml.so.*.*"))
	if len(beside) == 1 {
		if m := versioned.FindStringSubmatch(beside[0]); m != nil {
			return m[1]
		}
	}
	return ""
}

// version is that of the library on disk; "" = unknown.
func (l library) version() string {
	for _, f := range l.Files {
		if f.Version != "" {
			return f.Version
		}
	}
	return ""
}

func decideLibrary(c *chain) []Finding {
	f := c.Facts
	root := driverRoot(&f.Options)
	if len(f.Library.Files) == 0 {
		return decideNoLibrary(c)
	}
	file := f.Library.Files[0]
	found := strings.TrimSpace(libraryName + " " + file.Version)
	if f.Driver.Driver.State == "ready" {
		return []Finding{{"library", OK, file.Path, found, ""}}
	}
	for _, l := range f.Library.Files {
		if !l.Dangles && l.Reason == "" && len(l.Missing) == 0 {
			return []Finding{{"library", OK, l.Path, found, ""}}
		}
	}
	install := "install the user-space part of the driver again" + ofVersion(f.Module.Version)
	switch {
	case file.Dangles:
		return c.broken(Finding{"library", Problem, file.Path, libraryName + " is a symbolic link to a file that does not exist", install})
	case file.Reason != "":
		return c.broken(Finding{"library", Problem, file.Path, libraryName + " is " + file.Reason, install + ", or set the driver root (now " + root + ")"})
	}
	return c.broken(Finding{"library", Problem, file.Path, libraryName + " needs " + list(file.Missing) + ", which is in no library folder",
		"install the package that has " + list(file.Missing) + remedyInContainer(f, ", or mount it into this container")})
}

func decideNoLibrary(c *chain) []Finding {
	f := c.Facts
	root := driverRoot(&f.Options)
	place := root + " (lib64, usr/lib64, lib and usr/lib of the architecture)"
	switch {
	case f.Driver.Driver.State == "ready":
		return []Finding{{"library", OK, "the dynamic linker's path", libraryName + " " + f.Driver.Driver.Version, ""}}
	case len(f.Library.Elsewhere) > 0:
		at := f.Library.Elsewhere[0]
		return c.broken(Finding{"library", Problem, place, libraryName + " is not there, but in " + at,
			fmt.Sprintf("set the driver root: %s%s", rootSetting(f.Options, driverRootOf(at)), remedyInContainer(f, ", and mount it"))})
	case f.Container != "" && root == "/":
		return c.broken(Finding{"library", Problem, place, libraryName + " is not in this container (" + f.Container + ")",
			"mount the host's /usr, or run under NVIDIA's container runtime" + remedyInPod(f, " (runtimeClassName: nvidia): see deploy/README.md")})
	case f.Module.Loaded:
		return c.broken(Finding{"library", Problem, place, libraryName + " is missing; the kernel module is loaded",
			"install the user-space part of the driver" + ofVersion(f.Module.Version) + " (Debian: libnvidia-ml1, Ubuntu: libnvidia-compute-..., Red Hat: nvidia-driver-cuda-libs)" +
				", or set the driver root: " + rootSetting(f.Options, "PATH")})
	}
	found := "no NVIDIA driver is installed: no " + libraryName + " and no kernel module"
	if f.Module.Nouveau {
		found += "; nouveau drives the GPU"
	}
	return c.broken(Finding{"library", Problem, place, found, "install NVIDIA's driver for data centers, then reboot; if it is in another directory: " + rootSetting(f.Options, "PATH")})
}

// driverRootOf is the driver root of a folder with the library.
func driverRootOf(folder string) string {
	for _, sub := range nvidia.LibraryFolders() {
		if root, ok := strings.CutSuffix(folder, "/"+sub); ok {
			return cmp.Or(root, "/")
		}
	}
	return filepath.Dir(folder)
}

// rootSetting is how the driver root is set.
func rootSetting(o Options, root string) string {
	if o.kubernetes() {
		return "--driver-root " + root + " (NVIDIA_DRIVER_ROOT)"
	}
	return fmt.Sprintf("driver_root = %q in the plugin's config block, --driver-root %s here", root, root)
}

// stateDirSetting is the name of the setting of the state directory.
func stateDirSetting(o Options) string {
	if o.kubernetes() {
		return "--state-dir"
	}
	return "state_dir in the plugin's config block"
}

func ofVersion(version string) string {
	if version == "" {
		return ""
	}
	return ", version " + version
}

func remedyInContainer(f *Facts, text string) string {
	if f.Container == "" {
		return ""
	}
	return text
}

// remedyInPod is a part of a remedy that holds in a container of Kubernetes only.
func remedyInPod(f *Facts, text string) string {
	if !f.kubernetes() {
		return ""
	}
	return remedyInContainer(f, text)
}
