package kubelet

import (
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/test/conformance/sandbox"
)

func TestCase03FirstListWithinASecond(t *testing.T) {
	n := newNode(t, "h100x8")
	n.startKubelet()
	began := time.Now()
	n.startAgent()
	n.awaitCapacity(gpus, 8, 8)
	if took := time.Since(began); took > time.Second {
		t.Errorf("first list %v after the start of the process", took)
	}
	var ids []string
	for id, d := range n.manager.GetAllocatableDevices(n.logger)[gpus] {
		ids = append(ids, id)
		if len(d.GetTopology().GetNodes()) != 1 {
			t.Errorf("%s: topology %v", id, d.GetTopology())
		}
	}
	slices.Sort(ids)
	if want := slices.Sorted(slices.Values(n.UUIDs())); !slices.Equal(ids, want) {
		t.Errorf("%v, want %v", ids, want)
	}
}

func TestCase04ResourceRunsEmpty(t *testing.T) {
	n := newNode(t, "a100-mig")
	n.startKubelet()
	a := n.startAgent("--mig-strategy=mixed")
	const seventh = "nvidia.com/mig-1g.10gb.me"
	n.awaitCapacity(seventh, 1, 1)
	n.Sim("mig", "5", "empty")
	n.awaitCapacity(seventh, 0, 0)
	select {
	case <-a.Exited:
		t.Error("the agent ended")
	default:
	}
}

func TestCase07And08And11TwentyRestarts(t *testing.T) {
	n, a := newReady(t)
	used := map[string]bool{}
	registered := 1
	for i := range 20 {
		if i%4 != 3 { // every fourth restart comes at any time, also during Register
			n.awaitCapacity(gpus, 8, 8)
			for _, s := range n.sockets() {
				if used[s] {
					t.Errorf("restart %d: %s is used again", i, s)
				}
				used[s] = true
			}
			registrations := func() int { return strings.Count(n.Read(a.Log), "msg=registered") }
			n.Await("a registration", func() bool { return n.registered(a) }) // the kubelet may have the list before it has answered Register
			now := registrations()
			if i%4 != 0 && now != registered+1 {
				t.Errorf("restart %d: %d registrations with one kubelet", i, now-registered)
			}
			registered = now
		} else {
			pause := time.NewTimer(rand.N(50 * time.Millisecond)) // the chance is what is tested
			<-pause.C
		}
		n.stopKubelet()
		n.startKubelet()
	}
	n.awaitCapacity(gpus, 8, 8)
	if s := n.sockets(); len(s) != 1 {
		t.Errorf("sockets %v", s)
	}
}

// registered reports whether an agent has logged the registration of a socket that is there now: those before it are logged, too.
func (n *node) registered(a *agent) bool {
	sockets := n.sockets()
	for line := range strings.Lines(n.Read(a.Log)) {
		if strings.Contains(line, "msg=registered") && slices.ContainsFunc(sockets, func(s string) bool { return strings.Contains(line, "socket="+filepath.Base(s)) }) {
			return true
		}
	}
	return false
}

// A rolling update with maxSurge: either process ends, by itself or killed, and the other one is used.
func TestCase10TwoProcesses(t *testing.T) {
	skipIfOneProcess(t)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		for _, name := range []string{"old", "next"} {
			t.Run(name+" "+sig.String(), func(t *testing.T) {
				n, old := newReady(t)
				next := n.startAgent()
				n.AwaitLog(next, "msg=registered")
				n.End(map[string]*agent{"old": old, "next": next}[name], sig)
				n.Await("the socket is gone or dead", func() bool { return n.answering() == 1 })
				n.awaitCapacity(gpus, 8, 8) // constant
				n.Sim("lose", "3")
				n.awaitCapacity(gpus, 8, 7) // by a list of the other one
				n.Must(n.allocate(n.pod("after", nil, 7)))
			})
		}
	}
}

