//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	await(t, "the end of every nomad-gpu", 30*time.Second, func() error { return onlyPlugin(0) })
}

// hasty makes nomad-gpu check and recover in seconds; testdata/parts/quick has the same for k8s-gpu.
const hasty = `
    health_period      = "1s"
    health_settle      = "2s"
    recovery_dwell     = "3s"`

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
