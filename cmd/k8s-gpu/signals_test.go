package main

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// stopLimit is generous: what stopping takes is logged, and two seconds are the aim.
const stopLimit = 6 * time.Second

// state is where an agent is when it is told to stop.
type state struct {
	machine string
	before  func(*testing.T, *simdriver.Machine, *kubelettest.Kubelet, string) // the start; also gets the state directory
	reached func(*testAgent, *simdriver.Machine, *kubelettest.Kubelet)
	nothing bool // is on disk in the end
}

var states = map[string]state{
	"watched": {machine: "t4", reached: func(a *testAgent, _ *simdriver.Machine, k *kubelettest.Kubelet) { a.awaitHealthy(k, 1) }},
	"no kubelet": {
		machine: "t4",
		before:  func(_ *testing.T, _ *simdriver.Machine, k *kubelettest.Kubelet, _ string) { k.Stop() },
		reached: func(a *testAgent, _ *simdriver.Machine, _ *kubelettest.Kubelet) { a.said("waiting for the kubelet") },
	},
	"registering": {
		machine: "t4",
		before: func(_ *testing.T, _ *simdriver.Machine, k *kubelettest.Kubelet, _ string) {
			k.Behave(kubelettest.Behaviour{Delay: time.Minute})
		},
		reached: func(a *testAgent, _ *simdriver.Machine, _ *kubelettest.Kubelet) { a.awaitStanding("registering") },
	},
	"registered and not watched": {
		machine: "t4",
		before: func(_ *testing.T, _ *simdriver.Machine, k *kubelettest.Kubelet, _ string) {
			k.Behave(kubelettest.Behaviour{NoStream: true})
		},
		reached: func(a *testAgent, _ *simdriver.Machine, _ *kubelettest.Kubelet) { a.said("msg=registered") },
	},
	"no driver": {
		machine: "t4",
		before: func(t *testing.T, m *simdriver.Machine, _ *kubelettest.Kubelet, _ string) {
			if err := m.Hide(); err != nil {
				t.Fatal(err)
			}
		},
		reached: func(a *testAgent, _ *simdriver.Machine, _ *kubelettest.Kubelet) { a.awaitStanding("no driver") },
	},
	"driver hangs in init": {
		machine: "t4",
		before: func(t *testing.T, m *simdriver.Machine, _ *kubelettest.Kubelet, _ string) {
			if err := m.Hang("all", "nvmlInit*"); err != nil {
				t.Fatal(err)
			}
		},
		reached: func(a *testAgent, _ *simdriver.Machine, _ *kubelettest.Kubelet) { a.awaitStanding("nvmlInit") },
	},
	"driver hangs in a call": {
		machine: "h100x8",
		reached: func(a *testAgent, m *simdriver.Machine, k *kubelettest.Kubelet) {
			a.awaitHealthy(k, 8)
			if err := m.Hang(simdriver.GPU(3), "*"); err != nil {
				a.Fatal(err)
			}
			a.awaitHealthy(k, 7)
		},
	},
	"driver hangs altogether": {
		machine: "t4",
		reached: func(a *testAgent, m *simdriver.Machine, k *kubelettest.Kubelet) {
			a.awaitHealthy(k, 1)
			if err := m.Hang("all", "*"); err != nil {
				a.Fatal(err)
			}
			a.awaitHealthy(k, 0)
		},
	},
	"state disk hangs": {
		machine: "t4", nothing: true,
		before: func(t *testing.T, _ *simdriver.Machine, _ *kubelettest.Kubelet, dir string) {
			// To open a FIFO waits for one who writes (fifo(7)).
			if err := syscall.Mkfifo(filepath.Join(dir, "k8s-gpu.json"), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		reached: func(a *testAgent, _ *simdriver.Machine, _ *kubelettest.Kubelet) { a.said("does the disk hang") },
	},
}

// In whatever state it is, the agent stops soon when it is told to, and leaves nothing behind but its history.
func TestSignalsEndItInEveryState(t *testing.T) {
	t.Parallel()
	sigs := []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT}
	turn := 0
	for name, s := range states {
		for _, sig := range sigs {
			if turn++; name != "watched" && turn%len(sigs) != 0 { // every signal in one state, some signal in every state
				continue
			}
			t.Run(name+"/"+sig.String(), func(t *testing.T) {
				t.Parallel()
				m, k, dir := simdriver.StartParallel(t, s.machine), startKubelet(t), shortDir(t)
				if s.before != nil {
					s.before(t, m, k, dir)
				}
				a := start(t, append(on(m.Root, k), "--state-dir="+dir, "--health-period=200ms", "--call-deadline=500ms")...)
				s.reached(a, m, k)
				a.endsWith(sig, k, dir, s.nothing)
			})
		}
	}
}

// endsWith tells the agent to stop and looks at what is left.
func (a *testAgent) endsWith(sig syscall.Signal, k *kubelettest.Kubelet, dir string, nothing bool) {
	a.Helper()
	lists, began := len(k.Lists(gpuResource)), time.Now()
	a.signal(sig)
	if code := a.ended(); code != 0 {
		a.Errorf("exit code %d: %v", code, a.cmd.ProcessState)
	}
	if took := time.Since(began); took > stopLimit {
		a.Errorf("stopping took %v", took)
	} else {
		a.Logf("stopping took %v", took.Round(time.Millisecond))
	}
	for _, pattern := range []string{filepath.Join(filepath.Dir(k.Socket()), "tandem-*"), filepath.Join(dir, "*.sock")} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			a.Errorf("sockets left: %v", left)
		}
	}
	if n := len(k.Lists(gpuResource)); n != lists {
		a.Errorf("%d farewell lists", n-lists)
	}
	if !nothing {
		if text, err := os.ReadFile(filepath.Join(dir, "k8s-gpu.json")); err != nil || !strings.Contains(string(text), `"Version"`) {
			a.Errorf("history: %v: %s", err, text)
		}
	}
	if a.times("not everything stopped within") > 0 {
		a.Error("the kernel had to end what ends by itself")
	}
}

