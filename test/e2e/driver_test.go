//go:build e2e

package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// TestDriverLife has a driver come, go, be reloaded and be upgraded under both orchestrators. Nobody restarts an agent.
func TestDriverLife(t *testing.T) {
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
	step(t, "the module is reloaded at once", func(t *testing.T) {
		plugin, agent := s.opened(t)
		since := s.do(t, m.Unload, m.Load)
		await(t, "both agents to open the driver again", 60*time.Second, func() error {
			if p, a := s.opened(t); p <= plugin || a <= agent {
				return fmt.Errorf("they opened it %d and %d times, %d and %d of them before", p, a, plugin, agent)
			}
			return nil
		})
		s.expect(t, since, "^8 of 8$", "^8 of 8$", "^8 healthy$")
		t.Logf("meanwhile Nomad's node said %q, kubelet %q", s.nomadNode.since(since), s.kubelet.since(since))
		s.nothingChanged(t)
	})
	step(t, "another version of the library is installed, as by a package manager", func(t *testing.T) {
		since := s.do(t, func() error { return m.ReplaceLibrary("580.95.05") })
		s.awaitChecks(t, m)
		s.expect(t, since, "^8 of 8$", "^8 of 8$", "^8 healthy$")
		if said := s.nomadNode.since(since); len(said) != 1 {
			t.Errorf("the Nomad node said %q; sessions go on with the library that they have", said)
		}
		s.nothingChanged(t)
	})
	step(t, "the module of that version is loaded", func(t *testing.T) { s.upgrade(t, m, "580.95.05") })
	step(t, "the module is unloaded again", func(t *testing.T) { s.unload(t, m) })
	step(t, "the module is loaded again", func(t *testing.T) { s.load(t, m) })
	step(t, "new work gets a GPU", s.newWork)
	s.nomad.checkContent(t)
	checkDriver(t, m)
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
