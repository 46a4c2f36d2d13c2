//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/fleet/report"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// teamRescue is one gpu-fleet over both orchestrators of a team.
type teamRescue struct {
	*team
	gpuFleet
	servers map[string]*recorder // by orchestrator
}

// TestRescue has faults of GPUs move work under both orchestrators, which have GPUs of one machine: with one budget and one quorum. It is also what
// "make demo-fleet" shows.
func TestRescue(t *testing.T) {
	r := startTeamRescue(t)
	step(t, "a GPU of Nomad fails", r.nomadFails)
	step(t, "a GPU of Kubernetes fails on the same machine", r.kubernetesFails)
	step(t, "the same fault on three nodes", r.quorum)
	if rounds := roundsOf(rescueRounds, 0); rounds > 0 {
		step(t, "how long it takes", func(t *testing.T) { r.measure(t, rounds) })
	}
	r.process.stop(t, syscall.SIGTERM)
	for _, m := range r.machines {
		checkDriver(t, m)
	}
}

// demo reports whether the steps are told on standard output, for "make demo-fleet".
func demo() bool { return os.Getenv("E2E_DEMO") != "" }

// tell prints what happens.
func tell(t *testing.T, format string, args ...any) {
	t.Helper()
	if demo() {
		fmt.Printf(format+"\n", args...)
		return
	}
	t.Logf(format, args...)
}

// tellVerb runs a command of gpu-fleet, and prints its output.
func (g *gpuFleet) tellVerb(t *testing.T, argv ...string) {
	t.Helper()
	tell(t, "\n$ gpu-fleet %s\n%s\n", strings.Join(argv, " "), g.verb(t, argv...))
}

func startTeamRescue(t *testing.T) *teamRescue {
	t.Helper()
	tell(t, "A Nomad and a Kubernetes start on this machine, on simulated GPUs ...")
	r := &teamRescue{team: startTeam(t, "own", roundsOf(rescueRounds, 0), shippedPart(t, "hand-over"))}
	r.servers = map[string]*recorder{"Nomad": record(t, nomadAPI), "Kubernetes": record(t, kubeAPI)}
	r.gpuFleet = gpuFleet{
		owner: t,
		clusters: []map[string]any{
			{"name": "dc1", "kind": "nomad", "address": r.servers["Nomad"].url},
			{"name": "east", "kind": "kubernetes", "kubeconfig": r.kube.fleetAccount(t, r.servers["Kubernetes"].url)},
		},
		ledger: map[string]any{"file": r.ledgerFile()},
	}
	fleetJob{name: "train", device: prefers(model)}.submit(t)
	deployment("train", 1).apply(t)
	awaitPlaces(t, nomadWork("train"), 1)
	awaitPlaces(t, r.kube.kubeWork("train"), 1)
	r.configure(t, "act", settings(map[string]any{"max_gpus": 1}))
	r.verb(t, "init")
	r.start(t)
	tell(t, `
  node1   8 H100, of which 0 to 3 are Nomad's, which calls the node h100, and 4 to 7 are Kubernetes'
  node2   8 L40S, of Kubernetes
  node3   6 L40S, of Nomad, which calls it l40s

A job of Nomad and a Deployment of Kubernetes, both named train, have one GPU of node1 each. gpu-fleet looks after both clusters, with one policy:
work of at most one GPU of a node is moved within an hour.`)
	r.tellVerb(t, "status")
	return r
}

func (r *teamRescue) ledgerFile() string {
	return filepath.Join(stateDir(), "gpu-fleet", "ledger.json")
}

// newLedger starts gpu-fleet on an empty ledger, with this policy.
func (r *teamRescue) newLedger(t *testing.T, policy map[string]any) {
	t.Helper()
	r.process.stop(t, syscall.SIGTERM)
	if err := os.Remove(r.ledgerFile()); err != nil {
		t.Fatal(err)
	}
	r.configure(t, "act", policy)
	r.verb(t, "init")
	r.start(t)
}

// nomadFails has a GPU fail that an allocation has.
func (r *teamRescue) nomadFails(t *testing.T) {
	w := nomadWork("train")
	at := awaitPlaces(t, w, 1)[0]
	tell(t, "%s of node1 reports XID 95, an uncontained memory error. Nomad's allocation %s has it. Nomad's servers know after 5 to 10 s.", at.gpu, at.id)
	began := time.Now()
	r.fail(t, at)
	next, took := w.awaitElsewhere(t, at, began)
	r.awaitOutcome(t, at, rescue.Moved)
	tell(t, "After %.1f s allocation %s runs in its place, on %s of %s.", took.Seconds(), next.id, next.gpu, next.node)
	if next.gpu == at.gpu {
		t.Errorf("it is on the same GPU")
	}
}

