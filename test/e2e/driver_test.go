//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// TestBothOrchestrators has both give out the GPUs of one machine, whose driver comes, goes, is reloaded and is upgraded under work of both. No
// agent is restarted from outside. Then an operator replaces the module, as a reset of a GPU or another driver needs it: no process may have the
// driver open.
func TestBothOrchestrators(t *testing.T) {
	m := install(t, "h100x8")
	if err := m.Hide(); err != nil {
		t.Fatal(err)
	}
	s := startScene(t, m)
	step(t, "there is no library", func(t *testing.T) {
		s.expect(t, s.began, "^0 of 0$", "^of$", "^0 healthy$")
		s.learn(t)
	})
	step(t, "the library is installed", func(t *testing.T) {
		since := s.do(t, m.Unhide)
		s.expect(t, since, "^8 of 8$", "^8 of 8$", "^8 healthy$")
		s.sameProcesses(t)
	})
	step(t, "a job and a pod get a GPU", s.work)
	step(t, "the module is unloaded", func(t *testing.T) { s.unload(t, m) })
	step(t, "the module is loaded", func(t *testing.T) { s.load(t, m) })
	step(t, "the module is reloaded at once", func(t *testing.T) { s.reload(t, m) })
	step(t, "another version of the library is installed, as by a package manager", func(t *testing.T) { s.replaceLibrary(t, m, "580.95.05") })
	step(t, "the module of that version is loaded", func(t *testing.T) { s.upgrade(t, m, "580.95.05") })
	s.maintain(t, m)
	step(t, "a GPU has an XID, both agents are killed, and the history remains", func(t *testing.T) { s.remembered(t, m) })
	step(t, "new work gets a GPU", s.newWork)
	s.nomad.checkContent(t)
	checkDriver(t, m)
}

// maintain has an operator quiesce and resume both agents.
func (s *scene) maintain(t *testing.T, m *simdriver.Machine) {
	step(t, "both agents hold the driver", func(t *testing.T) {
		inUse, ok := errors.AsType[*simdriver.InUseError](m.TryUnload())
		if !ok || !slices.Equal(inUse.PIDs, s.processes()) {
			t.Errorf("unloading: %v; want it refused because of %v", inUse, s.processes())
		}
	})
	step(t, "both are quiesced", func(t *testing.T) {
		s.quiesced(t, m, s.do(t, s.order(t, "nomad-history", "quiesce")))
		s.nothingChanged(t)
	})
	step(t, "the module is unloaded, and loaded again", func(t *testing.T) {
		s.do(t, m.TryUnload, m.Load)
	})
	killed := time.Now()
	step(t, "both are killed, and stay in maintenance", func(t *testing.T) {
		s.nomad.killPlugin(t)
		s.kube.killPlugin(t, 0)
		s.learn(t)
		s.nothingChanged(t)
	})
	step(t, "new work waits", func(t *testing.T) { s.waits(t, m, killed) })
	step(t, "both are resumed, and what waited is placed", func(t *testing.T) {
		s.resumed(t, m, s.do(t, s.order(t, "nomad-history", "resume")))
		s.nomad.awaitComplete(t, "waiter", 7)
		s.kube.awaitRunning(t, "waiter")
		s.nothingChanged(t)
	})
	step(t, "the same by signals", func(t *testing.T) {
		s.quiesced(t, m, s.do(t, s.signal(control.QuiesceSignal)))
		s.resumed(t, m, s.do(t, s.signal(control.ResumeSignal)))
		s.nothingChanged(t)
	})
}

// waits has work arrive while both agents are in maintenance. They have not called the driver and offered no GPU since they were killed.
func (s *scene) waits(t *testing.T, m *simdriver.Machine, killed time.Time) {
	s.nomad.submit(t, "gpus.nomad.hcl", "name=waiter", "count=7")
	s.nomad.awaitBlocked(t, "waiter")
	s.kube.request(t, "waiter", gpuResource, 1)
	s.kube.awaitInsufficient(t, "waiter", gpuResource)
	s.quiesced(t, m, killed)
	if calls, err := m.CallsOf(s.plugin); err != nil || len(calls) > 0 { // k8s-gpu can't write where calls are counted
		t.Errorf("nomad-gpu called the driver: %v, error %v", calls, err)
	}
	for _, v := range []*view{s.nomadNode, s.kubeNode, s.kubelet} {
		for _, output := range v.since(killed) {
			if !strings.HasPrefix(output, "0 ") {
				t.Errorf("meanwhile %s showed %q", v.name, output)
			}
		}
	}
}

// reload unloads and loads the module before an agent can see that it is away.
func (s *scene) reload(t *testing.T, m *simdriver.Machine) {
	plugin, agent := s.opened(t)
	since := s.do(t, m.Unload, m.Load)
	await(t, "both agents to open the driver again", 60*time.Second, func() error {
		if p, a := s.opened(t); p <= plugin || a <= agent {
			return fmt.Errorf("they opened it %d and %d times, %d and %d of them before", p, a, plugin, agent)
		}
		return nil
	})
	s.expect(t, since, "^8 of 8$", "^8 of 8$", "^8 healthy$")
	t.Logf("meanwhile Nomad's node showed %q, kubelet %q", s.nomadNode.since(since), s.kubelet.since(since))
	s.nothingChanged(t)
}

