package live

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// divided is a policy file of both agents: each GPU is offered by one of them, by index.
func divided(nomad, kubernetes string) string {
	return fmt.Sprintf(`version: v1
policy:
  rules:
    - {select: {index: %q}, for: nomad}
    - {select: {index: %q}, for: kubernetes}
`, nomad, kubernetes)
}

const undivided = "version: v1\n" // both agents offer every GPU

// reload gives both agents another policy.
func (a *agents) reload(policy string) {
	a.t.Helper()
	must(a.t, os.WriteFile(a.policyFile, []byte(policy), 0o600))
	a.signal(syscall.SIGHUP)
}

// logged counts a text in the logs of both agents.
func (a *agents) logged(text string) int {
	a.t.Helper()
	log, err := os.ReadFile(a.log)
	must(a.t, err)
	return strings.Count(string(log), text)
}

// offered are the slots of the GPUs that an agent offers, sorted, and the number of those that the other one offers too, by
// its own report.
func (a *agents) offered(name string, uuids []string) (slots []int, overlaps int) {
	text, err := a.command(name, "inspect", "--json")
	if err != nil {
		return nil, -1 // it is being started
	}
	var r report.Report
	must(a.t, json.Unmarshal([]byte(text), &r))
	if r.Source != report.FromAgent {
		return nil, -1
	}
	for _, d := range r.Devices {
		if d.Schedulable {
			slots = append(slots, slices.Index(uuids, string(d.ID)))
		}
	}
	slices.Sort(slots)
	return slots, len(r.Overlaps)
}

// awaitOffered waits until the agents offer the GPUs in these slots, with that many overlaps.
func (a *agents) awaitOffered(what string, uuids []string, nomad, kubernetes []int, overlaps int) {
	a.t.Helper()
	for name, want := range map[string][]int{nomadGPU: nomad, k8sGPU: kubernetes} {
		a.eventually(fmt.Sprintf("%s: %s offers %v, %d overlaps", what, name, want, overlaps), func() bool {
			slots, n := a.offered(name, uuids)
			return slices.Equal(slots, want) && n == overlaps
		})
	}
	// Nomad gets at most one fingerprint a second; a process that is killed before that sends it to no client.
	a.eventually(fmt.Sprintf("%s: Nomad's client has %v as healthy", what, nomad), func() bool {
		var slots []int
		for id, healthy := range a.nomad.last().health() {
			if healthy {
				slots = append(slots, slices.Index(uuids, id))
			}
		}
		slices.Sort(slots)
		return slices.Equal(slots, nomad)
	})
}

// kill kills both agents, and waits until they are started again.
func (a *agents) kill() {
	a.t.Helper()
	before := a.processCounts()
	a.signal(syscall.SIGKILL)
	a.awaitRestart(before)
}

var first, second, every = []int{0, 1, 2, 3}, []int{4, 5, 6, 7}, []int{0, 1, 2, 3, 4, 5, 6, 7}

// A policy divides the GPUs of a host. Without it both agents log what they both offer. If a GPU is removed, so that
// indices change, each agent still offers its own, also after restarts, until an operator binds the indices again.
func TestDividedHost(t *testing.T) {
	t.Parallel()
	a := startAgents(t, options{machine: "h100x8", policy: divided("0-3", "4-7")})
	const warning = "device is also offered by another agent"
	all := a.units()
	a.awaitOffered("divided", all, first, second, 0)
	if n := a.logged(warning); n != 0 {
		t.Errorf("%d warnings without an overlap", n)
	}
	a.reload(undivided)
	a.awaitOffered("undivided", all, every, every, 8)
	a.eventually("a warning for each GPU in both logs", func() bool { return a.logged(warning) == 16 })
	a.reload(divided("0-3", "4-7"))
	a.awaitOffered("divided again", all, first, second, 0)

	must(t, a.Remove(0))
	a.awaitOffered("GPU 0 is removed", all, []int{1, 2, 3}, second, 0)
	a.eventually("both log that the rules mean the same GPUs", func() bool {
		return a.logged("device order changed, the policy still selects the same devices") >= 4
	})
	a.kill()
	a.awaitOffered("killed", all, []int{1, 2, 3}, second, 0)
	a.signal(syscall.SIGSTOP) // no history is written any more
	must(t, os.Remove(filepath.Join(a.stateDir, k8sGPU+".json")))
	a.kill()
	a.awaitOffered("killed, one without its history", all, []int{1, 2, 3}, second, 0)
	out, err := a.command(nomadGPU, "rebind")
	must(t, err)
	if !strings.Contains(out, "index 0, 1, 2, 3 is bound to") || !strings.Contains(out, ", previously to ") {
		t.Errorf("rebind: %q", out)
	}
	a.awaitOffered("after rebind", all, []int{1, 2, 3, 4}, []int{5, 6, 7}, 0)
}

// With overlap=refuse each GPU is offered once: by the agent that had it first, also after restarts, until the policy gives it
// to the other.
func TestOverlapIsRefused(t *testing.T) {
	t.Parallel()
	a := startAgents(t, options{machine: "h100x8", policy: divided("0-3", "4-7"), settings: map[string]string{"overlap": "refuse"}})
	all := a.units()
	a.awaitOffered("divided", all, first, second, 0)
	a.reload(undivided)
	a.awaitOffered("undivided", all, first, second, 4)
	a.kill()
	a.awaitOffered("killed", all, first, second, 4)
	a.reload("version: v1\npolicy: {rules: [{select: {model: \"*\"}, for: nomad}]}\n")
	a.awaitOffered("all for Nomad", all, every, nil, 0)
}
