package cdi

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/check"
)

// The strategy "auto".
func TestDecide(t *testing.T) {
	found := Hooks{Path: DefaultHookPath, Looked: "/host/usr/bin/nvidia-ctk", Found: true, Version: "1.18.1"}
	with := func(change func(*Hooks)) Hooks { h := found; change(&h); return h }
	notFound := with(func(h *Hooks) { h.Found = false })
	for name, tc := range map[string]struct {
		problem string
		hooks   Hooks
		runtime Runtime
		usable  bool
		reason  string // a part of it
	}{
		"nothing is known of the runtime": {"", found, Runtime{}, true, "specification in /var/run/cdi, hooks by /usr/bin/nvidia-ctk, version 1.18.1, unknown runtime"},
		"not written":                     {"disk full", found, Runtime{Name: "containerd", Version: "2.4.2"}, false, "no CDI specification: disk full"},
		"hooks not found":                 {"", notFound, Runtime{}, false, "is not on the host (looked for at /host/usr/bin/nvidia-ctk): install nvidia-container-toolkit"},
		"hooks not found here":            {"", with(func(h *Hooks) { h.Found, h.Looked = false, h.Path }), Runtime{}, false, "is not on the host: install nvidia-container-toolkit"},
		"hooks can't be seen":             {"", with(func(h *Hooks) { h.Found, h.Looked = false, "" }), Runtime{}, false, "does not see the host's root"},
		"hooks of an unknown version":     {"", with(func(h *Hooks) { h.Version = "" }), Runtime{}, true, "version unknown"},
		"hooks are old":                   {"", with(func(h *Hooks) { h.Version = "1.17.8" }), Runtime{}, true, "version 1.17.8"},
		"hooks are switched off":          {"", with(func(h *Hooks) { h.None, h.Found = true, false }), Runtime{}, true, "no hooks"},
		"containerd 1.6":                  {"", found, Runtime{Name: "containerd", Version: "1.6.20"}, false, "containerd 1.6.20 has no CDI: use containerd 2"},
		"containerd 1.7":                  {"", found, Runtime{Name: "containerd", Version: "1.7.29"}, false, "set enable_cdi = true"},
		"containerd 1.7, switched on":     {"", found, Runtime{Name: "containerd", Version: "1.7.29", CDI: gpu.Enabled}, true, "containerd 1.7.29"},
		"containerd 2.0, off":             {"", found, Runtime{Name: "containerd", Version: "2.0.5", CDI: gpu.Disabled}, false, "containerd 2.0.5 has CDI switched off: set enable_cdi = true"},
		"containerd 2.0":                  {"", found, Runtime{Name: "containerd", Version: "2.0.5"}, true, "containerd 2.0.5"},
		"containerd 2.4":                  {"", found, Runtime{Name: "containerd", Version: "v2.4.2"}, true, "containerd v2.4.2"},
		"CRI-O":                           {"", found, Runtime{Name: "cri-o", Version: "1.34.3"}, true, "cri-o 1.34.3"},
		"CRI-O before CDI":                {"", found, Runtime{Name: "cri-o", Version: "1.23.5"}, false, "use CRI-O 1.24 or later"},
		"CRI-O, off":                      {"", found, Runtime{Name: "cri-o", Version: "1.34.3", CDI: gpu.Disabled}, false, "set cdi_spec_dirs"},
		"another folder":                  {"", found, Runtime{Name: "containerd", Version: "2.2.0", Folders: []string{"/etc/cdi"}}, false, "does not read /var/run/cdi: add it to cdi_spec_dirs, which is /etc/cdi"},
		"the folder by its other name":    {"", found, Runtime{Name: "containerd", Version: "2.2.0", Folders: []string{"/etc/cdi", "/run/cdi/"}}, true, ""},
		"no folder":                       {"", found, Runtime{Name: "cri-o", Version: "1.34.3", Folders: []string{}}, false, "does not read /var/run/cdi"},
		"Docker, off":                     {"", found, Runtime{Name: "docker", Version: "28.5.2", CDI: gpu.Disabled}, false, `"features": {"cdi": true}`},
		"a runtime of another kind":       {"", found, Runtime{Name: "youki", Version: "0.1"}, true, "youki 0.1"},
	} {
		usable, reason := Decide(tc.problem, DefaultFolder, tc.hooks, tc.runtime)
		if usable != tc.usable || !strings.Contains(reason, tc.reason) || strings.Contains(reason, "\n") {
			t.Errorf("%s: %v, %q; want %v, %q", name, usable, reason, tc.usable, tc.reason)
		}
	}
}

