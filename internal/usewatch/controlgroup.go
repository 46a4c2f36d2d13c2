package usewatch

import (
	"regexp"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/use"
)

// group is what the control groups of a process show.
type group struct {
	owner     use.Owner // with orchestrator, ID if known, and the task of Nomad; the zero value = no work of an orchestrator
	container bool      // it is in a container that no orchestrator's control group has
}

// criParent is the parent that containerd gives to containers of a kubelet without control groups for pods (cgroupsPerQOS: false).
const criParent = "k8s.io"

// Forms of a part of a path.
var (
	// kubelet (pkg/kubelet/cm): "pod<UID>" with the driver cgroupfs, "kubepods-besteffort-pod<UID>.slice" with systemd, where "_" stands
	// for "-" in the UID. The UID of a pod that comes from a file is a hash.
	podPart = regexp.MustCompile(`^(?:[a-z0-9-]*kubepods(?:-[a-z]+)?-)?pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?$`)

	// Nomad (client/lib/cgroupslib): "<allocation>.<task>.scope" below share.slice or reserve.slice, "<allocation>.<task>" in version 1.
	taskPart = regexp.MustCompile(`^([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\.(.+)$`)

	// Container runtimes: "docker-<ID>.scope", "libpod-<ID>.scope", "cri-containerd-<ID>.scope", "crio-<ID>.scope"; with cgroupfs "<ID>",
	// with podman's "libpod-<ID>".
	containerPart = regexp.MustCompile(`^(?:[a-z-]+-)?[0-9a-f]{64}(?:\.scope)?$`)

	uuid = regexp.MustCompile(`^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

func isUUID(s string) bool { return uuid.MatchString(s) }

// parseGroup reads /proc/PID/cgroup (cgroups(7)): one line in version 2, one for each hierarchy in version 1, of which some have no
// path of the work. The first line with work counts, and on it the outermost work: what a container of a pod starts is the pod's.
// A process that this one's cgroup namespace does not cover has a path that begins with "/..".
//
// Only root can create a control group with such a name, except below user.slice, which systemd gives to users: nothing there counts.
func parseGroup(text string) group {
	var g group
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) != 3 {
			continue
		}
		parent := ""
		for part := range strings.SplitSeq(fields[2], "/") {
			if part == "user.slice" || strings.HasPrefix(part, "user@") {
				break
			}
			if m := podPart.FindStringSubmatch(part); m != nil {
				return group{owner: use.Owner{Orchestrator: use.Kubernetes, ID: strings.ReplaceAll(m[1], "_", "-")}}
			}
			if m := taskPart.FindStringSubmatch(part); m != nil {
				return group{owner: use.Owner{Orchestrator: use.Nomad, ID: m[1], Container: strings.TrimSuffix(m[2], ".scope")}}
			}
			if containerPart.MatchString(part) {
				if parent == criParent {
					return group{owner: use.Owner{Orchestrator: use.Kubernetes}}
				}
				g.container = true
			}
			parent = part
		}
	}
	return g
}
