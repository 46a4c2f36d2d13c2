package agents

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// nomadAPI is the part of a Nomad agent's HTTP API that the agent reads.
type nomadAPI struct {
	mu      sync.Mutex
	index   int
	holds   map[string]string // by the ID of an allocation, its device; "" = it has ended
	listed  string            // a device of the node
	changed chan struct{}
}

// set gives a device to the first allocation; "" ends it.
func (n *nomadAPI) set(device string) { n.hold("5b1f3c58", device) }

// hold gives a device to an allocation; "" ends it.
func (n *nomadAPI) hold(allocation, device string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.index++
	n.holds = maps.Clone(n.holds)
	n.holds[allocation] = device
	close(n.changed)
	n.changed = make(chan struct{})
}

// list makes the servers list a device at the node.
func (n *nomadAPI) list(device string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listed = device
}

func (n *nomadAPI) node(w http.ResponseWriter, _ *http.Request) {
	n.mu.Lock()
	defer n.mu.Unlock()
	fmt.Fprintf(w, `{"Name":"one","NodeResources":{"Devices":[{"Vendor":"nvidia","Type":"gpu","Instances":[{"ID":%q}]}]}}`, n.listed)
}

// allocationTime is when the allocation was placed.
var allocationTime = time.Date(2026, 11, 20, 3, 0, 0, 0, time.UTC)

func (n *nomadAPI) latest() (index int, holds map[string]string, changed <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.index, n.holds, n.changed
}

// allocations answers when the index is another one than that of the query, or when the time to wait is over.
func (n *nomadAPI) allocations(w http.ResponseWriter, r *http.Request) {
	wait, _ := time.ParseDuration(r.URL.Query().Get("wait")) // the first query has none
	for over := time.After(wait); ; {
		index, holds, changed := n.latest()
		if r.URL.Query().Get("index") != fmt.Sprint(index) || wait == 0 {
			w.Header().Set("X-Nomad-Index", fmt.Sprint(index))
			all := []json.RawMessage{}
			for _, id := range slices.Sorted(maps.Keys(holds)) {
				status := "running"
				if holds[id] == "" {
					status = "complete"
				}
				all = append(all, fmt.Appendf(nil, `{"ID":%q,"Namespace":"default","JobID":"train","ClientStatus":%q,"CreateTime":%d,`+
					`"AllocatedResources":{"Tasks":{"main":{"Devices":[{"Vendor":"nvidia","Type":"gpu","Name":"H100","DeviceIDs":[%q]}]}}}}`,
					id, status, allocationTime.UnixNano(), holds[id]))
			}
			_ = json.NewEncoder(w).Encode(all) // the agent may have gone
			return
		}
		select {
		case <-changed:
		case <-over:
			wait = 0
		case <-r.Context().Done():
			return
		}
	}
}

// withoutACL answers as servers without ACLs do.
func withoutACL(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, "ACL support disabled", http.StatusBadRequest)
}

