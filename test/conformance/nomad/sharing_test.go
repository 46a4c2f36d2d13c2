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

// divided is eight GPUs, of which two are for one job each, three shared by four, two by MPS, and one kept back.
const divided = `policy:
  rules:
  - {select: {index: 7}, use: reserved}
  - {select: {index: "2-4"}, use: time-slicing, replicas: 4}
  - {select: {index: [5, 6]}, use: mps, replicas: 2}
`

// Four jobs share a GPU and a fifth is blocked, until one of them ends.
func Test19FourJobsShareAGPU(t *testing.T) {
	m := install(t, "t4")
	a := startAgent(t, m, m.policy(t, "policy: {rules: [{select: {model: \"*\"}, use: time-slicing, replicas: 4}]}\n"))
	groups := a.devices(t, 4, 4)
	c := newCluster(t, node(groups))
	taken := map[string]bool{}
	for range 4 {
		got := c.place(t, ask("nvidia/gpu-shared", 1))
		if got == nil {
			t.Fatalf("blocked: %s", c.exhausted())
		}
		id := got[0].DeviceIDs[0]
		if taken[id] {
			t.Errorf("%s is given out twice", id)
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

// No request for a GPU of one's own is matched by a share, nor the other way round, however it is spelled.
func Test19NobodyGetsAShareUnasked(t *testing.T) {
	for name, policy := range map[string]string{
		"rules":                  "policy: {rules: [{select: {model: \"*\"}, use: time-slicing, replicas: 4}]}\n",
		"NVIDIA's, same name":    "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
		"NVIDIA's, another name": "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
		"a name of one's own":    "policy: {rules: [{select: {model: \"*\"}, use: time-slicing, replicas: 4, name: fast}]}\n",
	} {
		t.Run(name, func(t *testing.T) {
			m := install(t, "h100x8")
			n := node(startAgent(t, m, m.policy(t, policy)).devices(t, 32, 32))
			for _, g := range n.NodeResources.Devices {
				for _, request := range []string{"gpu", "nvidia/gpu", "nvidia/gpu/" + g.Name, "nvidia/gpu/NVIDIA H100 80GB HBM3", "gpu-mps", "nvidia/gpu-mps"} {
					if g.ID().Matches(ask(request, 1).ID()) || feasibleOn(t, n, ask(request, 1)) || newCluster(t, n).place(t, ask(request, 1)) != nil {
						t.Errorf("%q gets a share", request)
					}
				}
				for _, request := range []string{"gpu-shared", "nvidia/gpu-shared", "nvidia/gpu-shared/" + g.Name} {
					if newCluster(t, n).place(t, ask(request, 1)) == nil {
						t.Errorf("%q gets no share", request)
					}
				}
			}
		})
	}
}

// Of a machine that is used in several ways each request is matched by one, to the last unit.
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
	for kind, want := range map[string]int{"gpu": 2, "gpu-shared": 12, "gpu-mps": 4} {
		if n := len(group(t, groups, kind, "H100").Instances); n != want {
			t.Errorf("%s: %d, want %d", kind, n, want)
		}
	}
	c := newCluster(t, node(groups))
	for i := range 2 {
		if c.place(t, ask("nvidia/gpu", 1)) == nil {
			t.Errorf("job %d is blocked: %s", i, c.exhausted())
		}
	}
	if got := c.place(t, ask("nvidia/gpu", 1)); got != nil {
		t.Errorf("a third job for two GPUs gets %v", got[0])
	}
	for range 12 {
		if c.place(t, ask("nvidia/gpu-shared", 1)) == nil {
			t.Error(c.exhausted())
		}
	}
	if got := c.place(t, ask("nvidia/gpu-shared", 1)); got != nil {
		t.Errorf("a thirteenth job for twelve shares gets %v", got[0])
	}
	kept := m.uuid(t, 7)
	if slices.Contains(ids(groups), kept) {
		t.Errorf("%s is kept back, and offered", kept)
	}
}

// uuid is that of the GPU in a slot.
func (m machine) uuid(t testing.TB, slot int) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(string(m), "machine.conf"))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for line := range strings.Lines(string(text)) {
		if id, ok := strings.CutPrefix(line, "uuid = "); ok {
			all = append(all, strings.TrimSpace(id))
		}
	}
	return all[slot]
}

// Two shares are two shares, of one GPU or of two: a task that holds both sees each GPU once.
func Test19TwoShares(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, m.policy(t, "policy: {rules: [{select: {index: [0, 1]}, use: time-slicing, replicas: 3}]}\n"))
	groups := a.devices(t, 12, 12)
	for range 20 { // Nomad picks by chance
		got := newCluster(t, node(groups)).place(t, ask("nvidia/gpu-shared", 2))
		if got == nil || len(got[0].DeviceIDs) != 2 {
			t.Fatalf("got %v", got)
		}
		r, err := a.dm.Reserve(got[0])
		if err != nil {
			t.Fatal(err)
		}
		seen := strings.Split(r.Envs["NVIDIA_VISIBLE_DEVICES"], ",")
		if want := gpus(got[0].DeviceIDs); len(seen) != len(want) || !reflect.DeepEqual(gpus(seen), gpus(slices.Compact(slices.Sorted(slices.Values(seen))))) {
			t.Errorf("%v are seen as %v", got[0].DeviceIDs, seen)
		}
		backwards := slices.Clone(got[0].DeviceIDs)
		slices.Reverse(backwards)
		if again, err := a.reserve(group(t, groups, "gpu-shared", ""), backwards...); err != nil || !reflect.DeepEqual(r, again) {
			t.Errorf("the order matters: %v, %v", again, err)
		}
	}
}

