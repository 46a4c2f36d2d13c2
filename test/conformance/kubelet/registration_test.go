package kubelet

import (
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
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

func TestCase04NoDevices(t *testing.T) {
	n := newNode(t, "none")
	n.startKubelet()
	a := n.startAgent()
	n.await("the agent has looked", func() bool {
		return strings.Contains(n.read(a.log), "driver ready") || strings.Contains(n.read(a.log), "driver absent")
	})
	if c, _ := n.capacity(gpus); c != 0 || len(n.sockets()) != 0 {
		t.Errorf("capacity %d, sockets %v", c, n.sockets())
	}
	n.sim("add", "0", "name=NVIDIA T4")
	n.awaitCapacity(gpus, 1, 1)
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

func TestCase07KubeletRestart(t *testing.T) {
	n := newNode(t, "h100x8")
	n.startKubelet()
	a := n.startAgent()
	n.awaitCapacity(gpus, 8, 8)
	first := n.sockets()
	n.stopKubelet()
	n.startKubelet()
	n.awaitCapacity(gpus, 8, 8)
	if now := n.sockets(); len(now) != 1 || slices.Equal(now, first) {
		t.Errorf("sockets %v, then %v", first, now)
	}
	if c := strings.Count(n.read(a.log), "msg=registered"); c != 2 {
		t.Errorf("%d registrations for two kubelets", c)
	}
}

func TestCase08And11TwentyRestarts(t *testing.T) {
	n := newNode(t, "h100x8")
	n.startKubelet()
	n.startAgent()
	used := map[string]bool{}
	for i := range 20 {
		if i%4 != 3 { // every fourth comes at any time, also while Register is in flight
			n.awaitCapacity(gpus, 8, 8)
			for _, s := range n.sockets() {
				if used[s] {
					t.Errorf("restart %d: %s is used again", i, s)
				}
				used[s] = true
			}
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

func TestCase09NoFolderThenADeadSocket(t *testing.T) {
	n := newNode(t, "t4")
	a := n.startAgent() // no folder at all
	n.awaitLog(a, "no such file or directory")
	n.must(os.MkdirAll(pluginDir, 0o750))
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(pluginDir, "kubelet.sock"), Net: "unix"})
	n.must(err)
	l.SetUnlinkOnClose(false)
	n.must(l.Close())
	n.awaitLog(a, "connection refused")
	n.startKubelet()
	n.awaitCapacity(gpus, 1, 1)
}

// A rolling update with maxSurge, ended in good order and not.
func TestCase10TwoProcesses(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			n := newNode(t, "h100x8")
			n.startKubelet()
			old := n.startAgent()
			n.awaitCapacity(gpus, 8, 8)
			next := n.startAgent()
			n.awaitLog(next, "msg=registered")
			n.end(old, sig)
			n.await("the old socket is gone or dead", func() bool { return n.answering() == 1 })
			n.awaitCapacity(gpus, 8, 8) // constant
			n.sim("lose", "3")
			n.awaitCapacity(gpus, 8, 7) // the one that stays is heard
			n.must(n.allocate(n.pod("after", nil, 7)))
		})
	}
}

// answering counts the agents' sockets that somebody listens on.
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
	n := newNode(t, "h100x8")
	n.startKubelet()
	a := n.startAgent()
	n.awaitCapacity(gpus, 8, 8)
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

func TestCase13Killed(t *testing.T) {
	n := newNode(t, "h100x8")
	n.startKubelet()
	foreign, err := net.Listen("unix", filepath.Join(pluginDir, "nvidia-gpu.sock"))
	n.must(err)
	defer func() { _ = foreign.Close() }()
	a := n.startAgent()
	n.awaitCapacity(gpus, 8, 8)
	stale := n.sockets()
	n.end(a, syscall.SIGKILL)
	n.awaitCapacity(gpus, 8, 0)
	n.startAgent()
	n.awaitCapacity(gpus, 8, 8)
	if s := n.sockets(); len(s) != 1 || s[0] == stale[0] {
		t.Errorf("sockets %v, of the killed agent %v", s, stale)
	}
	if _, err := os.Stat(foreign.Addr().String()); err != nil {
		t.Error(err)
	}
}
