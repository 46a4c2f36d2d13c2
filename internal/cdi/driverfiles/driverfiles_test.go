package driverfiles

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	version = "580.95.05"
	libDir  = "/usr/lib/x86_64-linux-gnu"
)

// driver is a request for the files of a driver in a root of its own, which is "/" on the host.
func driver(t *testing.T) Request {
	t.Helper()
	root := filepath.Join(t.TempDir(), "driver-root")
	check.NoError(t, simdriver.WriteDriverFiles(root, version))
	for path, mode := range map[string]os.FileMode{
		"usr/bin/nvidia-smi": 0o755, "lib/firmware/nvidia/" + version + "/gsp_ga10x.bin": 0o644, "etc/cufile.json": 0o644,
		"usr/share/nvidia/nvoptix.bin": 0o644, "etc/vulkan/icd.d/nvidia_icd.json": 0o644,
	} {
		check.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755))
		check.NoError(t, os.WriteFile(filepath.Join(root, path), []byte("{}"), mode))
	}
	check.NoError(t, os.MkdirAll(filepath.Join(root, "dev"), 0o755))
	return Request{Version: version, Root: root, HostRoot: "/", DevRoot: root, HookPath: "/usr/bin/nvidia-ctk", Log: slog.New(slog.DiscardHandler)}
}

func read(t *testing.T, r Request) Files {
	t.Helper()
	f, err := Read(r)
	check.NoError(t, err)
	return f
}

// hooks are the names of the hooks of edits.
func hooks(e specs.ContainerEdits) (names []string) {
	for _, h := range e.Hooks {
		args := strings.Join(h.Args, " ")
		names = append(names, strings.Fields(strings.TrimPrefix(strings.TrimPrefix(args, "nvidia-ctk hook "), "nvidia-cdi-hook "))[0])
	}
	return names
}

// Sources are the host's, targets have no root, whatever the roots are; what is not below the root is left out.
func TestRoots(t *testing.T) {
	for name, host := range map[string]string{"the host's root": "/", "a driver container": "/run/nvidia/driver", "the same": ""} {
		t.Run(name, func(t *testing.T) {
			r := driver(t)
			if r.HostRoot = host; host == "" {
				r.HostRoot = r.Root
			}
			f := read(t, r)
			if len(f.Edits.Mounts) < 15 || len(f.Edits.DeviceNodes) > 0 || f.Libcuda != r.Root+libDir+"/libcuda.so."+version {
				t.Errorf("%d mounts, nodes %v, libcuda %s", len(f.Edits.Mounts), f.Edits.DeviceNodes, f.Libcuda)
			}
			for _, m := range f.Edits.Mounts {
				if want := filepath.Join(r.HostRoot, m.ContainerPath); m.HostPath != want || strings.HasPrefix(m.ContainerPath, r.Root) {
					t.Errorf("%s from %s, want %s", m.ContainerPath, m.HostPath, want)
				}
			}
			for _, h := range f.Edits.Hooks {
				if strings.Contains(strings.Join(h.Args, " "), r.Root) {
					t.Errorf("a hook has the root of this process: %q", h.Args)
				}
			}
			for _, e := range f.Edits.Env {
				if strings.Contains(e, r.Root) {
					t.Errorf("a variable has the root of this process: %q", e)
				}
			}
			if !slices.Contains(f.Edits.Env, "NVIDIA_VISIBLE_DEVICES=void") {
				t.Errorf("variables %q", f.Edits.Env)
			}
		})
	}
	r := driver(t)
	sibling := r.Root + "-2/libnvidia-other.so." + version
	check.NoError(t, os.MkdirAll(filepath.Dir(sibling), 0o755))
	check.NoError(t, os.WriteFile(sibling, nil, 0o644))
	check.NoError(t, os.Symlink(sibling, r.Root+libDir+"/libnvidia-other.so."+version))
	for _, m := range read(t, r).Edits.Mounts {
		if strings.Contains(m.HostPath+m.ContainerPath, "other") {
			t.Errorf("a file of another folder with the same prefix is mounted: %+v", m)
		}
	}
}

// A root without libcuda of the driver's version gives no files, and the error names the file.
func TestMissingLibrary(t *testing.T) {
	for name, change := range map[string]func(r *Request){
		"hidden":          func(r *Request) { check.NoError(t, os.Remove(r.Root+libDir+"/libcuda.so."+version)) },
		"another version": func(r *Request) { r.Version = "575.57.08" },
		"libnvidia-ml only": func(r *Request) {
			removeAll(t, r.Root+libDir+"/*.so.*")
			check.NoError(t, os.WriteFile(r.Root+libDir+"/libnvidia-ml.so."+version, nil, 0o644))
		},
		"an empty root": func(r *Request) { r.Root = t.TempDir() },
		"no root":       func(r *Request) { r.Root = "/nowhere" },
	} {
		t.Run(name, func(t *testing.T) {
			r := driver(t)
			change(&r)
			f, err := Read(r)
			missing, ok := errors.AsType[*MissingLibraryError](err)
			if !ok || missing.Name != "libcuda.so."+r.Version || missing.Root != r.Root || f.Libraries != nil {
				t.Errorf("error %v, files %v", err, f)
			}
		})
	}
	r := driver(t)
	if r.Version = ""; true {
		if _, err := Read(r); err == nil {
			t.Error("no error without a version")
		}
	}
}

