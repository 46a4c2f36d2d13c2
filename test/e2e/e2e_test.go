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
	m, err := simdriver.Install(t.Context(), filepath.Join(stateDir(), "machine"), machine)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// step is a subtest without which the following make no sense.
func step(t *testing.T, name string, run func(*testing.T)) {
	t.Helper()
	if !t.Run(name, run) {
		t.FailNow()
	}
}

// TestBothOrchestrators has both orchestrators give out the GPUs of one machine. That both offer all eight is
// meant: what is shown is each by itself, and that they agree.
func TestBothOrchestrators(t *testing.T) {
	m := install(t, "h100x8")
	nomad := launchNomad(t, "nomad", onMachine(m))
	kube := startCluster(t, pluginImage(t))
	kube.deployPlugin(t, m.Root)
	var offered []gpuUse
	var held []string // by Nomad's job "holder"
	var first pod

	step(t, "both offer eight GPUs", func(t *testing.T) {
		nomad.awaitReady(t)
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
		ids, said := nomad.runJob(t, "isolated", "complete", "driver=exec", "then=cd /dev && echo nvidia*")
		checkIDs(t, offered, ids, 2)
		nodes := strings.Fields(said)
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
		first = kube.runPod(t, "first", 2)
		checkIDs(t, offered, first.ids(), 2)
	})
	step(t, "Nomad's plugin is killed under a running job", func(t *testing.T) {
		held, _ = nomad.runJob(t, "holder", "running", "count=1", "then=exec sleep 1000000")
		nomad.killPlugin(t)
		if again := nomad.awaitGPUs(t, 8, 8); !slices.Equal(again, offered) {
			t.Errorf("the node offered %+v, now %+v", offered, again)
		}
		ids, _ := nomad.runJob(t, "successor", "complete")
		checkIDs(t, offered, ids, 2)
		if slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(held, id) }) {
			t.Errorf("job holder has %q, job successor got %q", held, ids)
		}
		nomad.checkRunning(t, "holder", held)
	})
	for _, c := range []struct {
		what string
		do   func(*testing.T)
	}{
		{"plugin-killed", kube.killPlugin},
		{"kubelet-sigterm", func(t *testing.T) { kube.restartKubelet(t, syscall.SIGTERM) }},
		{"kubelet-sigkill", func(t *testing.T) { kube.restartKubelet(t, syscall.SIGKILL) }},
	} {
		step(t, "a pod stays and another one gets its GPU, "+c.what, func(t *testing.T) {
			c.do(t)
			next := kube.runPod(t, "after-"+c.what, 1)
			checkIDs(t, offered, next.ids(), 1)
			if slices.Contains(first.ids(), next.ids()[0]) {
				t.Errorf("pod first has %q, the next pod got %q", first.ids(), next.ids())
			}
			kube.awaitUnchanged(t, "first", first)
		})
	}
	step(t, "a GPU is lost", func(t *testing.T) {
		lost := first.ids()[0]
		if err := m.Lose(slotOf(t, m, lost)); err != nil {
			t.Fatal(err)
		}
		for _, g := range nomad.awaitGPUs(t, 8, 7) {
			if !g.Healthy {
				t.Logf("Nomad says of %s: %s", g.ID, g.HealthDescription)
				if g.ID != lost || !strings.Contains(g.HealthDescription, "lost") {
					t.Errorf("lost %s, Nomad says %+v", lost, g)
				}
			}
		}
		kube.awaitGPUs(t, 8, 7)
		kube.awaitHealth(t, "first", lost, "Unhealthy")
	})
	step(t, "the GPU is back", func(t *testing.T) {
		if err := m.Restore(slotOf(t, m, first.ids()[0])); err != nil {
			t.Fatal(err)
		}
		nomad.awaitGPUs(t, 8, 8)
		kube.awaitGPUs(t, 8, 8)
		kube.awaitHealth(t, "first", first.ids()[0], "Healthy")
		nomad.checkRunning(t, "holder", held)
		kube.awaitUnchanged(t, "first", first)
	})
	step(t, "a GPU answers every call with an error", func(t *testing.T) {
		bad := first.ids()[1]
		if err := m.Fail(simdriver.GPU(slotOf(t, m, bad)), "*", "UNKNOWN", simdriver.Always); err != nil {
			t.Fatal(err)
		}
		for _, g := range nomad.awaitGPUs(t, 8, 7) {
			if g.Healthy == (g.ID == bad) {
				t.Errorf("%s answers with errors, Nomad says %+v", bad, g)
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
	breakAndReset(t, m, nomad, kube, first, held)
	checkDriver(t, m)
}

// slotOf gives the slot of the machine that holds the GPU.
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

// TestMachineWithoutDriver starts both agents where there is no driver: neither is in anybody's way.
func TestMachineWithoutDriver(t *testing.T) {
	root := filepath.Join(stateDir(), "bare")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Run("nomad-gpu", func(t *testing.T) {
		began := time.Now()
		nomad := launchNomad(t, "nomad-bare", `driver_root = "`+root+`"
    state_dir   = "`+stateDir()+`/bare-history"`)
		nomad.awaitReady(t)
		took := time.Since(began)
		n, err := nomad.node()
		if err != nil || len(n.NodeResources.Devices) > 0 {
			t.Errorf("node %+v, error %v; want a node without devices", n, err)
		}
		if nomad.plugin() == 0 {
			t.Error("the plugin does not run")
		}
		first := nomad.firstFingerprint(t)
		t.Logf("agent ready after %v, first fingerprint after %v", took.Round(time.Millisecond), first)
		if took >= 5*time.Second || first >= time.Second {
			t.Error("want less than 5 s and 1 s")
		}
		for line := range strings.Lines(readLog(t, "nomad-bare")) {
			if strings.Contains(line, "[ERROR]") && strings.Contains(line, "device_mgr") {
				t.Error(line)
			}
		}
	})
	t.Run("k8s-gpu", func(t *testing.T) {
		const address = "127.0.0.1:9466"
		agent := start(t, "k8s-gpu-bare", nil, binary("k8s-gpu"), "--driver-root="+root, "--http-address="+address,
			"--state-dir="+stateDir()+"/bare-history")
		var ready string
		await(t, "an answer of /readyz", 10*time.Second, func() (err error) {
			ready, err = fetch("http://" + address + "/readyz")
			return errors.Join(err, agent.alive())
		})
		t.Logf("/readyz says: %s", ready)
		if !strings.Contains(ready, "no driver") {
			t.Error(`want "no driver"`)
		}
	})
}

// TestMisconfiguration gives each agent what its operator got wrong: it ends, and says what.
func TestMisconfiguration(t *testing.T) {
	policy := write(t, "bad.yaml", []byte("version: v1\npolicy:\n  rules:\n    - {select: {index: 0}, use: time-sharing}\n"))
	badUse := policy + `:4: policy.rules[0].use = "time-sharing": want`
	for _, c := range []struct{ name, config, message string }{
		{"nomad-key", `fingerprint_perod = "1m"`, `"fingerprint_perod". Did you mean "fingerprint_period"?`},
		{"nomad-duration", `fingerprint_period = "soon"`, `fingerprint_period = "soon": want a positive duration`},
		{"nomad-policy", `policy_file = "` + policy + `"`, badUse},
	} {
		t.Run(c.name, func(t *testing.T) {
			agent := launchNomad(t, c.name, c.config)
			agent.process.awaitEnd(t)
			said, found := lineWith(readLog(t, c.name), c.message)
			t.Log(said)
			if state := agent.process.cmd.ProcessState; state.Success() || !found {
				t.Errorf("the agent ended with %v; want a failure and %q in its log", state, c.message)
			}
			await(t, "the end of every nomad-gpu", 5*time.Second, func() error {
				if left := running("nomad-gpu"); len(left) > 0 {
					return fmt.Errorf("processes %v", left)
				}
				return nil
			})
		})
	}
	for _, c := range []struct{ name, argument, message string }{
		{"k8s-flag", "--driver-rot=/", "driver-rot"},
		{"k8s-duration", "--rescan=soon", "soon"},
		{"k8s-file", "--config-file=/missing.yaml", "/missing.yaml"},
		{"k8s-policy", "--config-file=" + policy, badUse},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := command(binary("k8s-gpu"), c.argument)
			t.Log(err)
			if err == nil || out != "" || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), c.message) {
				t.Errorf("output %q, error %q; want one line on stderr with %q", out, err, c.message)
			}
		})
	}
}
