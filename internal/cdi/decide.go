package cdi

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Runtime is what is known of the container runtime of the node. The zero value is unknown.
type Runtime struct {
	Name    string     // "containerd", "cri-o", "docker"; as in a Node's status.nodeInfo.containerRuntimeVersion
	Version string     // "1.7.29"
	CDI     gpu.Toggle // as configured
	Folders []string   // of CDI specifications, as configured; nil = unknown
}

// ParseRuntime returns the runtime that a Node of Kubernetes has in status.nodeInfo.containerRuntimeVersion, "containerd://2.4.2"; the zero
// value for a text of another form.
func ParseRuntime(text string) Runtime {
	name, version, ok := strings.Cut(text, "://")
	if !ok {
		return Runtime{}
	}
	return Runtime{Name: name, Version: version}
}

// String returns the name and version; "unknown runtime" for the zero value.
func (r Runtime) String() string {
	return cmp.Or(strings.TrimSpace(r.Name+" "+r.Version), "unknown runtime")
}

// LacksSettingsOf reports whether r is from the same runtime as before, or from none, and lacks the settings that before may have.
func (r Runtime) LacksSettingsOf(before Runtime) bool {
	same := r.Name == "" && r.Version == "" || r.Name == before.Name && r.Version == before.Version
	return same && r.CDI == gpu.ToggleUnknown && r.Folders == nil
}

// Hooks is whether the hooks of a specification can run on the host.
type Hooks struct {
	None    bool   // the specification has no hooks, by configuration
	Path    string // of NVIDIA's hook program on the host
	Found   bool
	Looked  string // where this process looked for it; "" = it can't see that part of the host
	Version string // "1.17.8"; "" = unknown
}

// seenAt is where this process sees the hook program; "" = it does not.
func (h Hooks) seenAt() string {
	if !h.Found {
		return ""
	}
	return h.Looked
}

// missing is the text for a hook program that is not on the host.
func (h Hooks) missing() string {
	if h.Looked == h.Path {
		return fmt.Sprintf("hook program %s is not on the host", h.Path)
	}
	return fmt.Sprintf("hook program %s is not on the host (looked for at %s)", h.Path, h.Looked)
}

// Decide reports whether a container that gets its devices from the specification has a working driver, and why, in a line. It is
// the rule of the strategy "auto". problem is why there is no valid specification in the folder, "" if there is one.
//
// Nothing that an unprivileged agent can see proves that a runtime reads specifications. So what is known of it can only be a
// reason against it.
func Decide(problem, folder string, h Hooks, r Runtime) (usable bool, reason string) {
	switch {
	case problem != "":
		return false, "no CDI specification: " + problem
	case !h.None && !h.Found && h.Looked == "":
		return false, fmt.Sprintf("hook program %s can't be looked for: this process does not see the host's root; mount it, or disable all hooks", h.Path)
	case !h.None && !h.Found:
		return false, h.missing() + ": install nvidia-container-toolkit"
	}
	if why := r.refuses(folder); why != "" {
		return false, why
	}
	hooks := "no hooks"
	if !h.None {
		hooks = fmt.Sprintf("hooks by %s, version %s", h.Path, cmp.Or(h.Version, "unknown"))
	}
	return true, fmt.Sprintf("specification in %s, %s, %s", folder, hooks, r)
}

// Unsupported returns why containers of the runtime never get a device by the specifications in a folder; "" if they may. An engine
// without CDI ignores the names: the container starts without its devices, and without an error.
func (r Runtime) Unsupported(folder string) string {
	if r.Name == "containerd" && number(r.Version, 0) == 1 && number(r.Version, 1) >= 7 && r.CDI == gpu.ToggleUnknown {
		return "" // it may be configured
	}
	return r.refuses(folder)
}

// refuses returns why the runtime does not read the specifications in a folder; "" if it may.
func (r Runtime) refuses(folder string) string {
	const enable = `set enable_cdi = true in the section of plugin "io.containerd.grpc.v1.cri"`
	major, minor := number(r.Version, 0), number(r.Version, 1)
	switch {
	case r.CDI == gpu.Disabled:
		how := "switch it on"
		switch r.Name {
		case "containerd":
			how = "set enable_cdi = true in its section of the CRI plugin"
		case "cri-o":
			how = "set cdi_spec_dirs"
		case "docker":
			how = `set "features": {"cdi": true}`
		}
		return fmt.Sprintf("%s has CDI switched off: %s", r, how)
	case r.Folders != nil && !containsFolder(r.Folders, folder):
		return fmt.Sprintf("%s does not read %s: add it to cdi_spec_dirs, which is %s", r, folder, strings.Join(r.Folders, ", "))
	case r.CDI == gpu.Enabled || r.Version == "":
		return ""
	case r.Name == "containerd" && (major < 1 || major == 1 && minor < 7):
		return fmt.Sprintf("%s has no CDI: use containerd 2", r)
	case r.Name == "containerd" && major == 1:
		return fmt.Sprintf("%s has CDI switched off unless configured: %s, or use containerd 2", r, enable)
	case r.Name == "cri-o" && major == 1 && minor < 24:
		return fmt.Sprintf("%s has no CDI: use CRI-O 1.24 or later", r)
	}
	return ""
}

// containsFolder reports whether a folder is in a list. /var/run is a link to /run.
func containsFolder(list []string, folder string) bool {
	plain := func(f string) string { return strings.TrimPrefix(strings.TrimSuffix(f, "/"), "/var") }
	return slices.ContainsFunc(list, func(f string) bool {
		return f == folder || strings.HasPrefix(plain(folder), "/run/") && plain(f) == plain(folder)
	})
}

// number is the n-th number of a version such as "v1.7.29-rc.1"; 0 if it has none.
func number(version string, n int) int {
	parts := strings.FieldsFunc(strings.TrimPrefix(version, "v"), func(r rune) bool { return r < '0' || r > '9' })
	if n >= len(parts) {
		return 0
	}
	value, _ := strconv.Atoi(parts[n]) // digits; 0 if there are too many
	return value
}

// AtLeast reports whether a known version of NVIDIA's container toolkit is this one or a later one: AtLeast("1.20.1", 1, 18, 0). The version "" is not known.
func AtLeast(version string, want ...int) bool {
	have := make([]int, len(want))
	for i := range want {
		have[i] = number(version, i)
	}
	return version != "" && slices.Compare(have, want) >= 0
}