// What a Node reports of its runtime refuses CDI only where it is known to be absent.
func TestUnsupportedRuntime(t *testing.T) {
	for text, want := range map[string]string{
		"containerd://1.6.20": "containerd 1.6.20 has no CDI: use containerd 2", "containerd://1.7.29": "", "containerd://2.4.2": "",
		"cri-o://1.23.5": "cri-o 1.23.5 has no CDI: use CRI-O 1.24 or later", "cri-o://1.34.3": "", "docker://28.5.2": "", "containerd": "", "": "",
	} {
		if got := ParseRuntime(text).Unsupported(DefaultFolder); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	off := Runtime{Name: "containerd", Version: "1.7.29", CDI: gpu.Disabled}
	if off.Unsupported(DefaultFolder) == "" {
		t.Error("a runtime that reports CDI as switched off is taken for one with CDI")
	}
}

// Which hooks a specification leaves out, by version of the hook program.
func TestDisabledHooks(t *testing.T) {
	const limits, later = "apply-cuda-memory-limits", " disable-device-node-modification enable-cuda-compat update-application-profile"
	for _, tc := range []struct {
		auto       bool
		version    string
		configured []string
		want       string
		none       bool
	}{
		{want: limits},
		{version: "1.17.8", want: limits}, // a listed strategy gets what it lists
		{version: "1.20.0", want: limits},
		{version: "1.20.1", want: ""},
		{auto: true, version: "", want: limits + later},
		{auto: true, version: "1.17.8", want: limits + later},
		{auto: true, version: "1.18.0-rc.1", want: limits},
		{auto: true, version: "1.20.1", want: ""},
		{version: "1.21.0-rc.2", want: ""},
		{version: "1.20.1", configured: []string{"apply-cuda-memory-limits"}, want: limits},
		{auto: true, version: "2.0.0", configured: []string{"enable-cuda-compat"}, want: "enable-cuda-compat"},
		{auto: true, version: "1.17.8", configured: []string{"enable-cuda-compat"}, want: limits + later},
		{version: "1.20.1", configured: []string{"all"}, want: "all", none: true},
		{version: "1.20.1", configured: []string{"update-ldcache"}, want: "update-ldcache"},
		{version: "1.20.1", configured: []string{"update-ldcache", "create-symlinks"}, want: "create-symlinks update-ldcache", none: true},
	} {
		o := Options{Auto: tc.auto, DisabledHooks: tc.configured}
		got := strings.Join(o.disabledHooks(Hooks{Version: tc.version}), " ")
		if got != tc.want || o.noHooks() != tc.none {
			t.Errorf("auto %v, version %q, %v: %q, none %v", tc.auto, tc.version, tc.configured, got, o.noHooks())
		}
	}
}

// A container that asks for a memory limit and gets none is named where the driver has limits, and where the configuration did not choose it.
func TestNoLimits(t *testing.T) {
	const effect = ": NVIDIA_GPU_MEMORY_LIMIT and NVIDIA_GPU_MEMORY_REQUEST of containers have no effect"
	found := func(version string) Hooks {
		return Hooks{Path: "/usr/bin/nvidia-ctk", Looked: "/usr/bin/nvidia-ctk", Found: true, Version: version}
	}
	for name, tc := range map[string]struct {
		driver   string
		hooks    Hooks
		disabled string
		want     string
	}{
		"sets limits":            {"615.71.09", found("1.20.1"), "", ""},
		"too old":                {"615.71.09", found("1.20.0"), "", "hook program /usr/bin/nvidia-ctk has version 1.20.0, which sets no memory limits" + effect},
		"of an unknown version":  {"620.10", found(""), "", "the version of hook program /usr/bin/nvidia-ctk is unknown" + effect},
		"not visible":            {"615.71.09", Hooks{Path: "/opt/ctk"}, "", "the version of hook program /opt/ctk is not visible to this process" + effect},
		"missing":                {"615.71.09", Hooks{Path: "/opt/ctk", Looked: "/opt/ctk"}, "", "hook program /opt/ctk is not on the host" + effect},
		"a driver without them":  {"595.71.05", found("1.20.0"), "", ""},
		"no driver":              {"", found("1.20.0"), "", ""},
		"disabled":               {"615.71.09", found("1.20.0"), "apply-cuda-memory-limits", ""},
		"all hooks are disabled": {"615.71.09", found("1.20.0"), "all", ""},
	} {
		if got := (Options{DisabledHooks: []string{tc.disabled}}).noLimits(tc.hooks, tc.driver); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

// The names that the configuration accepts are those of NVIDIA's library.
func TestNamesOfTheLibrary(t *testing.T) {
	hooks := append([]string{allHooks, limitsHook, "chmod"}, slices.Concat(basicHooks, laterHooks)...)
	slices.Sort(hooks)
	if !slices.Equal(hooks, config.CDIHooks) {
		t.Errorf("hooks %v, configuration %v", hooks, config.CDIHooks)
	}
	for name, own := range map[nvcdi.HookName]string{
		nvcdi.AllHooks: allHooks, nvcdi.CreateSymlinksHook: basicHooks[0], nvcdi.UpdateLDCacheHook: basicHooks[1],
		nvcdi.DisableDeviceNodeModificationHook: laterHooks[0], nvcdi.EnableCudaCompatHook: laterHooks[1],
	} {
		if string(name) != own {
			t.Errorf("hook %s is %s in the library", own, name)
		}
	}
	var flags []string
	for _, f := range []nvcdi.FeatureFlag{
		nvcdi.FeatureDisableIPCDiscoverer, nvcdi.FeatureDisableMultipleCSVDevices, nvcdi.FeatureDisableNvsandboxUtils, nvcdi.FeatureEnableCoherentAnnotations,
		nvcdi.FeatureEnableExplicitDriverLibraries, nvcdi.FeatureNoAdditionalGIDsForDeviceNodes,
	} {
		flags = append(flags, string(f))
	}
	if slices.Sort(flags); !slices.Equal(flags, config.CDIFeatureFlags) {
		t.Errorf("feature flags %v, configuration %v", flags, config.CDIFeatureFlags)
	}
}

// Where the hook program is looked for, and what is known of it.
func TestLookForHooks(t *testing.T) {
	root, outside := t.TempDir(), t.TempDir()
	write(t, root+"/usr/bin/nvidia-ctk", "#!/bin/sh\n", 0o755)
	write(t, root+"/usr/bin/not-executable", "", 0o644)
	write(t, root+"/opt/toolkit/nvidia-cdi-hook", "", 0o755)
	write(t, root+"/toolkit-2", "", 0o755)
	for path, target := range map[string]string{"absolute": "/opt/toolkit/nvidia-cdi-hook", "relative": "../../opt/toolkit/nvidia-cdi-hook", "loop": "loop", "away": outside} {
		check.NoError(t, os.Symlink(target, root+"/usr/bin/"+path))
	}
	for path, target := range map[string]string{"local": "../var/usrlocal", "tools": "/opt/toolkit"} { // Fedora CoreOS has the first one
		check.NoError(t, os.Symlink(target, root+"/usr/"+path))
	}
	for _, tc := range []struct {
		path, driverRoot, containerRoot string
		found, seen                     bool
	}{
		{"/usr/bin/nvidia-ctk", "/", root, true, true},
		{"/usr/bin/not-executable", "/", root, false, true},
		{"/usr/bin", "/", root, false, true},
		{"/usr/bin/missing", "/", root, false, true},
		{"/usr/bin/absolute", "/", root, true, true},
		{"/usr/bin/relative", "/", root, true, true},
		{"/usr/bin/loop", "/", root, false, true},
		{"/usr/bin/away", "/", root, false, false},                                             // a link to a folder that is not mounted
		{"/usr/local/nvidia/toolkit/nvidia-cdi-hook", "/", root, false, false},                 // the same in the middle
		{"/usr/tools/nvidia-cdi-hook", "/", root, true, true},                                  // a link of a folder
		{"/snap/bin/nvidia-ctk", "/", root, false, false},                                      // a folder that is not mounted, without a link
		{"/usr/bin/nvidia-ctk", "/run/nvidia/driver", root, false, false},                      // only the driver container is mounted
		{"/run/nvidia/driver/usr/bin/nvidia-ctk", "/run/nvidia/driver", root, true, true},      // and the program is in it
		{"/run/nvidia/driver-2/usr/bin/nvidia-ctk", "/run/nvidia/driver", root, false, false},  // a folder with the same prefix
		{root + "/usr/bin/nvidia-ctk", "/run/nvidia/driver", "/run/nvidia/driver", true, true}, // this process is on the host
	} {
		o := Options{HookPath: tc.path, DriverRoot: tc.driverRoot, ContainerRoot: tc.containerRoot}.withDefaults()
		h := new(hookCache).look(o)
		if h.Found != tc.found || (h.Looked != "") != tc.seen || h.Path != tc.path {
			t.Errorf("%s below %s: %+v", tc.path, tc.driverRoot, h)
		}
	}
}

// buildHookProgram builds a program at a path with what matters of NVIDIA's hook programs: the version in the flags of its linker.
func buildHookProgram(t *testing.T, path string, args ...string) {
	t.Helper()
	dir := t.TempDir()
	write(t, dir+"/go.mod", "module example.com/ctk\n\ngo 1.24\n", 0o644)
	write(t, dir+"/main.go", "package main\n\nfunc main() {}\n", 0o644)
	cmd := exec.CommandContext(t.Context(), "go", append(append([]string{"build", "-o", path}, args...), ".")...)
	cmd.Dir = dir
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "GOFLAGS=") }), "GOFLAGS=", "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// toolkitVersion are the flags of NVIDIA's build for a version.
func toolkitVersion(version string) []string {
	const pkg = "github.com/NVIDIA/nvidia-container-toolkit/internal/info"
	return []string{"-ldflags", "-s -w -X " + pkg + ".gitCommit=abc -X " + pkg + ".version=" + version}
}

// The version of a hook program is in the file: by the flags of NVIDIA's build, also beside a script of the GPU operator.
func TestToolkitVersion(t *testing.T) {
	dir := t.TempDir()
	buildHookProgram(t, dir+"/nvidia", toolkitVersion("1.17.8-rc.1")...)
	buildHookProgram(t, dir+"/unknown", "-trimpath")
	buildHookProgram(t, dir+"/script.real", toolkitVersion("v1.18.2")...)
	write(t, dir+"/main.go", "package main\n", 0o644)
	write(t, dir+"/script", "#!/bin/sh\n", 0o755)
	for name, want := range map[string]string{"nvidia": "1.17.8-rc.1", "unknown": "", "script": "1.18.2", "missing": "", "main.go": ""} {
		if got := ToolkitVersion(filepath.Join(dir, name)); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// The configuration does not link this package, so it has its own copies of the defaults.
func TestDefaultsOfCDI(t *testing.T) {
	want := map[string]string{"cdi-dir": DefaultFolder, "nvidia-cdi-hook-path": DefaultHookPath, "cdi_dir": DefaultFolder, "cdi_hook_path": DefaultHookPath}
	for _, s := range slices.Concat(config.KubernetesSpecs(), config.NomadSpecs()) {
		for _, name := range []string{s.Flag, s.HCL} {
			if path, ok := want[name]; ok && s.Default != path {
				t.Errorf("%s is %s by default, want %s", name, s.Default, path)
			}
		}
	}
}