func removeAll(t *testing.T, pattern string) {
	t.Helper()
	found, err := filepath.Glob(pattern)
	check.NoError(t, err)
	for _, path := range found {
		check.NoError(t, os.Remove(path))
	}
}

// The hooks of a specification, by hook program and setting.
func TestHooks(t *testing.T) {
	common := []string{"create-symlinks", "enable-cuda-compat", "update-ldcache", "disable-device-node-modification", "update-application-profile"}
	for _, tc := range []struct {
		path     string
		disabled []string
		want     []string
	}{
		{"/usr/bin/nvidia-ctk", nil, common},
		{"/usr/bin/nvidia-cdi-hook", nil, common},
		{"/usr/bin/nvidia-ctk", []string{"enable-cuda-compat", "disable-device-node-modification", "update-application-profile"}, []string{"create-symlinks", "update-ldcache"}},
		{"/usr/bin/nvidia-ctk", []string{"all"}, nil},
	} {
		r := driver(t)
		r.HookPath, r.DisabledHooks = tc.path, tc.disabled
		f := read(t, r)
		if got := hooks(f.Edits); !slices.Equal(got, tc.want) {
			t.Errorf("%s without %v: %v, want %v", tc.path, tc.disabled, got, tc.want)
		}
		for _, h := range f.Edits.Hooks {
			if h.Path != tc.path || h.Args[0] != filepath.Base(tc.path) || h.HookName != "createContainer" {
				t.Errorf("hook %+v", h)
			}
		}
		own := SymlinksHook(r, []string{"../card1::/dev/dri/by-path/x"})
		if (own == nil) != (tc.want == nil) {
			t.Errorf("%v: own hook %v", tc.disabled, own)
		}
		if own != nil { // as the library makes them
			same := f.Edits.Hooks[0]
			if own.Path != same.Path || own.HookName != same.HookName || !slices.Equal(own.Env, same.Env) ||
				strings.Join(own.Args[:len(own.Args)-2], " ") != strings.Join(same.Args[:len(own.Args)-2], " ") {
				t.Errorf("own hook %+v, the library's %+v", own, same)
			}
		}
	}
}

// The hook for memory limits is that of NVIDIA's library for a GPU without MIG, by hook program and root.
func TestMemoryLimitsHook(t *testing.T) {
	machine := dgxa100.New() // of go-nvml
	gpu, _ := machine.Devices[0].(*server.Device)
	gpu.IsMigDeviceHandleFunc = func() (bool, nvml.Return) { return false, nvml.SUCCESS }
	uuid, _ := gpu.GetUUID()
	for _, path := range []string{"/usr/bin/nvidia-ctk", "/usr/bin/nvidia-cdi-hook"} {
		r := driver(t)
		r.HookPath, r.HostRoot = path, r.Root // the library names the root as it sees it
		lib, err := nvcdi.New(nvcdi.WithMode(nvcdi.ModeNvml), nvcdi.WithDriverRoot(r.Root), nvcdi.WithDevRoot(r.Root), nvcdi.WithNvmlLib(machine),
			nvcdi.WithNVIDIACDIHookPath(path), nvcdi.WithLogger(logger{r.Log}), nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils))
		check.NoError(t, err)
		devices, err := lib.GetDeviceSpecsByID("0")
		check.NoError(t, err)
		want := devices[0].ContainerEdits.Hooks
		if own := MemoryLimitsHook(r, uuid); len(want) != 1 || !reflect.DeepEqual(own, want[0]) {
			t.Errorf("own hook %+v, the library's %+v", own, want)
		}
		r.DisabledHooks = []string{"apply-cuda-memory-limits"}
		if own := MemoryLimitsHook(r, uuid); own != nil {
			t.Errorf("disabled: %+v", own)
		}
	}
}

