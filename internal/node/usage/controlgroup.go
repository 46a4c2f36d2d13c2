package usage

import (
	"regexp"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// group is what the control groups of a process show.
type group struct {
	owner     holders.Work // with orchestrator, ID if known, and the task of Nomad; the zero value = no work of an orchestrator
	container bool         // it is in a container that no orchestrator's control group has
	user      bool         // it is below user.slice: a login session, a user's service or container
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
// Only root can create a control group with such a name, except below user.slice, which systemd gives to users: there only a container
// counts, whose mounts show more (podman without root).
func parseGroup(text string) group {
	var g group
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) != 3 {
			continue
		}
		one := parsePath(fields[2])
		if one.owner != (holders.Work{}) {
			return group{owner: one.owner}
		}
		g.container, g.user = g.container || one.container, g.user || one.user
	}
	return g
}

func parsePath(path string) (g group) {
	parent := ""
	for part := range strings.SplitSeq(path, "/") {
		if part == "user.slice" || strings.HasPrefix(part, "user@") {
			g.user = true
		}
		isContainer := containerPart.MatchString(part)
		g.container = g.container || isContainer
		if !g.user {
			g.owner = ownerOf(part, parent, isContainer)
		}
		if g.owner != (holders.Work{}) {
			return g
		}
		parent = part
	}
	return g
}

// ownerOf is the work that a part of a path shows.
func ownerOf(part, parent string, isContainer bool) holders.Work {
	if m := podPart.FindStringSubmatch(part); m != nil {
		return holders.Work{Orchestrator: holders.Kubernetes, ID: strings.ReplaceAll(m[1], "_", "-")}
	}
	if m := taskPart.FindStringSubmatch(part); m != nil {
		return holders.Work{Orchestrator: holders.Nomad, ID: m[1], Container: strings.TrimSuffix(m[2], ".scope")}
	}
	if isContainer && parent == criParent {
		return holders.Work{Orchestrator: holders.Kubernetes}
	}
	return holders.Work{}
}
