package kubeshadow

import (
	"bytes"
	"cmp"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// podEnvironment is the environment with which a process of a pod was started. The kubelet sets HOSTNAME to the name of the pod.
type podEnvironment struct {
	cgroup string // of the container
	env    map[string]string
}

// maxEnvironment is how much of an environment is read: a process decides how long it is.
const maxEnvironment = 1 << 20

// podEnvironments are those of the processes that this process may read and that may be of a pod, one for each control group.
func podEnvironments(procRoot string) (all []podEnvironment) {
	procRoot = cmp.Or(procRoot, "/proc")
	entries, err := os.ReadDir(procRoot)
	if err != nil {
		return nil
	}
	seen := map[string]bool{}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		group := cgroup(filepath.Join(procRoot, e.Name(), "cgroup"))
		if group == "" || seen[group] {
			continue
		}
		text, err := environment(filepath.Join(procRoot, e.Name(), "environ"))
		if err != nil || len(text) == 0 {
			continue
		}
		p := podEnvironment{cgroup: group, env: map[string]string{}}
		for variable := range bytes.SplitSeq(text, []byte{0}) {
			if name, value, ok := strings.Cut(string(variable), "="); ok {
				p.env[name] = value
			}
		}
		if p.env["HOSTNAME"] != "" {
			seen[group] = true
			all = append(all, p)
		}
	}
	return all
}

// environment returns the beginning of a file of procfs.
func environment(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // opened for reading only
	return io.ReadAll(io.LimitReader(f, maxEnvironment))
}

// cgroup is the control group of a process, which is that of its container; "" if it can't be read. Its path depends on the kubelet's and
// the container runtime's settings: "/kubepods.slice/...", "/k8s.io/...".
func cgroup(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) == 3 {
			return parts[2]
		}
	}
	return ""
}

// maxHostname limits HOSTNAME, which is a part of the pod's name then.
const maxHostname = 63

// environmentOf is the environment of a container that holds devices, or why it is not known. The control group has no name of the
// container, so that of several containers of the pod the one counts that has all variables of the answer, or else the one that has
// some.
func environmentOf(all []podEnvironment, c podresources.Container, answer map[string]string) (env map[string]string, why string) {
	var found []podEnvironment
	for _, p := range all {
		if p.env["HOSTNAME"] == c.Pod[:min(len(c.Pod), maxHostname)] {
			found = append(found, p)
		}
	}
	best := -1
	for _, p := range found {
		same := 0
		for name, value := range answer {
			if p.env[name] == value || sameList(p.env[name], value) {
				same += 2
			} else if p.env[name] != "" {
				same++
			}
		}
		if same > best {
			best, env = same, p.env
		}
	}
	switch {
	case len(found) == 0:
		return nil, "no process of it is visible: that takes the host's PID namespace, and the right to read /proc/PID/environ"
	case best == 0 && len(found) > 1 && len(answer) > 0:
		return nil, "its process can't be told from others of the pod"
	}
	return env, ""
}