// Where NVIDIA's container runtime knows the mount that means no device, containers have it, as NVIDIA's library writes it from 1.20.2 on; it is no
// file of the driver.
func TestVoidMount(t *testing.T) {
	for _, known := range []bool{false, true} {
		r := driver(t)
		r.VoidMount = known
		r.HostRoot = "/run/nvidia/driver"
		f := read(t, r)
		var found []specs.Mount
		for _, m := range f.Edits.Mounts {
			if strings.Contains(m.ContainerPath, "nvidia-container-devices") {
				found = append(found, *m)
			}
		}
		want := []specs.Mount{{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/void", Options: []string{"ro", "nosuid", "nodev", "bind"}}}
		if !known {
			want = nil
		}
		if !reflect.DeepEqual(found, want) {
			t.Errorf("%t: %+v", known, found)
		}
		if slices.ContainsFunc(f.Libraries, func(m inventory.Mount) bool { return m.HostPath == "/dev/null" }) || !f.Complete() {
			t.Errorf("%t: it is among the libraries, or counts as a file that is gone", known)
		}
	}
}

// The libraries of a plan can be loaded without hooks: each is there under its SONAME, too.
func TestLibraries(t *testing.T) {
	r := driver(t)
	r.HostRoot = "/run/nvidia/driver"
	f := read(t, r)
	find := func(list []inventory.Mount, path string) *inventory.Mount {
		i, ok := slices.BinarySearchFunc(list, path, func(m inventory.Mount, p string) int { return strings.Compare(m.ContainerPath, p) })
		if !ok {
			return nil
		}
		return &list[i]
	}
	for path, source := range map[string]string{
		libDir + "/libcuda.so": "libcuda", libDir + "/libcuda.so.1": "libcuda", libDir + "/libcuda.so." + version: "libcuda",
		libDir + "/libGLX_nvidia.so.0": "libGLX_nvidia", libDir + "/libnvidia-nvvm.so.4": "libnvidia-nvvm", libDir + "/vdpau/libvdpau_nvidia.so.1": "vdpau/libvdpau_nvidia",
	} {
		m := find(f.Libraries, path)
		if m == nil || m.HostPath != r.HostRoot+libDir+"/"+source+".so."+version || !m.ReadOnly {
			t.Errorf("%s: %+v", path, m)
		}
		if extra := find(f.Sonames, path); (extra != nil) != !strings.HasSuffix(path, version) {
			t.Errorf("%s in Sonames: %v", path, extra)
		}
	}
	if len(f.Libraries) != len(f.Edits.Mounts)+len(f.Sonames) {
		t.Errorf("%d libraries, %d mounts, %d names", len(f.Libraries), len(f.Edits.Mounts), len(f.Sonames))
	}
}

// A class of devices has a specification if the node has them.
func TestDevices(t *testing.T) {
	r := driver(t)
	for _, class := range []string{GDS, MOFED, GDRCopy} {
		if s, err := ReadDevice(r, "example.com", class, "/"); s != nil || err != nil {
			t.Errorf("%s without nodes: %v, %v", class, s, err)
		}
	}
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: mknod needs root")
	}
	check.NoError(t, os.MkdirAll(r.Root+"/dev/infiniband", 0o755))
	check.NoError(t, os.MkdirAll(r.Root+"/run/udev", 0o755))
	for _, name := range []string{"nvidia-fs0", "nvidia-fs1", "infiniband/uverbs0", "infiniband/rdma_cm", "gdrdrv"} {
		check.NoError(t, syscall.Mknod(r.Root+"/dev/"+name, syscall.S_IFCHR|0o660, 1<<8|3))
	}
	for class, want := range map[string]string{GDS: "/dev/nvidia-fs0 /dev/nvidia-fs1", MOFED: "/dev/infiniband/rdma_cm /dev/infiniband/uverbs0", GDRCopy: "/dev/gdrdrv"} {
		s, err := ReadDevice(r, "example.com", class, "/")
		check.NoError(t, err)
		var paths []string
		for _, n := range s.Devices[0].ContainerEdits.DeviceNodes {
			paths = append(paths, n.Path)
			if n.Major != 0 || n.GID != nil || n.Permissions != "rw" || n.HostPath != "" {
				t.Errorf("%s: %+v", class, n)
			}
		}
		if got := strings.Join(paths, " "); got != want || s.Kind != "example.com/"+class || s.Devices[0].Name != "all" || len(s.Devices) != 1 || s.Version != "0.3.0" {
			t.Errorf("%s: %s, want %s; %s %s", class, got, want, s.Kind, s.Version)
		}
		if mounts := len(s.Devices[0].ContainerEdits.Mounts); (class == GDS) != (mounts == 2) {
			t.Errorf("%s: %d mounts", class, mounts)
		}
	}
}

// A call of a function that the facts do not have is an error. The library makes none.
func TestNoOtherCall(t *testing.T) {
	_, err := call(func() (specs.ContainerEdits, error) {
		_, ret := (&facts{}).DeviceGetCount()
		return specs.ContainerEdits{}, ret
	})
	if err == nil || !strings.Contains(err.Error(), "panicked") {
		t.Errorf("error %v", err)
	}
	counted := &counting{facts: facts{version: version}}
	r := driver(t)
	lib, err := nvcdi.New(nvcdi.WithMode(nvcdi.ModeNvml), nvcdi.WithDriverRoot(r.Root), nvcdi.WithNvmlLib(counted), nvcdi.WithLogger(logger{r.Log}),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils))
	check.NoError(t, err)
	_, err = lib.GetCommonEdits()
	check.NoError(t, err)
	if counted.calls != 1 {
		t.Errorf("%d questions for the version, want 1", counted.calls)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	check.NoError(t, err)
	if strings.Contains(string(maps), r.Root) {
		t.Error("a file of the driver is mapped")
	}
}

type counting struct {
	facts
	calls int
}

func (c *counting) SystemGetDriverVersion() (string, nvml.Return) {
	c.calls++
	return c.facts.SystemGetDriverVersion()
}
