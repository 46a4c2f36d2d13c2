//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// binary is the path of a program that "make build" made.
func binary(name string) string { return filepath.Join(os.Getenv("E2E_BIN"), name) }

func install(t *testing.T, machine string) *simdriver.Machine {
	t.Helper()
	return installIn(t, stateDir(), machine)
}

// installIn lays out the machine of the node with this state folder.
func installIn(t *testing.T, dir, machine string) *simdriver.Machine {
	t.Helper()
	m, err := simdriver.Install(t.Context(), filepath.Join(dir, "machine"), machine)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// step is a subtest that the following ones depend on.
func step(t *testing.T, name string, run func(*testing.T)) {
	t.Helper()
	if !t.Run(name, run) {
		t.FailNow()
	}
}

// TestBothOrchestrators has both orchestrators allocate the GPUs of one machine. That both offer all eight is
// intended: it shows each by itself, and that they agree.
func TestBothOrchestrators(t *testing.T) {
	m := install(t, "h100x8")
	s := startScene(t, m)
	nomad, kube := s.nomad, s.kube
	var offered []gpuUse

	step(t, "both offer eight GPUs", func(t *testing.T) {
		offered = nomad.awaitGPUs(t, 8, 8)
		for _, g := range offered {
			t.Logf("%s at %s", g.ID, g.Locality.PciBusID)
			if _, err := os.Stat(filepath.Join(m.Root, "sys/bus/pci/devices", g.Locality.PciBusID)); err != nil {
				t.Error(err)
			}
		}
		kube.awaitGPUs(t, 8, 8)
	})
	step(t, "a Nomad job gets two GPUs of 40 GiB or more", func(t *testing.T) {
		ids, _ := nomad.runJob(t, "pair", "complete")
		checkIDs(t, offered, ids, 2)
	})
	step(t, "an isolated Nomad job gets their device nodes", func(t *testing.T) {
		ids, output := nomad.runJob(t, "isolated", "complete", "driver=exec", "then=cd /dev && echo nvidia*")
		checkIDs(t, offered, ids, 2)
		nodes := strings.Fields(output)
		for _, g := range offered {
			name := fmt.Sprintf("nvidia%d", slotOf(t, m, g.ID)) // on this machine slots are minor numbers
			if slices.Contains(nodes, name) != slices.Contains(ids, g.ID) {
				t.Errorf("Nomad gave %q, the task sees %q", ids, nodes)
			}
		}
		if !slices.Contains(nodes, "nvidiactl") {
			t.Errorf("the task sees %q, no nvidiactl", nodes)
		}
	})
	step(t, "a Nomad job that wants 400 GiB stays blocked", func(t *testing.T) {
		nomad.submit(t, "gpus.nomad.hcl", "name=greedy", "least_memory=400 GiB")
		nomad.awaitBlocked(t, "greedy")
	})
	step(t, "a pod gets two GPUs", func(t *testing.T) {
		s.pod = kube.runPod(t, "first", 2)
		checkIDs(t, offered, s.pod.ids(), 2)
	})
	step(t, "Nomad's plugin is killed under a running job", func(t *testing.T) {
		s.job = hold(t, nomad)
		nomad.killPlugin(t)
		if again := nomad.awaitGPUs(t, 8, 8); !slices.Equal(again, offered) {
			t.Errorf("the node offered %+v, now %+v", offered, again)
		}
		ids, _ := nomad.runJob(t, "successor", "complete")
		checkIDs(t, offered, ids, 2)
		if slices.Contains(ids, s.job.ids[0]) {
			t.Errorf("job holder has %q, job successor got %q", s.job.ids, ids)
		}
		s.job.check(t)
	})
	for _, c := range []struct {
		what string
		do   func(*testing.T)
	}{
		{"plugin-killed", func(t *testing.T) { kube.killPlugin(t, 8) }},
		{"kubelet-sigterm", func(t *testing.T) { kube.restartKubelet(t, syscall.SIGTERM) }},
		{"kubelet-sigkill", func(t *testing.T) { kube.restartKubelet(t, syscall.SIGKILL) }},
	} {
		step(t, "a pod stays and another one gets its GPU, "+c.what, func(t *testing.T) {
			c.do(t)
			next := kube.runPod(t, "after-"+c.what, 1)
			checkIDs(t, offered, next.ids(), 1)
			if slices.Contains(s.pod.ids(), next.ids()[0]) {
				t.Errorf("pod first has %q, the next pod got %q", s.pod.ids(), next.ids())
			}
			kube.awaitUnchanged(t, "first", s.pod)
		})
	}
	step(t, "a GPU is lost", func(t *testing.T) {
		lost := s.pod.ids()[0]
		if err := m.Lose(slotOf(t, m, lost)); err != nil {
			t.Fatal(err)
		}
		for _, g := range nomad.awaitGPUs(t, 8, 7) {
			if !g.Healthy {
				t.Logf("Nomad's description of %s: %s", g.ID, g.HealthDescription)
				if g.ID != lost || !strings.Contains(g.HealthDescription, "lost") {
					t.Errorf("lost %s, Nomad has %+v", lost, g)
				}
			}
		}
		kube.awaitGPUs(t, 8, 7)
		kube.awaitHealth(t, "first", lost, "Unhealthy")
	})
	step(t, "the GPU is back", func(t *testing.T) {
		if err := m.Restore(slotOf(t, m, s.pod.ids()[0])); err != nil {
			t.Fatal(err)
		}
		nomad.awaitGPUs(t, 8, 8)
		kube.awaitGPUs(t, 8, 8)
		kube.awaitHealth(t, "first", s.pod.ids()[0], "Healthy")
		s.job.check(t)
		kube.awaitUnchanged(t, "first", s.pod)
	})
	step(t, "a GPU answers every call with an error", func(t *testing.T) {
		bad := s.pod.ids()[1]
		if err := m.Fail(simdriver.GPU(slotOf(t, m, bad)), "*", "UNKNOWN", simdriver.Always); err != nil {
			t.Fatal(err)
		}
		for _, g := range nomad.awaitGPUs(t, 8, 7) {
			if g.Healthy == (g.ID == bad) {
				t.Errorf("%s answers with errors, Nomad has %+v", bad, g)
			}
		}
		kube.awaitGPUs(t, 8, 7)
		kube.awaitHealth(t, "first", bad, "Unhealthy")
		if err := m.Heal(); err != nil {
			t.Fatal(err)
		}
		nomad.awaitGPUs(t, 8, 8)
		kube.awaitGPUs(t, 8, 8)
	})
	s.breakAndReset(t, m)
	checkDriver(t, m)
}

// slotOf returns the slot of the machine that holds the GPU.
func slotOf(t *testing.T, m *simdriver.Machine, id string) int {
	t.Helper()
	slots, err := m.Slots()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(slots, func(slot int) bool { return m.UUID(slot) == id })
	if i < 0 {
		t.Fatalf("the machine has no %s", id)
	}
	return slots[i]
}

// checkIDs fails unless ids are count different ones of the offered.
func checkIDs(t *testing.T, offered []gpuUse, ids []string, count int) {
	t.Helper()
	if got := len(slices.Compact(slices.Clone(ids))); got != count { // ids are sorted
		t.Errorf("got %q, want %d devices", ids, count)
	}
	for _, id := range ids {
		if !slices.ContainsFunc(offered, func(g gpuUse) bool { return g.ID == id }) {
			t.Errorf("%s is none of the machine's GPUs", id)
		}
	}
}

// TestMisconfiguration starts a Nomad agent with an invalid policy: it ends with the plugin's error, and no plugin remains.
func TestMisconfiguration(t *testing.T) {
	policy := write(t, "bad.yaml", []byte("version: v1\npolicy:\n  rules:\n    - {select: {index: 0}, use: time-sharing}\n"))
	agent := launchNomad(t, "nomad", `policy_file = "`+policy+`"`)
	agent.process.awaitEnd(t)
	message := policy + `:4: policy.rules[0].use = "time-sharing": want`
	line, found := lineWith(readLog(t, "nomad"), message)
	t.Log(line)
	if state := agent.process.cmd.ProcessState; state.Success() || !found {
		t.Errorf("the agent ended with %v; want a failure and %q in its log", state, message)
	}
	await(t, "the end of every nomad-gpu", 5*time.Second, func() error { return onlyPlugin(0) })
}

// hasty makes nomad-gpu check and recover in seconds; testdata/parts/quick has the same for k8s-gpu.
const hasty = `
    health_period      = "1s"
    health_settle      = "2s"
    recovery_dwell     = "3s"`

// breakAndReset has a GPU report an uncontained error while a pod holds it, and resets it in the end.
func (s *scene) breakAndReset(t *testing.T, m *simdriver.Machine) {
	nomad, kube, first := s.nomad, s.kube, s.pod
	bad := first.ids()[0]
	if slices.Contains(s.job.ids, bad) { // then the job that waits would not be short of it
		bad = first.ids()[1]
	}
	slot := slotOf(t, m, bad)

	step(t, "a GPU reports XID 95 and the recovery action reset", func(t *testing.T) {
		if err := errors.Join(m.Set(slot, "recovery_action", "1"), m.XID(slot, 95)); err != nil {
			t.Fatal(err)
		}
		checkReason(t, nomad.awaitGPUs(t, 8, 7), bad, "XID 95")
		kube.awaitGPUs(t, 8, 7)
		kube.awaitHealth(t, "first", bad, "Unhealthy")
		nomad.awaitShown(t, "XID 95")
		s.job.check(t)
		kube.awaitUnchanged(t, "first", first)
	})
	step(t, "both agents are killed, and the history remains", func(t *testing.T) {
		nomad.killPlugin(t)
		checkReason(t, nomad.awaitGPUs(t, 8, 7), bad, "XID 95")
		kube.killPlugin(t, 7)
		kube.awaitHealth(t, "first", bad, "Unhealthy")
	})
	step(t, "new work avoids it, more work waits", func(t *testing.T) {
		ids, _ := nomad.runJob(t, "avoids", "complete")
		next := kube.runPod(t, "avoids", 2)
		if slices.Contains(append(ids, next.ids()...), bad) {
			t.Errorf("%s was given to the job %q or the pod %q", bad, ids, next.ids())
		}
		nomad.submit(t, "gpus.nomad.hcl", "name=waiter", "count=7")
		nomad.awaitBlocked(t, "waiter")
		kube.request(t, "waiter", gpuResource, 1)
		kube.awaitInsufficient(t, "waiter", gpuResource)
	})
	step(t, "the GPU is reset, and what waited is placed", func(t *testing.T) {
		if err := m.Reset(slot); err != nil {
			t.Fatal(err)
		}
		nomad.awaitGPUs(t, 8, 8)
		kube.awaitGPUs(t, 8, 8)
		kube.awaitHealth(t, "first", bad, "Healthy")
		nomad.awaitComplete(t, "waiter", 7)
		kube.awaitRunning(t, "waiter")
		s.job.check(t)
		kube.awaitUnchanged(t, "first", first)
	})
}

// checkReason fails unless just the one device is unhealthy, for the reason.
func checkReason(t *testing.T, gpus []gpuUse, bad, reason string) {
	t.Helper()
	for _, g := range gpus {
		if !g.Healthy {
			t.Logf("Nomad's description of %s: %s", g.ID, g.HealthDescription)
		}
		if g.Healthy == (g.ID == bad) || g.ID == bad && !strings.Contains(g.HealthDescription, reason) {
			t.Errorf("%s has %s, Nomad has %+v", bad, reason, g)
		}
	}
}

// awaitShown waits until "nomad node status" shows a text in its device statistics: it has no column for
// device health.
func (a *agent) awaitShown(t *testing.T, text string) {
	t.Helper()
	var line string
	await(t, "nomad node status to show "+text, 60*time.Second, func() error {
		out, err := command("nomad", "node", "status", "-address="+nomadAPI, "-self", "-verbose", "-stats")
		if err != nil {
			return err
		}
		found := false
		if line, found = lineWith(out, text); !found {
			return errors.New("it shows no such line")
		}
		return nil
	})
	t.Logf("nomad node status -self -verbose -stats shows: %s", line)
}
