package cgroup

import (
	"errors"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// Member is what the path of a control group shows of the processes in it.
type Member struct {
	Work      holders.Work // with orchestrator, ID if known, and the task of Nomad; the zero value = no work of an orchestrator
	Container bool         // they are in a container that no orchestrator's control group has
	User      bool         // it is below user.slice: a login session, a user's service or container
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

	// The groups of the kubelet above those of pods: "kubepods", "kubepods-burstable.slice", below a group of its option --cgroup-root, too.
	podsPart = regexp.MustCompile(`^(?:[a-z0-9-]*kubepods(?:-besteffort|-burstable)?\.slice|kubepods|besteffort|burstable)$`)
)

// MemberOf reads a path: the outermost work counts, as what a container of a pod starts is the pod's. Only root can create a control group with such a name,
// except below user.slice, which systemd gives to users: there only a container counts, whose mounts show more (podman without root).
func MemberOf(path string) (m Member) {
	parent := ""
	for part := range strings.SplitSeq(path, "/") {
		if part == "user.slice" || strings.HasPrefix(part, "user@") {
			m.User = true
		}
		isContainer := containerPart.MatchString(part)
		m.Container = m.Container || isContainer
		if !m.User {
			m.Work = workOf(part, parent, isContainer)
		}
		if m.Work != (holders.Work{}) {
			return m
		}
		parent = part
	}
	return m
}

// workOf is the work that a part of a path shows.
func workOf(part, parent string, isContainer bool) holders.Work {
	if uid := podUID(part); uid != "" {
		return holders.Work{Orchestrator: holders.Kubernetes, ID: uid}
	}
	if m := taskPart.FindStringSubmatch(part); m != nil {
		return holders.Work{Orchestrator: holders.Nomad, ID: m[1], Container: strings.TrimSuffix(m[2], ".scope")}
	}
	if isContainer && parent == criParent {
		return holders.Work{Orchestrator: holders.Kubernetes}
	}
	return holders.Work{}
}

// podUID is the UID of the pod of which a part of a path is; "" = of none.
func podUID(part string) string {
	m := podPart.FindStringSubmatch(part)
	if m == nil {
		return ""
	}
	return strings.ReplaceAll(m[1], "_", "-")
}

// OfPod reports whether a path is that of the group of a pod, as the kubelet makes it, or of one below that, as those of its containers are, and what they make:
//
//	/kubepods/burstable/podUID, /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice      below any group, by the kubelet's option --cgroup-root
//
// The groups above have pods of others below them.
func OfPod(group string) bool {
	parts := strings.Split(group, "/")
	pod := slices.IndexFunc(parts, func(part string) bool { return podUID(part) != "" })
	if pod < 2 || parts[0] != "" || slices.Contains(parts[1:], "") {
		return false
	}
	above := parts[pod-1]
	if above == "burstable" || above == "besteffort" {
		above = parts[pod-2]
	}
	return podsPart.MatchString(above) && above != "burstable" && above != "besteffort"
}

// nomadSlice is the group below which Nomad makes that of each task, "<allocation>.<task>.scope", in one of NomadSlices: the second has tasks with CPU cores of
// their own (client/lib/cgroupslib in Nomad; cgroup_parent of its configuration has no effect on this).
const nomadSlice = "/nomad.slice"

// NomadSlices have the groups of Nomad's tasks.
var NomadSlices = []string{nomadSlice + "/share.slice", nomadSlice + "/reserve.slice"}

// NomadParents are the groups above those of Nomad's tasks, from the root: each must enable a controller that the tasks are to have.
func NomadParents() []string { return append([]string{"/", nomadSlice}, NomadSlices...) }

// Tasks returns the groups of Nomad's tasks with their work, sorted by path within each slice. A slice that does not exist has none.
func (f FS) Tasks() (groups []string, err error) {
	for _, slice := range NomadSlices {
		names, err := f.Children(slice)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, name := range names {
			if taskPart.MatchString(name) {
				groups = append(groups, slice+"/"+name)
			}
		}
	}
	return groups, nil
}

// maxPodDepth is how many groups of the kubelet are above that of a pod, at most: --cgroup-root may have some.
const maxPodDepth = 5

// Pods returns the groups of the pods of a kubelet by UID: with its drivers cgroupfs and systemd, wherever its option --cgroup-root has them.
func (f FS) Pods() (byUID map[string]string, err error) {
	byUID = map[string]string{}
	return byUID, f.pods("/", 0, false, byUID)
}

// pods adds the pods below a group. Only groups of the kubelet, or that may be above them, are read.
func (f FS) pods(group string, depth int, kubelet bool, byUID map[string]string) error {
	names, err := f.Children(group)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it has ended meanwhile
	}
	if err != nil {
		return err
	}
	for _, name := range names {
		at, isPods := path.Join(group, name), podsPart.MatchString(name)
		switch uid := podUID(name); {
		case uid != "" && kubelet:
			byUID[uid] = at
		case depth < maxPodDepth && (isPods || !kubelet && mayHavePods(name)):
			if err := f.pods(at, depth+1, isPods, byUID); err != nil {
				return err
			}
		}
	}
	return nil
}

// mayHavePods reports whether a group can be the one that --cgroup-root names: a user's, a service's and a container's are not.
func mayHavePods(name string) bool {
	return !strings.HasSuffix(name, ".service") && !strings.HasSuffix(name, ".scope") && name != "user.slice" && name != "nomad.slice" && !containerPart.MatchString(name)
}

// Resolve returns the path of a group of a pod below the mount point: a process whose control group namespace does not cover a group sees a path of it that begins
// with "/..". The path of one that it covers is returned as it is; "" = it can't be known.
func Resolve(group string, pods map[string]string) string {
	if !strings.HasPrefix(group, "/..") {
		return group
	}
	parts := strings.Split(group, "/")
	for i, part := range parts {
		if uid := podUID(part); uid != "" {
			if at, ok := pods[uid]; ok {
				return path.Join(append([]string{at}, parts[i+1:]...)...)
			}
		}
	}
	return ""
}
