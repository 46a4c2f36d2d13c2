package nomad

import (
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hashicorp/nomad/nomad/structs"
)

// divided is a policy of eight GPUs: two exclusive, three time-sliced by four, two with MPS, one reserved.
const divided = `policy:
  rules:
  - {select: {index: 7}, use: reserved}
  - {select: {index: "2-4"}, use: time-slicing, replicas: 4}
  - {select: {index: [5, 6]}, use: mps, replicas: 2}
`

// Four jobs share a GPU and a fifth is blocked, until one of them ends.
func Test19FourJobsShareAGPU(t *testing.T) {
	_, a, groups := underPolicy(t, "t4", "policy: {rules: [{select: {model: \"*\"}, use: time-slicing, replicas: 4}]}\n", 4)
	c := newCluster(t, node(groups))
	taken := map[string]bool{}
	for range 4 {
		got := c.place(t, ask("nvidia/gpu-shared", 1))
		if got == nil {
			t.Fatalf("blocked: %s", c.exhausted())
		}
		id := got[0].DeviceIDs[0]
		if taken[id] {
			t.Errorf("%s is allocated twice", id)
		}
		taken[id] = true
		r, err := a.reserve(groups[0], id)
		if gpu, _, _ := strings.Cut(id, "::"); err != nil || r.Envs["NVIDIA_VISIBLE_DEVICES"] != gpu || len(r.Mounts) > 0 {
			t.Errorf("%s: %+v, %v", id, r, err)
		}
	}
	if got := c.place(t, ask("nvidia/gpu-shared", 1)); got != nil || !strings.Contains(c.exhausted(), "devices: no devices match request") {
		t.Errorf("a fifth: %v, %q", got, c.exhausted())
	}
	for _, allocs := range c.ctx.Plan().NodeAllocation {
		allocs[2].ClientStatus = structs.AllocClientStatusComplete
	}
	if got := c.place(t, ask("nvidia/gpu-shared", 1)); got == nil {
		t.Errorf("none is free after one has ended: %s", c.exhausted())
	}
}

// No request for an exclusive GPU is matched by a share, and no request for a share by an exclusive GPU.
func Test19RequestsForAGPUGetNoShare(t *testing.T) {
	for name, policy := range map[string]string{
		"rules":                  "policy: {rules: [{select: {model: \"*\"}, use: time-slicing, replicas: 4}]}\n",
		"NVIDIA's, same name":    "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
		"NVIDIA's, another name": "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
		"a pool with a name":     "policy: {rules: [{select: {model: \"*\"}, use: time-slicing, replicas: 4, name: fast}]}\n",
	} {
		t.Run(name, func(t *testing.T) {
			_, _, groups := underPolicy(t, "h100x8", policy, 32)
			n := node(groups)
			for _, g := range groups {
				for _, request := range []string{"gpu", "nvidia/gpu", "nvidia/gpu/" + g.Name, "nvidia/gpu/NVIDIA H100 80GB HBM3", "gpu-mps", "nvidia/gpu-mps"} {
					if g.ID().Matches(ask(request, 1).ID()) || fits(t, n, ask(request, 1)) {
						t.Errorf("%q gets a share", request)
					}
				}
				for _, request := range []string{"gpu-shared", "nvidia/gpu-shared", "nvidia/gpu-shared/" + g.Name} {
					if !fits(t, n, ask(request, 1)) {
						t.Errorf("%q gets no share", request)
					}
				}
			}
		})
	}
}

// On a machine that is used in several ways each request is matched by one group, to the last unit.
func Test19ADividedMachine(t *testing.T) {
	m := install(t, "h100x8")
	groups := startAgent(t, m, m.policy(t, divided)).first(t, m)
	for _, g := range groups {
		for _, h := range groups {
			for _, request := range []string{g.Type, "nvidia/" + g.Type, "nvidia/" + g.Type + "/" + g.Name} {
				if got := h.ID().Matches(ask(request, 1).ID()); got != (g == h) {
					t.Errorf("%q matches %s: %t", request, h.ID(), got)
				}
			}
		}
	}
	c := newCluster(t, node(groups))
	for kind, want := range map[string]int{"gpu": 2, "gpu-shared": 12, "gpu-mps": 4} {
		if n := len(group(t, groups, kind, "H100").Instances); n != want {
			t.Errorf("%s: %d, want %d", kind, n, want)
		}
		if kind == "gpu-mps" {
			continue // without a daemon
		}
		for i := range want {
			if c.place(t, ask("nvidia/"+kind, 1)) == nil {
				t.Errorf("%s: job %d is blocked: %s", kind, i, c.exhausted())
			}
		}
		if got := c.place(t, ask("nvidia/"+kind, 1)); got != nil {
			t.Errorf("%s: one job more than units gets %v", kind, got[0])
		}
	}
	if reserved := m.uuid(t, 7); slices.Contains(ids(groups), reserved) {
		t.Errorf("%s is reserved, and offered", reserved)
	}
}

