package usage

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/holders"
)

const (
	podUID    = "0e6a0b2c-6f0c-4f5e-9d51-1c2d3e4f5a6b"
	allocID   = "5b1f3c58-2f0f-1f7b-9c0e-7ad8a6cf2f7a"
	container = "3a5f0c0d7b1e4f6a8c9d0e1f2a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d"
)

func TestParseGroup(t *testing.T) {
	under := strings.ReplaceAll(podUID, "-", "_")
	kube := holders.Work{Orchestrator: holders.Kubernetes, ID: podUID}
	nomad := holders.Work{Orchestrator: holders.Nomad, ID: allocID, Container: "main"}
	for name, tc := range map[string]struct {
		text string
		want group
	}{
		"nothing":       {"", group{}},
		"root":          {"0::/\n", group{}},
		"a service":     {"0::/system.slice/ssh.service\n", group{}},
		"a user":        {"0::/user.slice/user-1000.slice/session-4.scope\n", group{user: true}},
		"not a line":    {"0:/" + allocID + ".main\n\n:::::/" + "x\n", group{}},
		"another name":  {"0::/kubepods.slice/podman\n", group{}},
		"short of a ID": {"0::/nomad.slice/share.slice/" + allocID[1:] + ".main.scope\n", group{}},

		"systemd, containerd, burstable":  {"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + under + ".slice/cri-containerd-" + container + ".scope\n", group{owner: kube}},
		"systemd, CRI-O, guaranteed":      {"0::/kubepods.slice/kubepods-pod" + under + ".slice/crio-" + container + ".scope\n", group{owner: kube}},
		"systemd, docker, best effort":    {"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + under + ".slice/docker-" + container + ".scope\n", group{owner: kube}},
		"kind":                            {"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod" + under + ".slice/cri-containerd-" + container + ".scope\n", group{owner: kube}},
		"cgroupfs":                        {"0::/kubepods/besteffort/pod" + podUID + "/" + container + "\n", group{owner: kube}},
		"from a file":                     {"0::/kubepods/besteffort/pod33e1a2b3c4d5e6f708192a3b4c5d6e7f/" + container, group{owner: holders.Work{Orchestrator: holders.Kubernetes, ID: "33e1a2b3c4d5e6f708192a3b4c5d6e7f"}}},
		"seen from another pod":           {"0::/../../kubepods-besteffort-pod" + under + ".slice/cri-containerd-" + container + ".scope\n", group{owner: kube}},
		"seen from another pod, cgroupfs": {"0::/../../pod" + podUID + "/" + container + "\n", group{owner: kube}},
		"version 1":                       {"12:pids:/kubepods/pod" + podUID + "/" + container + "\n0::/system.slice/containerd.service\n", group{owner: kube}},
		"without groups of pods":          {"3:cpu:/k8s.io/" + container + "\n", group{owner: holders.Work{Orchestrator: holders.Kubernetes}}},
		"docker in a pod":                 {"0::/kubepods/pod" + podUID + "/" + container + "/docker/" + container + "\n", group{owner: kube}},

		"Nomad":                    {"0::/nomad.slice/share.slice/" + allocID + ".main.scope\n", group{owner: nomad}},
		"Nomad, reserved cores":    {"0::/nomad.slice/reserve.slice/" + allocID + ".main.scope\n", group{owner: nomad}},
		"Nomad, another parent":    {"0::/batch.slice/share.slice/" + allocID + ".main.scope/child\n", group{owner: nomad}},
		"Nomad, a task with a dot": {"0::/nomad.slice/share.slice/" + allocID + ".a.b.scope\n", group{owner: holders.Work{Orchestrator: holders.Nomad, ID: allocID, Container: "a.b"}}},
		"Nomad, version 1":         {"7:cpuset:/nomad/share\n6:freezer:/nomad/" + allocID + ".main\n4:memory:/nomad/" + allocID + ".main\n", group{owner: nomad}},
		"Nomad, hybrid":            {"6:freezer:/nomad/" + allocID + ".main\n1:name=systemd:/system.slice/nomad.service\n0::/system.slice/nomad.service\n", group{owner: nomad}},

		"docker":           {"0::/system.slice/docker-" + container + ".scope\n", group{container: true}},
		"docker, cgroupfs": {"0::/docker/" + container + "\n", group{container: true}},
		"podman":           {"0::/machine.slice/libpod-" + container + ".scope/container\n", group{container: true}},

		"a user who pretends to be a pod":   {"0::/user.slice/user-1000.slice/user@1000.service/kubepods/pod" + podUID + "/x\n", group{user: true}},
		"a user who pretends to be Nomad":   {"0::/user.slice/user-1000.slice/user@1000.service/share.slice/" + allocID + ".main.scope\n", group{user: true}},
		"a user with a container, rootless": {"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + container + ".scope\n", group{user: true, container: true}},
	} {
		if got := parseGroup(tc.text); got != tc.want {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
}

// Whatever a control group is called, the parser ends, and what it finds has a well-formed ID.
func FuzzParseGroup(f *testing.F) {
	f.Add("0::/kubepods.slice/kubepods-pod" + podUID + ".slice/x")
	f.Add("0::/nomad.slice/share.slice/" + allocID + ".main.scope")
	f.Fuzz(func(t *testing.T, text string) {
		g := parseGroup(text)
		if id := g.owner.ID; (g.owner == holders.Work{}) != (id == "") && g.owner != (holders.Work{Orchestrator: holders.Kubernetes}) || id != "" && len(id) != 32 && !isUUID(id) {
			t.Errorf("%+v", g)
		}
	})
}