// kubernetesFails has a GPU of the same machine fail that a pod has: the budget of the machine is used up, until the operator allows more.
func (r *teamRescue) kubernetesFails(t *testing.T) {
	w := r.kube.kubeWork("train")
	at := awaitPlaces(t, w, 1)[0]
	if at.node != "node1" {
		t.Fatalf("the pod is in %+v", at)
	}
	tell(t, "\n%s of node1 reports the same. Pod %s of Kubernetes has it.", at.gpu, at.name)
	r.fail(t, at)
	wait := r.awaitWait(t, at, rescue.ReasonGPUs)
	tell(t, "gpu-fleet waits: %s (%s).", wait.Text, wait.Reason)
	r.tellVerb(t, "status")
	if now := awaitPlaces(t, w, 1)[0]; now != at {
		t.Errorf("the pod was in %+v, it is in %+v", at, now)
	}
	tell(t, "The operator allows two GPUs of a node an hour. gpu-fleet starts again, and awaits the next report of the agent, which comes every 30 s.")
	began := time.Now()
	r.restart(t, "act", settings(map[string]any{"max_gpus": 2}))
	next, took := w.awaitElsewhere(t, at, began)
	r.awaitOutcome(t, at, rescue.Moved)
	tell(t, "After %.1f s pod %s runs in its place, on %s of %s.", took.Seconds(), next.name, next.gpu, next.node)
	r.tellVerb(t, "status")
}

// quorum has the same fault on three nodes, of which two are Nomad's and two are Kubernetes': that is no fault of the hardware.
func (r *teamRescue) quorum(t *testing.T) {
	r.newLedger(t, settings(map[string]any{"delay": "20s", "quorum_nodes": 2}))
	works := []workload{nomadWork("train"), r.kube.kubeWork("train")}
	var at []place
	for _, w := range works {
		at = append(at, awaitPlaces(t, w, 1)[0])
	}
	tell(t, "Now GPUs of three nodes report XID 95 at the same time. The policy has quorum_nodes: 2.")
	began := time.Now()
	bad := append([]place{}, at...)
	for _, node := range []string{"node1", "node2", "l40s"} {
		if m := r.machines[node]; m != r.machines[at[0].node] && m != r.machines[at[1].node] {
			bad = append(bad, place{node: node, gpu: m.UUID(5)})
		}
	}
	for _, one := range bad {
		r.fail(t, one)
	}
	d := r.await(t, "acts to be stopped by quorum", 60*time.Second, func(d report.Document) error {
		if d.Stop == nil || d.Stop.By != rescue.ByQuorum {
			return fmt.Errorf("they are stopped by %s; the budget is %s", shown(d.Stop), shown(d.Budget))
		}
		return nil
	})
	tell(t, "After %.1f s all acts are stopped: %s.", time.Since(began).Seconds(), d.Stop.Text)
	r.awaitWait(t, at[0], rescue.ReasonStopped)
	r.awaitWait(t, at[1], rescue.ReasonStopped)
	time.Sleep(time.Until(began.Add(25 * time.Second))) // beyond the delay
	for i, w := range works {
		if now := awaitPlaces(t, w, 1)[0]; now != at[i] {
			t.Errorf("%s: it ran in %+v, and runs in %+v", w.orchestrator, at[i], now)
		}
	}
	if err := errors.Join(r.noCalls(stops, "Nomad", began), r.noCalls(evictions, "Kubernetes", began)); err != nil {
		t.Error(err)
	}
	tell(t, "Nothing was moved. A person looks, and resumes.")
	r.tellVerb(t, "resume", "--by=ann")
	for i, w := range works {
		next, _ := w.awaitElsewhere(t, at[i], began)
		r.awaitOutcome(t, at[i], rescue.Moved)
		tell(t, "%s: train runs on %s of %s.", w.orchestrator, next.gpu, next.node)
	}
}

// noCalls is an error if gpu-fleet asked an orchestrator's servers for something since a time.
func (r *teamRescue) noCalls(pattern, orchestrator string, since time.Time) error {
	if calls := r.servers[orchestrator].matching(pattern, since); len(calls) > 0 {
		return fmt.Errorf("gpu-fleet asked %s for %+v", orchestrator, calls)
	}
	return nil
}
