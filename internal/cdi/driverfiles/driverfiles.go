// Package driverfiles finds the files of a driver that a container needs, with NVIDIA's own library (nvcdi), which is kept in step
// with the driver. The library gets the facts that it would ask the driver for, so that it makes no driver call and maps no
// library of the driver. Its calls read a few hundred files and may wait for a disk.
package driverfiles

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/cdi/spec"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Request is what to look for.
type Request struct {
	Version  string // of the driver's kernel module: "580.95.05"
	Root     string // of the driver's installation, as this process sees it
	HostRoot string // the same, on the host
	DevRoot  string // folder that has dev/nvidia0 ..., as this process sees it

	HookPath      string   // of NVIDIA's hook program, on the host
	DisabledHooks []string // names, or "all"
	FeatureFlags  []string // of the library
	VoidMount     bool     // NVIDIA's container runtime on the host knows the device "void" (1.20.2)
	Log           *slog.Logger
}

// Files are what a container needs of a driver beside device nodes.
type Files struct {
	Edits     specs.ContainerEdits // mounts with paths of the host, variables and hooks; no device nodes
	Libraries []inventory.Mount    // the mounts of Edits, and each library under the names by which programs load it
	Sonames   []inventory.Mount    // those of Libraries that are not in Edits
	Libcuda   string               // the driver's main library, as this process sees it
	sources   []string             // of the mounts of Edits, as this process sees them
}

// Complete reports whether all files are still there. A container with a mount of one that is not can't start: a daemon that ends takes
// its socket away, a package manager the files of the version before.
func (f Files) Complete() bool {
	return f.Libcuda != "" && !slices.ContainsFunc(f.sources, func(path string) bool {
		_, err := os.Stat(path)
		return err != nil
	})
}

// MissingLibraryError means that a root has no library of the driver's version.
type MissingLibraryError struct {
	Name string // "libcuda.so.580.95.05"
	Root string // as this process sees it
}

// Error names the file and the root.
func (e *MissingLibraryError) Error() string {
	return fmt.Sprintf("%s is not below %s: the root of the driver's installation is needed, as nvidia-container-toolkit needs it", e.Name, e.Root)
}

// Read finds the files of a driver. It fails with *MissingLibraryError if the root is that of another version, or has only a part
// of the driver, as in a container that NVIDIA's runtime gave the libraries for monitoring.
func Read(r Request) (Files, error) {
	r.Root, r.HostRoot = filepath.Clean("/"+r.Root), filepath.Clean("/"+r.HostRoot)
	edits, err := call(func() (specs.ContainerEdits, error) {
		lib, err := r.library(nvcdi.ModeNvml)
		if err != nil {
			return specs.ContainerEdits{}, err
		}
		common, err := lib.GetCommonEdits()
		if err != nil {
			return specs.ContainerEdits{}, err
		}
		return *common.ContainerEdits, nil
	})
	name := "libcuda.so." + r.Version
	libcuda := slices.IndexFunc(edits.Mounts, func(m *specs.Mount) bool { return filepath.Base(m.HostPath) == name })
	switch {
	case r.Version == "":
		return Files{}, errors.New("the driver's version is not known")
	case libcuda >= 0:
	case err != nil && !strings.Contains(err.Error(), "failed to locate"):
		return Files{}, err
	default:
		return Files{}, &MissingLibraryError{name, r.Root}
	}
	files := Files{Libcuda: edits.Mounts[libcuda].HostPath}
	for _, m := range edits.Mounts {
		if _, ok := spec.Below(r.Root, m.HostPath); ok {
			files.sources = append(files.sources, m.HostPath)
		}
	}
	links := r.sonames(edits.Mounts)
	files.Edits = r.onHost(edits)
	files.Edits.DeviceNodes = nil // of the snapshot
	files.Libraries = spec.Mounts(files.Edits, links...)
	files.Sonames = slices.DeleteFunc(slices.Clone(files.Libraries), func(m inventory.Mount) bool {
		return slices.ContainsFunc(files.Edits.Mounts, func(n *specs.Mount) bool { return n.ContainerPath == m.ContainerPath })
	})
	files.Edits.Mounts = append(slices.Clip(files.Edits.Mounts), r.void()...)
	return files, nil
}

