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

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// TestQuiesce has an operator replace the module under both orchestrators while work runs, as a reset of a GPU or
// another driver needs it: nobody may hold the driver.
func TestQuiesce(t *testing.T) {
	m := install(t, "h100x8")
	s := startScene(t, m)
	s.expect(t, s.began, "^8 of 8$", "^8 of 8$", "^8 healthy$")
	s.learn(t)
	s.work(t)
	step(t, "both agents hold the driver", func(t *testing.T) {
		inUse, ok := errors.AsType[*simdriver.InUseError](m.TryUnload())
		if !ok || !slices.Equal(inUse.PIDs, s.processes()) {
			t.Errorf("unloading: %v; want it refused because of %v", inUse, s.processes())
		}
	})
	step(t, "both are told to leave it alone", func(t *testing.T) {
		s.quiesced(t, m, s.do(t, s.order(t, "quiesce")))
		s.nothingChanged(t)
	})
	step(t, "the module is unloaded, and loaded again", func(t *testing.T) {
		s.do(t, m.TryUnload, m.Load)
	})
	killed := time.Now()
	step(t, "both are killed, and leave it alone still", func(t *testing.T) {
		s.nomad.killPlugin(t)
		s.kube.killPluginWith(t, 0)
		s.learn(t)
		s.nothingChanged(t)
	})
	step(t, "new work waits", func(t *testing.T) {
		s.nomad.submit(t, "gpus.nomad.hcl", "name=waiter", "count=7")
		s.nomad.awaitBlocked(t, "waiter")
		s.kube.submit(t, "waiter", 1)
		s.kube.awaitUnschedulable(t, "waiter")
		s.quiesced(t, m, killed)
		if calls, err := m.CallsOf(s.plugin); err != nil || len(calls) > 0 { // k8s-gpu can't write where calls are counted
			t.Errorf("nomad-gpu called the driver: %v, error %v", calls, err)
		}
		for _, v := range []*view{s.nomadNode, s.kubeNode, s.kubelet} {
			for _, said := range v.since(killed) {
				if !strings.HasPrefix(said, "0 ") {
					t.Errorf("meanwhile %s said %q", v.name, said)
				}
			}
		}
	})
	step(t, "both are told to go on, and what waited is placed", func(t *testing.T) {
		s.resumed(t, m, s.do(t, s.order(t, "resume")))
		s.nomad.awaitComplete(t, "waiter", 7)
		s.kube.awaitRunning(t, "waiter")
		s.nothingChanged(t)
	})
	step(t, "the same by signals", func(t *testing.T) {
		s.quiesced(t, m, s.do(t, s.signal(control.QuiesceSignal)))
		s.resumed(t, m, s.do(t, s.signal(control.ResumeSignal)))
		s.nothingChanged(t)
	})
	s.nomad.checkContent(t)
	checkDriver(t, m)
}

// order gives an order to both agents as an operator does, who hears when it is obeyed.
func (s *scene) order(t *testing.T, verb string) func() error {
	return func() error {
		agent := s.kube.plugin(t).Metadata.Name
		for _, argv := range [][]string{
			{binary("nomad-gpu"), verb, "--state-dir=" + stateDir() + "/nomad-history"},
			{"kubectl", "exec", "--namespace=kube-system", agent, "--", "k8s-gpu", verb},
		} {
			began := time.Now()
			said, err := command(argv...)
			if err != nil {
				return err
			}
			t.Logf("%s after %v: %s", strings.Join(argv, " "), time.Since(began).Round(time.Millisecond), said)
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

// quiesced expects that nobody holds the driver and everybody is told so. Nomad's node follows within a second where
// the agent is a -dev one and 5 to 10 s where not, the Kubernetes node with the next node status: 2 s here, 10 s by
// default. kubelet itself gives out no GPU from the moment that it is told.
func (s *scene) quiesced(t *testing.T, m *simdriver.Machine, since time.Time) {
	t.Helper()
	await(t, "nobody to hold the driver", 30*time.Second, func() error {
		pids, err := m.Holders()
		if err == nil && len(pids) > 0 {
			err = fmt.Errorf("%v do", pids)
		}
		return err
	})
	t.Logf("nobody holds the driver after %v", time.Since(since).Round(time.Millisecond))
	s.expect(t, since, "^0 of 8, .*maintenance", "^0 of 8$", "^0 healthy$")
}

func (s *scene) resumed(t *testing.T, m *simdriver.Machine, since time.Time) {
	t.Helper()
	s.expect(t, since, "^8 of 8$", "^8 of 8$", "^8 healthy$")
	if pids, err := m.Holders(); err != nil || !slices.Equal(pids, s.processes()) {
		t.Errorf("%v hold the driver, error %v; want %v", pids, err, s.processes())
	}
}