// awaitStanding polls /readyz for a text, whatever the verdict.
func (a *testAgent) awaitStanding(want string) {
	a.Helper()
	a.await("/readyz with "+want, func() bool {
		_, text := a.get("/readyz")
		return strings.Contains(text, want)
	})
}

// What happened last is in the history, although it is written once a second only.
func TestTheLastFaultIsRemembered(t *testing.T) {
	t.Parallel()
	m, k, dir := simdriver.StartParallel(t, "h100x8"), startKubelet(t), shortDir(t)
	a := start(t, append(on(m.Root, k), "--state-dir="+dir)...)
	a.awaitHealthy(k, 8)
	for n, slot := range []int{1, 2, 3} {
		if err := m.XID(slot, 95); err != nil {
			t.Fatal(err)
		}
		a.metrics(`tandem_xid_errors_total{gpu="` + m.UUID(slot) + `",xid="95"} 1`)
		if n < 2 {
			continue
		}
		a.endsWith(syscall.SIGTERM, k, dir, false)
	}
	text, err := os.ReadFile(filepath.Join(dir, "k8s-gpu.json"))
	var kept struct {
		Record struct{ Conditions []struct{ Code int } }
	}
	if err := errors.Join(err, json.Unmarshal(text, &kept)); err != nil || len(kept.Record.Conditions) != 3 {
		t.Errorf("%v\n%s", err, text)
	}
}

// A hung call keeps the agent for a moment when it stops. Who can't wait says so again.
func TestSecondSignalKills(t *testing.T) {
	m, k := simdriver.Start(t, "t4"), startKubelet(t)
	a := start(t, append(on(m.Root, k), "--health-period=200ms")...)
	a.awaitHealthy(k, 1)
	if err := m.Hang(simdriver.GPU(0), "*"); err != nil {
		t.Fatal(err)
	}
	calls := func() string { _, page := a.get("/metrics"); return page }
	before := ""
	a.await("a hung check", func() bool { // no check ends any more
		now := line(calls(), "tandem_health_check_duration_seconds_count")
		same := now == before
		before = now
		return same && now != ""
	})
	a.signal(syscall.SIGTERM)
	a.said("stopping")
	a.await("the end", func() bool {
		_ = a.cmd.Process.Signal(syscall.SIGTERM) // the first ones may still count as one
		select {
		case <-a.exited:
			return true
		default:
			return false
		}
	})
	status, ok := a.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !ok || !status.Signaled() || status.Signal() != syscall.SIGTERM {
		t.Errorf("ended with %v, want killed by SIGTERM", a.cmd.ProcessState)
	}
}

func line(page, name string) string {
	for l := range strings.Lines(page) {
		if strings.HasPrefix(l, name) {
			return l
		}
	}
	return ""
}

// Signals with another meaning end nothing, in no state: not at the start, not in the end.
func TestOtherSignalsEndNothing(t *testing.T) {
	t.Parallel()
	others := []syscall.Signal{syscall.SIGUSR1, syscall.SIGHUP, syscall.SIGUSR2, syscall.SIGHUP}
	t.Run("watched", func(t *testing.T) {
		m, k := simdriver.StartParallel(t, "t4"), startKubelet(t)
		a := start(t, on(m.Root, k)...)
		a.awaitHealthy(k, 1)
		a.signal(syscall.SIGUSR1)
		a.awaitHealthy(k, 0)
		a.signal(syscall.SIGUSR2)
		a.awaitHealthy(k, 1)
		for _, s := range others {
			a.signal(s)
		}
		a.said("nothing changed")
		a.awaitHealthy(k, 1)
		if code, text := a.get("/healthz"); code != http.StatusOK {
			t.Errorf("/healthz: %d %s", code, text)
		}
	})
	for _, name := range []string{"state disk hangs", "driver hangs in init"} {
		t.Run(name, func(t *testing.T) {
			m, k, dir := simdriver.StartParallel(t, "t4"), startKubelet(t), shortDir(t)
			states[name].before(t, m, k, dir)
			a := start(t, append(on(m.Root, k), "--state-dir="+dir, "--call-deadline=500ms")...)
			states[name].reached(a, m, k)
			a.signal(syscall.SIGHUP)
			a.said("nothing changed")
			a.signal(syscall.SIGTERM)
			a.said("stopping")
			for _, s := range others {
				_ = a.cmd.Process.Signal(s) // it may have ended by now
			}
			if code := a.ended(); code != 0 {
				t.Errorf("ended with %v", a.cmd.ProcessState)
			}
		})
	}
}