// Where more than one share is refused, it is by the plugin: Nomad has no such rule, and shows its words.
func Test19TwoSharesAreRefused(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, m.policy(t, "policy: {rules: [{select: {index: [0, 1]}, use: time-slicing, replicas: 3, failRequestsGreaterThanOne: true}]}\n"))
	a.devices(t, 12, 12)
	got := newCluster(t, node(a.devices(t, 12, 12))).place(t, ask("nvidia/gpu-shared", 2))
	if got == nil {
		t.Fatal("not placed")
	}
	if _, err := a.dm.Reserve(got[0]); err == nil || !strings.Contains(err.Error(), "maximum request size for shared resources is 1") {
		t.Errorf("reserved: %v", err)
	}
}

// All shares of a GPU are as well as it is, and come and go in one fingerprint.
func Test10SharesFollowTheirGPU(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, m.policy(t, "policy: {rules: [{select: {index: [0, 1]}, use: time-slicing, replicas: 50}]}\n"))
	well := a.devices(t, 106, 106)
	before := len(a.Updates())
	m.ctl(t, "lose", "1")
	sick := a.devices(t, 106, 56)
	if n := len(a.Updates()) - before; n != 1 {
		t.Errorf("%d updates", n)
	}
	for _, d := range instances(sick) {
		if of := strings.HasPrefix(d.ID, m.uuid(t, 1)); d.Healthy == of {
			t.Errorf("%+v", d)
		}
	}
	if newCluster(t, node(sick)).place(t, ask("nvidia/gpu-shared", 51)) != nil {
		t.Error("shares of the lost GPU are given out")
	}
	m.ctl(t, "restore", "1")
	if back := a.devices(t, 106, 106); !reflect.DeepEqual(well, back) {
		t.Error("not as before")
	}
}

// daemon answers as the MPS control daemon of a pool does.
func daemon(t *testing.T, root, pool string) (end func()) {
	t.Helper()
	pipe := filepath.Join(root, "nvidia.com", pool, "pipe")
	if err := os.MkdirAll(pipe, 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unixpacket", filepath.Join(pipe, "control"))
	if err != nil {
		t.Fatal(err)
	}
	end = sync.OnceFunc(func() { _ = l.Close() })
	t.Cleanup(end)
	return end
}

// A pool whose MPS daemon does not answer takes no work, and says why; a task finds the daemon by its environment.
func Test10MPSDaemon(t *testing.T) {
	m := install(t, "h100x8")
	root := filepath.Join(string(m), "mps")
	keys := m.policy(t, "")
	keys["mps_root"] = root
	a := startAgent(t, m, keys)
	a.devices(t, 8, 8)
	m.policy(t, divided)
	if err := syscall.Kill(a.pid(), syscall.SIGHUP); err != nil { // a pool that nobody knew of before
		t.Fatal(err)
	}
	groups := a.devices(t, 18, 14)
	for _, d := range group(t, groups, "gpu-mps", "H100").Instances {
		if d.Healthy || !strings.Contains(d.HealthDescription, "MPS") || !strings.Contains(d.HealthDescription, "gpu.mps") {
			t.Errorf("%+v", d)
		}
	}
	if newCluster(t, node(groups)).place(t, ask("nvidia/gpu-mps", 1)) != nil {
		t.Error("placed without a daemon")
	}
	end := daemon(t, root, "gpu.mps")
	got := newCluster(t, node(a.devices(t, 18, 18))).place(t, ask("nvidia/gpu-mps", 1))
	if got == nil {
		t.Fatal("blocked")
	}
	r, err := a.dm.Reserve(got[0])
	if err != nil {
		t.Fatal(err)
	}
	gpu, _, _ := strings.Cut(got[0].DeviceIDs[0], "::")
	want := map[string]string{"NVIDIA_VISIBLE_DEVICES": gpu, "CUDA_MPS_PIPE_DIRECTORY": filepath.Join(root, "nvidia.com/gpu.mps/pipe")}
	if !reflect.DeepEqual(r.Envs, want) || len(r.Mounts) > 0 {
		t.Errorf("%+v, want %v", r, want)
	}
	if _, err := a.reserve(group(t, groups, "gpu-mps", "H100"), gpu+"::0", gpu+"::1"); err == nil || !strings.Contains(err.Error(), "maximum request size for shared resources is 1") {
		t.Errorf("two clients in one task: %v", err)
	}
	end()
	a.devices(t, 18, 14)
}