// answering counts the agents' sockets that accept connections.
func (n *node) answering() int {
	count := 0
	for _, path := range n.sockets() {
		if c, err := net.Dial("unix", path); err == nil {
			_ = c.Close()
			count++
		}
	}
	return count
}

func TestCase12Terminate(t *testing.T) {
	n, a := newReady(t)
	began := time.Now()
	n.Must(a.Cmd.Process.Signal(syscall.SIGTERM))
	n.awaitCapacity(gpus, 8, 0) // 8 and not 0: no empty list was sent before
	if took := time.Since(began); took > time.Second {
		t.Errorf("stream closed after %v", took)
	}
	if code := n.End(a, syscall.Signal(0)); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if s := n.sockets(); len(s) != 0 {
		t.Errorf("sockets left: %v", s)
	}
}

// A pod holds all GPUs when one has a fault and another one is unplugged: the pod keeps their IDs.
func TestCase05And06FaultsUnderAPod(t *testing.T) {
	n, _ := newReady(t)
	p := n.pod("holder", nil, 8)
	n.Must(n.allocate(p))
	before := n.held(p, "app0")
	n.Sim("xid", "2", "79")
	n.awaitCapacity(gpus, 8, 7)
	select {
	case u := <-n.manager.Updates():
		if !slices.Equal(u.PodUIDs, []string{"holder"}) {
			t.Errorf("update of pods %v", u.PodUIDs)
		}
	case <-time.After(sandbox.Plenty):
		t.Error("no update of the pod")
	}
	status := v1.PodStatus{ContainerStatuses: []v1.ContainerStatus{{Name: "app0"}}}
	n.manager.UpdateAllocatedResourcesStatus(n.logger, p, &status)
	for _, r := range status.ContainerStatuses[0].AllocatedResourcesStatus[0].Resources {
		want := v1.ResourceHealthStatusHealthy
		if string(r.ResourceID) == n.UUIDs()[2] {
			want = v1.ResourceHealthStatusUnhealthy
		}
		if r.Health != want {
			t.Errorf("pod status: %s is %s", r.ResourceID, r.Health)
		}
	}
	n.Sim("remove", "3")
	n.awaitCapacity(gpus, 8, 6) // the ID stays
	if after := n.held(p, "app0"); n.manager.GetAllocatableDevices(n.logger) == nil || !slices.Equal(before, after) {
		t.Errorf("IDs changed from %v to %v", before, after)
	}
	// kubelet 1.37 dereferences nil for an ID that is not listed when its pod is admitted again.
	n.manager.GetTopologyHints(n.logger, p, &p.Spec.Containers[0], add)
}

func TestCase14And15Allocate(t *testing.T) {
	n, _ := newReady(t, "--pass-device-specs")
	one, rest := n.pod("one", nil, 1), n.pod("rest", nil, 3, 4)
	n.Must(n.allocate(one))
	n.Must(n.allocate(rest))
	seen := map[string]bool{}
	for _, c := range []struct {
		pod *v1.Pod
		i   int
	}{{one, 0}, {rest, 0}, {rest, 1}} {
		visible := strings.Split(n.visible(c.pod, c.i), ",")
		if held := n.held(c.pod, c.pod.Spec.Containers[c.i].Name); !slices.Equal(slices.Sorted(slices.Values(visible)), held) {
			t.Errorf("visible %v, held %v", visible, held)
		}
		for _, id := range visible {
			if seen[id] {
				t.Errorf("%s is allocated twice", id)
			}
			seen[id] = true
		}
		o := n.options(c.pod, c.i)
		if len(o.Devices) < len(visible)+2 { // the GPUs and the control nodes
			t.Errorf("%d GPUs, devices %v", len(visible), o.Devices)
		}
		for _, d := range o.Devices {
			if !filepath.IsAbs(d.PathInContainer) || d.PathOnHost != n.Root+d.PathInContainer || d.Permissions != "rw" {
				t.Errorf("%+v", d)
			}
		}
		for _, e := range o.Envs {
			if strings.ContainsAny(e.Name+e.Value, "\n\x00") {
				t.Errorf("%q = %q", e.Name, e.Value)
			}
		}
	}
	if len(seen) != 8 {
		t.Errorf("%d GPUs are allocated", len(seen))
	}
	if err := n.allocate(n.pod("late", nil, 1)); err == nil {
		t.Error("a ninth GPU")
	}
}