func startNomadAPI(t *testing.T) (*nomadAPI, string) {
	t.Helper()
	n := &nomadAPI{index: 1, holds: map[string]string{}, changed: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("/v1/agent/self", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"stats":{"client":{"node_id":"f7476465"}}}`)
	})
	mux.HandleFunc("/v1/node/f7476465", n.node)
	mux.HandleFunc("/v1/node/f7476465/allocations", n.allocations)
	mux.HandleFunc("/v1/acl/", withoutACL)
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return n, server.URL
}

// planned is what migrate plan has of a GPU.
type planned struct {
	API, Target, Waits string
	Pending            bool
	Holders            []string
}

func (a *agent) plan(slot int) (p planned) {
	a.Helper()
	text, err := a.command("migrate", "plan", "--json", a.driver.UUID(slot))
	if err != nil {
		a.Fatalf("migrate plan: %v\n%s", err, text)
	}
	var all struct{ GPUs []planned }
	a.must(json.Unmarshal([]byte(text), &all))
	if len(all.GPUs) != 1 {
		a.Fatalf("migrate plan: %s", text)
	}
	return all.GPUs[0]
}

// takesWork reports whether a GPU is listed as healthy.
func (a *agent) takesWork(slot int) bool { return a.devices()[a.driver.UUID(slot)].Healthy }

// newBoth returns both agents on one machine.
func newBoth(t *testing.T, settings map[string]any) (n, k *agent) {
	t.Helper()
	n, k = newAgent(t, nomadGPU, "h100x8", settings), newAgent(t, k8sGPU, "h100x8", settings)
	for _, key := range []string{"driver_root", "sysfs_root", "procfs_root", "state_dir"} {
		k.settings[key] = n.settings[key]
	}
	k.driver, k.state = n.driver, n.state
	return n, k
}

// startBoth starts both agents on one machine, with the records of their orchestrators. All GPUs are Nomad's.
func startBoth(t *testing.T) (n, k *agent, nomad *nomadAPI, pods *kubelettest.PodResources) {
	t.Helper()
	n, k = newBoth(t, map[string]any{"overlap": "refuse"})
	nomad, n.settings["nomad_address"] = startNomadAPI(t)
	socket := filepath.Join(k.dir, "pods", "kubelet.sock")
	pods, err := kubelettest.ServePodResources(socket)
	k.must(err)
	t.Cleanup(pods.Close)
	k.settings["pod_resources_socket"] = socket
	n.start()
	n.healthy(8, 8)
	k.start()
	k.healthy(8, 0) // nomad-gpu recorded them before
	return n, k, nomad, pods
}

// On one machine with both agents a GPU goes from Nomad to the kubelet and back, while work has it and both agents are killed at each
// step. At no time both offer it, and what one has given out the other refuses.
func TestGPUMovesBetweenBothAgents(t *testing.T) {
	t.Parallel()
	const moved, other = 3, 0
	n, k, nomad, pods := startBoth(t)
	id := n.driver.UUID(moved)
	_, err := n.allocate(id)
	n.must(err)
	nomad.set(id)
	n.await("the allocation in the plan", func() bool { return len(n.plan(moved).Holders) == 1 })

	text, err := k.command("migrate", "apply", "--to", "device-plugin", "--settle", "2s", "--wait", "4s", id)
	if err == nil || !strings.Contains(text, "waits for the end of job default/train (allocation 5b1f3c58)") {
		t.Errorf("apply with a job on the GPU: %v\n%s", err, text)
	}
	if n.takesWork(moved) || k.takesWork(moved) || !n.takesWork(other) {
		t.Error("the GPU takes work while it moves, or another one does not")
	}
	if _, err := n.allocate(id); err == nil || !strings.Contains(err.Error(), "moves (to device-plugin: waits for the end of running work)") {
		t.Errorf("Reserve of a GPU that moves: %v", err)
	}
	for _, a := range []*agent{n, k} {
		a.kill()
		a.start()
	}
	n.healthy(8, 7)
	k.healthy(7, 0)
	if p := n.plan(moved); p.API != "nomad" || p.Target != "device-plugin" || !p.Pending || len(p.Holders) != 1 {
		t.Errorf("after the agents were killed: %+v", p)
	}

	nomad.set("")
	k.await("the GPU to come to the kubelet", func() bool { return k.takesWork(moved) })
	if n.takesWork(moved) {
		t.Error("both offer the GPU")
	}
	if _, err := n.allocate(id); err == nil {
		t.Error("Reserve of a GPU of the kubelet succeeded")
	}
	if _, err := k.allocate(id); err != nil {
		t.Errorf("Allocate: %v", err)
	}
	pods.Hold("default/pod", resource, id)
	for _, a := range []*agent{k, n} {
		a.kill()
		a.start()
	}
	k.await("the GPU after the agents were killed", func() bool { return k.takesWork(moved) })
	n.healthy(7, 7)

	text, err = n.command("migrate", "back", "--wait", "3s")
	if err == nil || !strings.Contains(text, "waits for the end of pod default/pod") {
		t.Errorf("back with a pod on the GPU: %v\n%s", err, text)
	}
	if k.takesWork(moved) || n.takesWork(moved) {
		t.Error("the GPU takes work while it moves back")
	}
	pods.Forget("default/pod")
	n.await("the GPU to come back", func() bool { return n.takesWork(moved) })
	if k.takesWork(moved) {
		t.Error("both offer the GPU")
	}
	if p := k.plan(moved); p.API != "nomad" || p.Pending {
		t.Errorf("at the end: %+v", p)
	}
	for args, want := range map[string]string{
		"migrate apply --to dra 3 17 GPU-x":   "GPU-x",
		"migrate apply --to drra 3":           `--to = "drra": want device-plugin, dra or nomad`,
		"migrate apply --to nomad":            "want GPUs or --all",
		"migrate plan --to nomad 3 5":         "nomad",
		"migrate plan --to dra 3":             "warning: k8s-gpu does not serve dra: restart it",
		"migrate undo":                        "want plan, apply or back",
		"migrate apply --settle 1ms --to dra": "want a duration of 1s or more",
	} {
		text, _ := k.command(strings.Fields(args)...)
		if !strings.Contains(text, want) {
			t.Errorf("%s:\n%s\nlacks %q", args, text, want)
		}
	}
	k.kill()
	text, err = n.command("migrate", "apply", "--to", "device-plugin", "3")
	if err == nil || !strings.Contains(text, "k8s-gpu does not run") {
		t.Errorf("apply to an agent that does not run: %v\n%s", err, text)
	}
	text, err = n.command("migrate", "back", "--force", "--settle", "5s")
	if err != nil || !strings.Contains(text, "target device-plugin") || !strings.Contains(text, "forced: ") || !strings.Contains(text, "warning: k8s-gpu does not run") {
		t.Errorf("back by force: %v\n%s", err, text)
	}
	f, err := ownership.Read(n.state)
	n.must(err)
	if e := f.GPUs[gpu.DeviceID(id)]; !e.Force || e.Settle != 5*time.Second {
		t.Errorf("back by force: %+v", e)
	}
}

// A target that the command has printed is not lost with the file, and one that is set when the file is lost is in force.
func TestTargetOutlivesItsFile(t *testing.T) {
	t.Parallel()
	n, k, _, _ := startBoth(t)
	file := filepath.Join(n.state, ownership.FileName)
	const again = 5
	text, err := k.command("migrate", "apply", "--to", "device-plugin", "--settle", "2s", fmt.Sprint(again))
	k.must(errors.Join(err, os.Remove(file)))
	if !strings.Contains(text, "target device-plugin") {
		t.Errorf("apply: %s", text)
	}
	k.await("a GPU whose target was set before the file was removed", func() bool { return k.takesWork(again) })
	k.must(os.Remove(file))
	text, err = k.command("migrate", "apply", "--to", "nomad", "--settle", "2s", fmt.Sprint(again))
	if k.must(err); !strings.Contains(text, "target nomad") {
		t.Errorf("apply: %s", text)
	}
	n.await("a GPU whose target was set after the file was removed", func() bool { return n.takesWork(again) })
	text, err = k.command("migrate", "back", "--settle", "2s", "--wait", "30s")
	if err != nil || !strings.Contains(text, "takes work through device-plugin") || n.takesWork(again) {
		t.Errorf("back: %v\n%s", err, text)
	}
}