// Two shares may be of one GPU or of two: a task that has both sees each GPU once.
func Test19TwoShares(t *testing.T) {
	_, a, groups := underPolicy(t, "h100x8", "policy: {rules: [{select: {index: [0, 1]}, use: time-slicing, replicas: 3}]}\n", 12)
	for range 20 { // Nomad chooses at random
		got := newCluster(t, node(groups)).place(t, ask("nvidia/gpu-shared", 2))
		if got == nil || len(got[0].DeviceIDs) != 2 {
			t.Fatalf("got %v", got)
		}
		r, err := a.dm.Reserve(got[0])
		must(t, err)
		seen := strings.Split(r.Envs["NVIDIA_VISIBLE_DEVICES"], ",")
		if want := gpus(got[0].DeviceIDs); len(seen) != len(want) || len(gpus(seen)) != len(want) {
			t.Errorf("%v are seen as %v", got[0].DeviceIDs, seen)
		}
		backwards := slices.Clone(got[0].DeviceIDs)
		slices.Reverse(backwards)
		if again, err := a.reserve(group(t, groups, "gpu-shared", ""), backwards...); err != nil || !reflect.DeepEqual(r, again) {
			t.Errorf("the order matters: %v, %v", again, err)
		}
	}
}

// failRequestsGreaterThanOne is enforced by the plugin, because Nomad has no such rule; Nomad shows the plugin's error.
func Test19TwoSharesAreRefused(t *testing.T) {
	_, a, groups := underPolicy(t, "h100x8", "policy: {rules: [{select: {index: [0, 1]}, use: time-slicing, replicas: 3, failRequestsGreaterThanOne: true}]}\n", 12)
	got := newCluster(t, node(groups)).place(t, ask("nvidia/gpu-shared", 2))
	if got == nil {
		t.Fatal("not placed")
	}
	if _, err := a.dm.Reserve(got[0]); err == nil || !strings.Contains(err.Error(), "maximum request size for shared resources is 1") {
		t.Errorf("reserved: %v", err)
	}
}

// All shares of a GPU have its health, and change in one fingerprint.
func Test10SharesFollowTheirGPU(t *testing.T) {
	m, a, before := underPolicy(t, "h100x8", "policy: {rules: [{select: {index: [0, 1]}, use: time-slicing, replicas: 50}]}\n", 106)
	updates := len(a.Updates())
	m.ctl(t, "lose", "1")
	unhealthy := a.devices(t, 106, 56)
	if n := len(a.Updates()) - updates; n != 1 {
		t.Errorf("%d updates", n)
	}
	for _, d := range instances(unhealthy) {
		if of := strings.HasPrefix(d.ID, m.uuid(t, 1)); d.Healthy == of {
			t.Errorf("%+v", d)
		}
	}
	if fits(t, node(unhealthy), ask("nvidia/gpu-shared", 51)) {
		t.Error("shares of the lost GPU are allocated")
	}
	m.ctl(t, "restore", "1")
	if back := a.devices(t, 106, 106); !reflect.DeepEqual(before, back) {
		t.Error("not as before")
	}
}

// daemon answers as the MPS control daemon of a pool does.
func daemon(t *testing.T, root, pool string) (end func()) {
	t.Helper()
	pipe := filepath.Join(root, "nvidia.com", pool, "pipe")
	must(t, os.MkdirAll(pipe, 0o755))
	l, err := net.Listen("unixpacket", filepath.Join(pipe, "control"))
	must(t, err)
	end = sync.OnceFunc(func() { _ = l.Close() })
	t.Cleanup(end)
	return end
}

// A pool whose MPS daemon does not answer is unhealthy; a task finds the daemon by its environment.
func Test10MPSDaemon(t *testing.T) {
	m := install(t, "h100x8")
	root := filepath.Join(string(m), "mps")
	keys := m.policy(t, "")
	keys["mps_root"] = root
	a := startAgent(t, m, keys)
	a.devices(t, 8, 8)
	m.policy(t, divided)
	a.signal(t, syscall.SIGHUP) // the pool is new
	groups := a.devices(t, 18, 14)
	for _, d := range group(t, groups, "gpu-mps", "H100").Instances {
		if d.Healthy || !strings.Contains(d.HealthDescription, "MPS") || !strings.Contains(d.HealthDescription, "gpu.mps") {
			t.Errorf("%+v", d)
		}
	}
	if fits(t, node(groups), ask("nvidia/gpu-mps", 1)) {
		t.Error("placed without a daemon")
	}
	end := daemon(t, root, "gpu.mps")
	got := newCluster(t, node(a.devices(t, 18, 18))).place(t, ask("nvidia/gpu-mps", 1))
	if got == nil {
		t.Fatal("blocked")
	}
	r, err := a.dm.Reserve(got[0])
	must(t, err)
	gpu, _, _ := strings.Cut(got[0].DeviceIDs[0], "::")
	want := map[string]string{"NVIDIA_VISIBLE_DEVICES": gpu, "CUDA_MPS_PIPE_DIRECTORY": filepath.Join(root, "nvidia.com/gpu.mps/pipe")}
	delete(r.Envs, "TANDEM_GPU_NODES") // only where the machine has device nodes
	if !reflect.DeepEqual(r.Envs, want) || len(r.Mounts) > 0 {
		t.Errorf("%+v, want %v", r, want)
	}
	if _, err := a.reserve(group(t, groups, "gpu-mps", "H100"), gpu+"::0", gpu+"::1"); err == nil || !strings.Contains(err.Error(), "maximum request size for shared resources is 1") {
		t.Errorf("two clients in one task: %v", err)
	}
	end()
	a.devices(t, 18, 14)
}
