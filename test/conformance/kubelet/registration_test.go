package kubelet

import (
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
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
	if want := slices.Sorted(slices.Values(n.uuids())); !slices.Equal(ids, want) {
		t.Errorf("%v, want %v", ids, want)
	}
}

func TestCase04ResourceRunsEmpty(t *testing.T) {
	n := newNode(t, "a100-mig")
	n.startKubelet()
	a := n.startAgent("--mig-strategy=mixed")
	const seventh = "nvidia.com/mig-1g.10gb.me"
	n.awaitCapacity(seventh, 1, 1)
	n.sim("mig", "5", "empty")
	n.awaitCapacity(seventh, 0, 0)
	select {
	case <-a.exited:
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
			now := strings.Count(n.read(a.log), "msg=registered")
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

// A rolling update with maxSurge: either process ends, by itself or killed, and the other one is used.
func TestCase10TwoProcesses(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		for _, name := range []string{"old", "next"} {
			t.Run(name+" "+sig.String(), func(t *testing.T) {
				n, old := newReady(t)
				next := n.startAgent()
				n.awaitLog(next, "msg=registered")
				n.end(map[string]*agent{"old": old, "next": next}[name], sig)
				n.await("the socket is gone or dead", func() bool { return n.answering() == 1 })
				n.awaitCapacity(gpus, 8, 8) // constant
				n.sim("lose", "3")
				n.awaitCapacity(gpus, 8, 7) // by a list of the other one
				n.must(n.allocate(n.pod("after", nil, 7)))
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
	n.must(a.cmd.Process.Signal(syscall.SIGTERM))
	n.awaitCapacity(gpus, 8, 0) // 8 and not 0: no empty list was sent before
	if took := time.Since(began); took > time.Second {
		t.Errorf("stream closed after %v", took)
	}
	if code := n.end(a, syscall.Signal(0)); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if s := n.sockets(); len(s) != 0 {
		t.Errorf("sockets left: %v", s)
	}
}
