package nomad

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// program is what a file in the plugin_dir is.
type program int

const (
	otherProgram program = iota
	ownProgram
	incumbentProgram // nomad-device-nvidia
)

// identify recognises a program by its build information, as an operator may rename it; without that by its name.
func identify(path string) program {
	of := filepath.Base(path)
	if info, err := buildinfo.ReadFile(path); err == nil && info.Path != "" {
		of = info.Path
	}
	switch {
	case strings.HasPrefix(of, "nomad-gpu"), strings.HasSuffix(of, "/cmd/nomad-gpu"):
		return ownProgram
	case strings.Contains(of, "nomad-device-nvidia"):
		return incumbentProgram
	}
	return otherProgram
}

// docker checks what tasks of the docker driver need.
func (o Options) docker(f *doctor.Facts, c agentConfig, process doctor.Process) (findings []doctor.Finding) {
	if len(f.Running("dockerd")) == 0 {
		return nil
	}
	const daemon = "/etc/docker/daemon.json"
	only, also := f.ByRuntime()
	if pools := slices.Concat(only, also); len(pools) > 0 && f.Toolkit.Runtime != "" && !hasRuntime(host(f, daemon)) {
		findings = append(findings, finding(doctor.Warning, daemon, "docker has no runtime \"nvidia\": its tasks with a GPU of pool "+strings.Join(pools, ", ")+" fail",
			"nvidia-ctk runtime configure --runtime=docker, and restart docker; or another injection"))
	}
	if pools := strings.Join(mpsPools(f.Offered()), ", "); pools != "" && !allowsIPC(c.Plugins["docker"].Config) {
		const remedy = `plugin "docker" { config { allowed_modes { ipc = ["host"] } } }, and restart Nomad: see MPS in docs/sharing.md`
		place := strings.Join(c.Files, ", ")
		version := o.version(process)
		switch {
		case version == "":
			findings = append(findings, finding(doctor.Note, place, "Nomad 2.0.4 and later refuses ipc_mode = \"host\", which docker tasks with MPS (pool "+pools+") need; the version of this one is not known", remedy))
		case refusesIPC(version):
			findings = append(findings, finding(doctor.Warning, place, fmt.Sprintf("Nomad %s refuses ipc_mode = \"host\", which docker tasks with MPS (pool %s) need", version, pools), remedy))
		}
	}
	return findings
}

// hasRuntime reports whether docker's configuration names NVIDIA's runtime, or lets it use CDI (features.cdi).
func hasRuntime(path string) bool {
	text, err := os.ReadFile(path)
	var c struct {
		Runtimes map[string]json.RawMessage `json:"runtimes"`
	}
	return err == nil && json.Unmarshal(text, &c) == nil && c.Runtimes["nvidia"] != nil
}

func mpsPools(r report.Report) (pools []string) {
	for _, d := range r.Devices {
		if d.Sharing == "mps" && !slices.Contains(pools, d.Pool) {
			pools = append(pools, d.Pool)
		}
	}
	return pools
}

// allowsIPC reports whether the configuration of the docker driver allows ipc_mode = "host".
func allowsIPC(docker map[string]any) bool {
	if fmt.Sprint(docker["allow_privileged"]) == "true" {
		return true
	}
	for _, modes := range blocks(docker["allowed_modes"]) {
		if list, ok := modes["ipc"].([]any); ok && slices.Contains(list, any("host")) {
			return true
		}
	}
	return false
}

var semver = regexp.MustCompile(`v?([0-9]+)\.([0-9]+)\.([0-9]+)`)

// refusesIPC reports whether a version of Nomad checks ipc_mode: 2.0.4 and later, and of the 1.11 series 1.11.8 and later
// (CVE-2026-14891). An unknown version does not.
func refusesIPC(version string) bool {
	m := semver.FindStringSubmatch(version)
	if m == nil {
		return false
	}
	var n [3]int
	for i := range n {
		n[i], _ = strconv.Atoi(m[i+1])
	}
	if n[0] == 1 {
		return n[1] == 11 && n[2] >= 8
	}
	return slices.Compare(n[:], []int{2, 0, 4}) >= 0
}

// version is that of the running Nomad agent; "" = unknown. It is read from the build information, because a plugin's program starts
// no process.
func (o Options) version(process doctor.Process) string {
	read := o.Version
	if read == nil {
		read = moduleVersion
	}
	return strings.TrimPrefix(read(o.proc(process.PID, "exe")), "v")
}

// moduleVersion is the version of the main module of an executable; "" if it has none, as after a build outside of a release.
func moduleVersion(executable string) string {
	info, err := buildinfo.ReadFile(executable)
	if err != nil {
		return ""
	}
	return semver.FindString(info.Main.Version)
}
