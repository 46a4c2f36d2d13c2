package doctor

import (
	"context"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// Toolkit is NVIDIA's container toolkit on the host.
type Toolkit struct {
	Visible  bool              // the folders of programs of the host are visible
	Runtime  string            // path of nvidia-container-runtime; "" = it was not found
	CTK      string            // the same of nvidia-ctk
	Version  string            // of nvidia-ctk; "" = unknown
	Config   string            // path of its configuration; "" = it was not found
	Settings map[string]string // of the configuration: "nvidia-container-cli.no-cgroups": "true"
}

// toolkitFolders are those of distributions and of NVIDIA's GPU operator.
var toolkitFolders = []string{"/usr/bin", "/usr/local/nvidia/toolkit", "/usr/local/bin", "/opt/nvidia/toolkit"}

var toolkitConfigs = []string{"/etc/nvidia-container-runtime/config.toml", "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"}

func readToolkit(_ context.Context, o *Options) func(*Facts) {
	t := Toolkit{Settings: map[string]string{}}
	roots := []string{o.HostRoot}
	if o.system.container() != "" && o.HostRoot == "" {
		roots = nil // "/" is that of the container
	}
	if o.Roots.Driver != "" && !slices.Contains(roots, o.Roots.Driver) {
		roots = append(roots, o.Roots.Driver)
	}
	first := func(path *string, candidates ...string) {
		for _, root := range roots {
			for _, c := range candidates {
				if at := beneath(root, c); *path == "" && exists(at) {
					*path = at
				}
			}
		}
	}
	in := func(name string) (paths []string) {
		for _, folder := range toolkitFolders {
			paths = append(paths, filepath.Join(folder, name))
		}
		return paths
	}
	first(&t.Runtime, in("nvidia-container-runtime")...)
	first(&t.CTK, in("nvidia-ctk")...)
	first(&t.Config, toolkitConfigs...)
	for _, root := range roots {
		t.Visible = t.Visible || exists(beneath(root, "/usr/bin"))
	}
	t.Version = cdi.ToolkitVersion(t.CTK)
	if t.Config != "" {
		t.Settings = parseSettings(text(t.Config))
	}
	return func(f *Facts) { f.Toolkit = t }
}

// parseSettings reads the settings of one line each of a TOML file: those of NVIDIA's toolkit that matter here are bools and strings.
func parseSettings(text string) map[string]string {
	settings := map[string]string{}
	section := ""
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), "#")
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "["); ok {
			section = strings.TrimSuffix(name, "]") + "."
			continue
		}
		if key, value, ok := strings.Cut(line, "="); ok {
			settings[section+strings.TrimSpace(key)] = strings.Trim(strings.TrimSpace(value), `"`)
		}
	}
	return settings
}

// ByRuntime are the pools whose containers get their devices by NVIDIA's runtime and in no other way, and those that have another.
func (f *Facts) ByRuntime() (only, also []string) {
	for _, i := range f.Offered().Injections {
		switch {
		case i.Runtime && !i.CDI && !i.Nodes:
			only = append(only, i.Pools...)
		case i.Runtime:
			also = append(also, i.Pools...)
		}
	}
	return only, also
}

func decideToolkit(f *Facts) []Finding {
	t := f.Toolkit
	only, also := f.ByRuntime()
	switch {
	case f.Late["toolkit"] || len(only)+len(also) == 0:
		return nil
	case t.Runtime == "" && !t.Visible:
		return []Finding{{"toolkit", Note, "the host's /usr/bin", "NVIDIA's container toolkit is not visible from here" + remedyInContainer(f, " ("+f.Container+")"), ""}}
	case t.Runtime == "" && len(only) > 0:
		return []Finding{{"toolkit", Problem, list(toolkitFolders), "nvidia-container-runtime is not installed: containers of pool " + list(only) + " get NVIDIA_VISIBLE_DEVICES, and nothing acts on it",
			"install nvidia-container-toolkit and run nvidia-ctk runtime configure" + withoutToolkit(f)}}
	case t.Runtime == "":
		return []Finding{alsoWithoutRuntime(f, also)}
	}
	const refuses, cgroups = "accept-nvidia-visible-devices-envvar-when-unprivileged", "nvidia-container-cli.no-cgroups"
	if t.Settings[refuses] == "false" && len(only) > 0 && !f.byMounts() {
		return []Finding{{"toolkit", Problem, t.Config, refuses + " = false: the variable of unprivileged containers has no effect, and they get no GPU",
			"set it to true; " + otherWay(f)}}
	}
	if t.Settings[cgroups] == "true" {
		return []Finding{{"toolkit", Problem, t.Config, cgroups + " = true: containers that root starts may not open their device nodes", "set it to false; true is for rootless containers"}}
	}
	return []Finding{{"toolkit", OK, t.Runtime, strings.TrimSpace("nvidia-container-runtime is installed " + t.Version), ""}}
}

// alsoWithoutRuntime is the finding for pools whose containers get their devices in another way, too.
func alsoWithoutRuntime(f *Facts, pools []string) Finding {
	found := Finding{"toolkit", Note, list(toolkitFolders), "nvidia-container-runtime is not installed; containers of pool " + list(pools) + " get their devices by device nodes or CDI, too", ""}
	if f.kubernetes() {
		return found
	}
	found.Found = "nvidia-container-runtime is not installed: exec and java tasks of pool " + list(pools) + " get device nodes, docker tasks need the runtime"
	if len(f.Running("dockerd")) > 0 {
		found.Severity = Warning
		found.Found = "nvidia-container-runtime is not installed: docker tasks with a GPU of pool " + list(pools) + " fail, as docker has no runtime \"nvidia\""
		found.Remedy = "install nvidia-container-toolkit and run nvidia-ctk runtime configure --runtime=docker" + withoutToolkit(f)
	}
	return found
}

// byMounts reports whether containers name their devices by mounts (the strategy volume-mounts).
func (f *Facts) byMounts() bool {
	return slices.ContainsFunc(f.Offered().Injections, func(i report.Injection) bool { return strings.Contains(i.Configured, "volume-mounts") })
}

// otherWay is how containers get devices without the variable.
func otherWay(f *Facts) string {
	if f.kubernetes() {
		return "or use another --device-list-strategy: cdi-cri, volume-mounts"
	}
	return "or use another injection in the plugin block: see docs/policy.md"
}

// withoutToolkit is how containers get devices without NVIDIA's container toolkit, whose programs CDI specifications need, too.
func withoutToolkit(f *Facts) string {
	if f.kubernetes() {
		return ""
	}
	return "; or injection = [\"devices\", \"libraries\"]: see docs/policy.md"
}