// replaceLibrary expects sessions to go on with the library that they have.
func (s *scene) replaceLibrary(t *testing.T, m *simdriver.Machine, version string) {
	plugin, agent := s.opened(t)
	since := s.do(t, func() error { return m.ReplaceLibrary(version) })
	s.awaitChecks(t, m)
	s.expect(t, since, "^8 of 8$", "^8 of 8$", "^8 healthy$")
	// The Nomad node may still show what was before: Nomad's client passes changes on once a second.
	if p, a := s.opened(t); p != plugin || a != agent {
		t.Errorf("they opened the driver %d and %d times, %d and %d of them before", p, a, plugin, agent)
	}
	s.nothingChanged(t)
}

func (s *scene) unload(t *testing.T, m *simdriver.Machine) {
	since := s.do(t, m.Unload)
	s.expect(t, since, "^0 of 8, .*driver", "^0 of 8$", "^0 healthy$")
	s.nothingChanged(t)
}

func (s *scene) load(t *testing.T, m *simdriver.Machine) {
	since := s.do(t, m.Load)
	s.expect(t, since, "^8 of 8$", "^8 of 8$", "^8 healthy$")
	s.nothingChanged(t)
}

// upgrade expects new processes of both agents: a process can't have the library of another version.
func (s *scene) upgrade(t *testing.T, m *simdriver.Machine, version string) {
	since := s.do(t, func() error { return m.SetModule(version) })
	await(t, "other processes of both agents", 90*time.Second, func() error { return s.otherProcesses() })
	t.Logf("both agents are new processes after %v", time.Since(since).Round(time.Millisecond))
	s.learn(t)
	s.expect(t, since, "^8 of 8$", "^8 of 8$", "^8 healthy$")
	s.nothingChanged(t)
}

// work starts a job and a pod that stay.
func (s *scene) work(t *testing.T) {
	s.job = hold(t, s.nomad)
	s.pod = s.kube.runPod(t, "held", 1)
}

// newWork starts another job and another pod.
func (s *scene) newWork(t *testing.T) {
	ids, _ := s.nomad.runJob(t, "next", "complete")
	next := s.kube.runPod(t, "next", 1)
	if slices.Contains(ids, s.job.ids[0]) || slices.Contains(next.ids(), s.pod.ids()[0]) {
		t.Errorf("jobs holder and next have %q and %q, pods held and next %q and %q", s.job.ids, ids, s.pod.ids(), next.ids())
	}
}

// remembered expects new agents to have the fault that those before saw, until the GPU is reset.
func (s *scene) remembered(t *testing.T, m *simdriver.Machine) {
	bad := s.pod.ids()[0]
	slot := slotOf(t, m, bad)
	s.do(t, func() error { return m.XID(slot, 95) }, func() error { return m.Set(slot, "recovery_action", "1") }) // in this order: a check between the two would find a fault without its XID
	checkReason(t, s.nomad.awaitGPUs(t, 8, 7), bad, "XID 95")
	s.kube.awaitGPUs(t, 8, 7)
	s.nomad.killPlugin(t)
	checkReason(t, s.nomad.awaitGPUs(t, 8, 7), bad, "XID 95")
	s.kube.killPlugin(t, 7)
	s.kube.awaitHealth(t, "held", bad, "Unhealthy")
	s.do(t, func() error { return m.Reset(slot) })
	s.nomad.awaitGPUs(t, 8, 8)
	s.kube.awaitGPUs(t, 8, 8)
	s.kube.awaitHealth(t, "held", bad, "Healthy")
	s.job.check(t)
	s.kube.awaitUnchanged(t, "held", s.pod)
}

// order runs a command of both agents as an operator does; it returns when the command is done. history is the state directory of nomad-gpu.
func (s *scene) order(t *testing.T, history, verb string) func() error {
	return func() error {
		agent := s.kube.plugin(t).Metadata.Name
		for _, argv := range [][]string{
			{binary("nomad-gpu"), verb, "--state-dir=" + stateDir() + "/" + history},
			{"kubectl", "exec", "--namespace=kube-system", agent, "--", "k8s-gpu", verb},
		} {
			began := time.Now()
			output, err := command(argv...)
			if err != nil {
				return err
			}
			t.Logf("%s after %v: %s", strings.Join(argv, " "), time.Since(began).Round(time.Millisecond), output)
		}
		return nil
	}
}

func (s *scene) signal(signal syscall.Signal) func() error {
	return func() error {
		for _, pid := range s.processes() {
			if err := syscall.Kill(pid, signal); err != nil {
				return err
			}
		}
		return nil
	}
}

// quiesced expects that no process has the driver open and that both orchestrators show it. Nomad's node follows within a second where
// the agent is a -dev one and 5 to 10 s where not, the Kubernetes node with the next node status: 2 s here, 10 s by
// default. kubelet itself gives out no GPU from the moment that it is told.
func (s *scene) quiesced(t *testing.T, m *simdriver.Machine, since time.Time) {
	t.Helper()
	await(t, "no process to hold the driver", 30*time.Second, func() error {
		pids, err := m.Holders()
		if err == nil && len(pids) > 0 {
			err = fmt.Errorf("%v do", pids)
		}
		return err
	})
	t.Logf("no process holds the driver after %v", time.Since(since).Round(time.Millisecond))
	s.expect(t, since, "^0 of 8, .*maintenance", "^0 of 8$", "^0 healthy$")
}

func (s *scene) resumed(t *testing.T, m *simdriver.Machine, since time.Time) {
	t.Helper()
	s.expect(t, since, "^8 of 8$", "^8 of 8$", "^8 healthy$")
	if pids, err := m.Holders(); err != nil || !slices.Equal(pids, s.processes()) {
		t.Errorf("%v hold the driver, error %v; want %v", pids, err, s.processes())
	}
}