// voidPath is where a mount in a container means, where NVIDIA's container runtime takes mounts for a list of devices, that it adds none: what
// NVIDIA_VISIBLE_DEVICES=void means among variables. A runtime before 1.20.2 takes it for the name of a device, and the container does not start.
const voidPath = "/var/run/nvidia-container-devices/void"

// void is the mount at voidPath, as NVIDIA's library has it since 1.20.2, if the runtime knows it.
func (r Request) void() []*specs.Mount {
	if !r.VoidMount {
		return nil
	}
	return []*specs.Mount{{HostPath: "/dev/null", ContainerPath: voidPath, Options: []string{"ro", "nosuid", "nodev", "bind"}}}
}

// The kinds of devices beside GPUs, which are also the classes of their CDI devices.
const (
	GDRCopy = string(nvcdi.ModeGdrcopy) // GPUDirect RDMA from user space
	GDS     = string(nvcdi.ModeGds)     // GPUDirect Storage
	MOFED   = string(nvcdi.ModeMofed)   // RDMA adapters of Mellanox
)

// ReadDevice returns the specification of the devices of a class, which are one CDI device ("all"); nil if the node has none.
func ReadDevice(r Request, vendor, class, hostDevRoot string) (*specs.Spec, error) {
	r.Root, r.HostRoot = filepath.Clean("/"+r.Root), filepath.Clean("/"+r.HostRoot)
	edits, err := call(func() (specs.ContainerEdits, error) {
		lib, err := r.library(nvcdi.Mode(class))
		if err != nil {
			return specs.ContainerEdits{}, err
		}
		devices, err := lib.GetDeviceSpecsByID(spec.AllDevices)
		if err != nil || len(devices) != 1 {
			return specs.ContainerEdits{}, err
		}
		return devices[0].ContainerEdits, nil
	})
	if err != nil || len(edits.DeviceNodes) == 0 {
		return nil, err
	}
	edits = r.onHost(edits)
	for i, n := range edits.DeviceNodes {
		edits.DeviceNodes[i] = spec.Node(hostDevRoot, n.Path)
	}
	slices.SortFunc(edits.DeviceNodes, func(x, y *specs.DeviceNode) int { return cmp.Compare(x.Path, y.Path) })
	edits.AdditionalGIDs = nil
	// NVIDIA's runtime adds nothing to a container whose devices come from a specification.
	common := specs.ContainerEdits{Env: []string{inventory.VisibleDevices + "=void"}, Mounts: r.void()}
	return spec.New(vendor+"/"+class, []specs.Device{{Name: spec.AllDevices, ContainerEdits: edits}}, common), nil
}

// SymlinksHook returns the hook that creates links in a container; nil if it is disabled.
func SymlinksHook(r Request, links []string) *specs.Hook {
	var args []string
	for _, l := range links {
		args = append(args, "--link", l)
	}
	return r.hook("createContainer", nvcdi.CreateSymlinksHook, args...)
}

// MemoryLimitsHook returns the hook that sets the memory limits of a container on a full GPU: those of its variables
// NVIDIA_GPU_MEMORY_LIMIT and NVIDIA_GPU_MEMORY_REQUEST. It is nil if the hook is disabled.
func MemoryLimitsHook(r Request, uuid string) *specs.Hook {
	return r.hook("createRuntime", nvcdi.HookName("apply-cuda-memory-limits"), "--driver-root", filepath.Clean("/"+r.HostRoot), "--gpu-id", uuid)
}