// With a preference the kubelet's choice is never random: the same on every fresh node.
func TestCase16Preferred(t *testing.T) {
	n, _ := newReady(t)
	ids := n.UUIDs()
	for size := 1; size <= 8; size++ {
		var first []string
		for range 3 {
			p := n.pod("prefer", nil, size)
			n.Must(n.allocate(p))
			got := n.held(p, "app0")
			if first == nil {
				first = got
			}
			if len(got) != size || !slices.Equal(got, first) {
				t.Errorf("size %d: %v, before %v", size, got, first)
			}
			n.remove(p)
			n.manager.UpdateAllocatedDevices(n.logger)
		}
		if size == 4 && !slices.Equal(first, slices.Sorted(slices.Values(ids[:4]))) {
			t.Errorf("4 of 8: %v, want those of NUMA node 0: %v", first, ids[:4])
		}
	}
}

func TestCase17Topology(t *testing.T) {
	n := newNode(t, "h100x8")
	n.startKubelet("single-numa-node")
	n.startAgent()
	n.awaitCapacity(gpus, 8, 8)
	admit := func(p *v1.Pod) (bool, string) {
		n.mu.Lock()
		n.pods = append(n.pods, p)
		n.mu.Unlock()
		r := admitPod(n.Context(), n.admit, p, add)
		return r.Admit, r.Reason
	}
	if ok, reason := admit(n.pod("five", nil, 5)); ok || reason != "TopologyAffinityError" {
		t.Errorf("five GPUs of one NUMA node: %v %s", ok, reason)
	}
	ids := n.UUIDs()
	for _, name := range []string{"one", "other"} {
		p := n.pod(name, nil, 4)
		if ok, reason := admit(p); !ok {
			t.Fatalf("four GPUs: %s", reason)
		}
		got := n.held(p, "app0")
		if !slices.Equal(got, slices.Sorted(slices.Values(ids[:4]))) && !slices.Equal(got, slices.Sorted(slices.Values(ids[4:]))) {
			t.Errorf("%v is across NUMA nodes", got)
		}
	}
}

func TestCase18InitContainersShare(t *testing.T) {
	n, _ := newReady(t)
	p := n.pod("init", []int{8}, 6, 2)
	n.Must(n.allocate(p))
	if got := len(n.held(p, "app0")) + len(n.held(p, "app1")); got != 8 {
		t.Errorf("%d GPUs for the app containers", got)
	}
	n.remove(p) // without a call of the plugin
	n.Must(n.allocate(n.pod("next", nil, 8)))
}

// A killed agent is a closed stream. The kubelet's checkpoint outlives both.
func TestCase13And19And20Checkpoint(t *testing.T) {
	n, a := newReady(t)
	p := n.pod("survivor", nil, 3)
	n.Must(n.allocate(p))
	held, visible := n.held(p, "app0"), n.visible(p, 0)

	n.End(a, syscall.SIGKILL)
	n.awaitCapacity(gpus, 8, 0)
	if got := n.visible(p, 0); got != visible {
		t.Errorf("plugin down: %s, want %s", got, visible)
	}
	n.stopKubelet()
	n.startAgent()
	n.startKubelet() // a new manager on the same checkpoint
	n.awaitCapacity(gpus, 8, 8)
	n.Must(n.manager.Allocate(n.Context(), p, &p.Spec.Containers[0], add))
	if got := n.held(p, "app0"); !slices.Equal(got, held) || n.visible(p, 0) != visible {
		t.Errorf("after both restarted: %v %s, want %v %s", got, n.visible(p, 0), held, visible)
	}
}
