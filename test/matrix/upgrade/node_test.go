//go:build matrix

package upgrade

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	resource = "nvidia.com/gpu"
	held     = 4 // the slot of a GPU that a pod has
)

const plenty = 40 * time.Second // for anything that is waited for

// node is a simulated machine with a kubelet, and what both agents keep there.
type node struct {
	*testing.T
	machine *simdriver.Machine
	pods    *kubelettest.PodResources
	dir     string
	policy  string // file of both agents; "" = none
	devices int    // that each agent offers
	uuids   []string
	starts  int
}

func newNode(t *testing.T, s state) *node {
	dir, err := os.MkdirTemp("", "up") // the names of t.TempDir are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	n := &node{T: t, dir: dir, devices: 8}
	n.machine, err = simdriver.Install(t.Context(), n.path("m"), "h100x8")
	n.must(err, os.MkdirAll(n.path("state"), 0o755), os.MkdirAll(n.path("cdi"), 0o755))
	for slot := range 8 {
		n.uuids = append(n.uuids, n.machine.UUID(slot))
	}
	hook := filepath.Join(n.machine.Root, "usr/bin/nvidia-ctk")
	n.must(os.MkdirAll(filepath.Dir(hook), 0o755), os.WriteFile(hook, []byte("#!/bin/true\n"), 0o755))
	if s.has("policy_file") {
		n.devices = 5 // three GPUs and two shares
		n.policy = n.path("policy.yaml")
		n.must(os.WriteFile(n.policy, []byte(n.policyOf(s)), 0o600))
	}
	pods, err := kubelettest.ServePodResources(n.path("pods/kubelet.sock"))
	n.must(err)
	t.Cleanup(pods.Close)
	n.pods = pods
	return n
}

// policyOf gives each agent GPUs of its own, of which one is shared. It selects by index, to which devices are bound; a state
// without such bindings has other devices at an index when a GPU vanishes, so its rules select by UUID.
func (n *node) policyOf(s state) string {
	id := func(slots ...int) string {
		if s.has("bindings") {
			return fmt.Sprintf("{index: [%s]}", join(slots, strconv.Itoa))
		}
		return fmt.Sprintf("{uuid: [%s]}", join(slots, func(slot int) string { return n.uuids[slot] }))
	}
	return fmt.Sprintf(`version: v1
policy:
  rules:
    - {select: %s, for: nomad}
    - {select: %s, for: nomad, use: time-slicing, replicas: 2}
    - {select: %s, for: kubernetes}
    - {select: %s, for: kubernetes, use: time-slicing, replicas: 2}
`, id(0, 1, 2), id(3), id(4, 5, 6), id(7))
}

func join(slots []int, text func(int) string) string {
	var all []string
	for _, slot := range slots {
		all = append(all, text(slot))
	}
	return strings.Join(all, ", ")
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

func (n *node) must(errs ...error) {
	n.Helper()
	if err := errors.Join(errs...); err != nil {
		n.Fatal(err)
	}
}

// settings are those that an agent of a state has, by the keys of Nomad's config block.
func (n *node) settings(s state, program string) map[string]string {
	root := n.machine.Root
	all := map[string]string{
		"driver_root": root, "dev_root": root, "sysfs_root": root + "/sys", "procfs_root": root + "/proc",
		"state_dir": n.path("state"), "kernel_log": "off", "health_period": "500ms", "cdi_dir": n.path("cdi"),
	}
	if program == k8sGPU {
		all["pod_resources_socket"], all["config_file"], all["http_address"] = n.path("pods/kubelet.sock"), n.policy, ""
		all["device_list_strategy"], all["nvidia_cdi_hook_path"] = "cdi-cri", n.machine.Root+"/usr/bin/nvidia-ctk"
	} else {
		all["policy_file"], all["fingerprint_period"] = n.policy, "2s"
	}
	for _, key := range s.Lacks {
		delete(all, key)
	}
	return all
}

// await polls: it is used for files and for processes of former states, which have no notification in common.
func (n *node) await(what string, ok func() bool) {
	n.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), plenty) // also when the test has ended
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			n.Fatalf("%s: not in time", what)
		}
	}
}

// handedOut returns whether k8s-gpu has recorded that a pod got a GPU. A state from before that record has none.
func (n *node) handedOut() bool {
	text, err := os.ReadFile(n.path("state/k8s-gpu.handed-out.json"))
	return err == nil && strings.Contains(string(text), n.uuids[held])
}

// recorded returns whether the history of an agent has the XID of one GPU, and something of a lost one.
func (n *node) recorded(program, faulty, lost string) bool {
	text, err := os.ReadFile(filepath.Join(n.path("state"), program+".json"))
	if err != nil {
		return false
	}
	var file struct {
		Record struct {
			Conditions []struct {
				At   struct{ GPU string }
				Code int
			}
		}
	}
	n.must(json.Unmarshal(text, &file))
	var hasXID, hasLost bool
	for _, c := range file.Record.Conditions {
		hasXID = hasXID || c.At.GPU == faulty && c.Code == xid
		hasLost = hasLost || c.At.GPU == lost
	}
	return hasXID && hasLost
}