// hook returns a hook as the library makes them; nil if it is disabled.
func (r Request) hook(stage string, name nvcdi.HookName, args ...string) *specs.Hook {
	if slices.Contains(r.DisabledHooks, string(nvcdi.AllHooks)) || slices.Contains(r.DisabledHooks, string(name)) {
		return nil
	}
	command := []string{filepath.Base(r.HookPath)}
	if command[0] == "nvidia-ctk" {
		command = append(command, "hook")
	}
	command = append(command, string(name))
	return &specs.Hook{HookName: stage, Path: r.HookPath, Args: append(command, args...), Env: []string{"NVIDIA_CTK_DEBUG=false"}}
}

// library returns NVIDIA's library for a mode.
func (r Request) library(mode nvcdi.Mode) (nvcdi.Interface, error) {
	flags := append([]string{
		string(nvcdi.FeatureDisableNvsandboxUtils),          // else it loads a library of the driver
		string(nvcdi.FeatureNoAdditionalGIDsForDeviceNodes), // else older runtimes refuse the specification
	}, r.FeatureFlags...)
	return nvcdi.New(
		nvcdi.WithMode(mode), nvcdi.WithDriverRoot(r.Root), nvcdi.WithDevRoot(filepath.Clean("/"+r.DevRoot)), nvcdi.WithNvmlLib(&facts{version: r.Version}),
		nvcdi.WithNVIDIACDIHookPath(r.HookPath), nvcdi.WithDisabledHooks(r.DisabledHooks...), nvcdi.WithFeatureFlags(flags...),
		nvcdi.WithLogger(logger{r.Log}),
	)
}

// onHost returns edits with the host's paths as sources, and without sources that are not on the host.
func (r Request) onHost(e specs.ContainerEdits) specs.ContainerEdits {
	mounts := make([]*specs.Mount, 0, len(e.Mounts))
	for _, m := range e.Mounts {
		rest, ok := spec.Below(r.Root, m.HostPath)
		if m.ContainerPath == voidPath {
			continue // void decides
		}
		if !ok {
			r.Log.Debug("file not given to containers: it is not below the driver root", "path", m.HostPath, "root", r.Root)
			continue
		}
		next := *m
		next.HostPath = spec.Join(r.HostRoot, rest)
		mounts = append(mounts, &next)
	}
	slices.SortStableFunc(mounts, func(x, y *specs.Mount) int { return cmp.Compare(x.ContainerPath, y.ContainerPath) })
	e.Mounts = slices.CompactFunc(mounts, func(x, y *specs.Mount) bool { return x.ContainerPath == y.ContainerPath })
	return e
}

// facts is the part of NVML that the library asks for in these modes.
type facts struct {
	nvml.Interface // nil: a call of another function panics, which call makes an error
	version        string
}

func (*facts) Init() nvml.Return     { return nvml.SUCCESS }
func (*facts) Shutdown() nvml.Return { return nvml.SUCCESS }

// SystemGetDriverVersion returns the version of the request.
func (f *facts) SystemGetDriverVersion() (string, nvml.Return) { return f.version, nvml.SUCCESS }

// call makes a panic of the library an error.
func call(do func() (specs.ContainerEdits, error)) (e specs.ContainerEdits, err error) {
	defer func() {
		if p := recover(); p != nil {
			e, err = specs.ContainerEdits{}, fmt.Errorf("nvidia-container-toolkit's library panicked: %v", p)
		}
	}()
	return do()
}

// logger logs what the library does at level debug: missing files, which are normal, are warnings there.
type logger struct{ log *slog.Logger }

func (l logger) Debugf(format string, args ...any)   { l.debug(format, args) }
func (l logger) Errorf(format string, args ...any)   { l.debug(format, args) }
func (l logger) Infof(format string, args ...any)    { l.debug(format, args) }
func (l logger) Warningf(format string, args ...any) { l.debug(format, args) }
func (logger) Tracef(string, ...any)                 {}

func (l logger) debug(format string, args []any) {
	if l.log.Enabled(context.Background(), slog.LevelDebug) {
		l.log.Debug("nvidia-container-toolkit: " + fmt.Sprintf(format, args...))
	}
}
