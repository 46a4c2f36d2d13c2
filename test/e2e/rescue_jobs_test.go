//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/fleet/report"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// nomadRescue is a Nomad with access control, and gpu-fleet with no more rights than deploy/nomad/gpu-fleet-policy.hcl has.
type nomadRescue struct {
	*fleet
	gpuFleet
	servers *recorder

	hanging  place // its task can't be ended
	executor int   // the process that would end it
}

// stops are the requests that end work.
const stops = ` /v1/allocation/[^/]+/stop`

// TestRescueNomad has work of each type leave faulty GPUs, and no other work.
func TestRescueNomad(t *testing.T) {
	n := startNomadRescue(t)
	step(t, "faults of a service, a batch job and a system job are listed, then acted on", n.moves)
	step(t, "a job has no other place, and a task can't be ended", n.stuck)
	step(t, "gpu-fleet is killed between reservation and call", n.killed)
	step(t, "the task ends at last", n.unstuck)
	step(t, "plugins end, and the driver is unloaded on all nodes", n.withoutDriver)
	n.process.stop(t, syscall.SIGTERM)
	t.Logf("what gpu-fleet asked of the servers, with the status of the answers:\n%s", n.servers.kinds())
	checkDriver(t, n.machine)
	checkDriver(t, n.other)
}

func startNomadRescue(t *testing.T) *nomadRescue {
	t.Helper()
	t.Setenv(nomadToken, "5d1ab4ee-0f0e-4c7f-9a36-6f2c5b7f3a10")
	n := &nomadRescue{fleet: startFleetWith(t, "", 8, render(t, "rescue/acl.hcl", nil)), servers: record(t, nomadAPI)}
	must(t, "nomad", "acl", "policy", "apply", "-address="+nomadAPI, "gpu-fleet", "../../deploy/nomad/gpu-fleet-policy.hcl")
	var token struct{ SecretID string }
	text := must(t, "nomad", "acl", "token", "create", "-address="+nomadAPI, "-policy=gpu-fleet", "-json")
	if err := json.Unmarshal([]byte(text), &token); err != nil {
		t.Fatal(err)
	}
	n.gpuFleet = gpuFleet{
		owner: t,
		clusters: []map[string]any{{
			"name": "dc1", "kind": "nomad", "address": n.servers.url, "token_file": write(t, "gpu-fleet/dc1.token", []byte(token.SecretID)),
		}},
		ledger: map[string]any{"cluster": "dc1"},
	}
	return n
}

// rescueJob is a job of testdata/rescue/job.nomad.hcl, whose allocations have one GPU each.
type rescueJob struct {
	name, kind    string
	count         int
	group, device string // more lines
}

func (j rescueJob) submit(t *testing.T) {
	t.Helper()
	must(t, "nomad", "job", "run", "-address="+nomadAPI, "-detach", render(t, "rescue/job.nomad.hcl", map[string]string{
		"NAME": j.name, "TYPE": j.kind, "GROUP": fmt.Sprintf("count = %d\n%s", j.count, j.group), "DEVICE": j.device,
	}))
}

// awaitPlaces waits until the job has so many running allocations.
func awaitPlaces(t *testing.T, w workload, count int) (all []place) {
	t.Helper()
	await(t, fmt.Sprintf("%d places of a workload of %s", count, w.orchestrator), 60*time.Second, func() (err error) {
		all, err = w.runs()
		all = slices.DeleteFunc(all, func(p place) bool { return p.gpu == "" })
		if err == nil && len(all) != count {
			err = fmt.Errorf("it runs in %+v", all)
		}
		return err
	})
	return all
}

// on returns the first of the places that is on this node.
func on(t *testing.T, all []place, node string) place {
	t.Helper()
	i := slices.IndexFunc(all, func(p place) bool { return p.node == node })
	if i < 0 {
		t.Fatalf("none of %+v is on %s", all, node)
	}
	return all[i]
}

// moves has a GPU of each type of job fail, all on one node and at once.
func (n *nomadRescue) moves(t *testing.T) {
	rescueJob{name: "service", kind: "service", count: 2, device: prefers(model)}.submit(t)
	rescueJob{name: "batch", kind: "batch", count: 2, device: prefers(model)}.submit(t)
	rescueJob{name: "system", kind: "system", count: 1}.submit(t)
	service, batch, system := nomadWork("service"), nomadWork("batch"), nomadWork("system")
	services, batches, systems := awaitPlaces(t, service, 2), awaitPlaces(t, batch, 2), awaitPlaces(t, system, 2)
	bad := []place{on(t, services, "h100"), on(t, batches, "h100"), on(t, systems, "h100")}

	n.configure(t, "report", settings(nil))
	n.verb(t, "init")
	n.start(t)
	for _, at := range bad {
		failGPU(t, n.machine, at.gpu)
	}
	n.awaitListed(t, bad[:2])
	n.awaitRefusal(t, bad[2], rescue.ReasonController)
	awaitPlaces(t, service, 2)
	if calls := n.servers.matching(stops+"|/v1/client/metadata|/eligibility", time.Time{}); len(calls) > 0 {
		t.Errorf("in mode report gpu-fleet asked for %+v", calls)
	}

	n.restart(t, "act", settings(nil))
	for _, at := range bad[:2] {
		_, m := n.awaitOutcome(t, at, rescue.Moved)
		t.Logf("%s moved: %s", at.id, shown(m))
	}
	n.awaitRefusal(t, bad[2], rescue.ReasonController)
	n.checkReplaced(t, service, services, bad[0])
	n.checkReplaced(t, batch, batches, bad[1])
	if now := awaitPlaces(t, system, 2); !sameIDs(now, systems) {
		t.Errorf("the system job runs in %+v, and ran in %+v", now, systems)
	}
	n.awaitMark(t, n.h100, "reset")
}

// free is a healthy GPU of the client h100 that no allocation has.
func (n *nomadRescue) free(t *testing.T) string {
	t.Helper()
	node, err := n.h100.node()
	all, err2 := n.running()
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	for _, g := range node.gpus() {
		if g.Healthy && !slices.ContainsFunc(all, func(a allocation) bool { return slices.Contains(a.devices(), g.ID) }) {
			return g.ID
		}
	}
	t.Fatalf("%+v have all of %+v", all, node.gpus())
	return ""
}

// awaitListed waits until the works are listed as acts of mode act.
func (g *gpuFleet) awaitListed(t *testing.T, all []place) {
	t.Helper()
	g.await(t, "the acts to be listed", 60*time.Second, func(d report.Document) error {
		for _, at := range all {
			rescues := rescuesOf(d, at)
			if len(rescues) != 1 || !rescues[0].Listed {
				return fmt.Errorf("those of %s are %s; what waits: %s", at.id, shown(rescues), shown(d.Waits))
			}
		}
		return nil
	})
}

// checkReplaced fails unless one allocation of the job was stopped, by one call, and was placed once, on another GPU, without a reschedule attempt,
// and all others are as they were.
func (n *nomadRescue) checkReplaced(t *testing.T, w workload, before []place, bad place) {
	t.Helper()
	now := awaitPlaces(t, w, len(before))
	fresh := slices.DeleteFunc(slices.Clone(now), func(p place) bool { return has(before, p) })
	gone := slices.DeleteFunc(slices.Clone(before), func(p place) bool { return has(now, p) })
	if len(gone) != 1 || gone[0] != bad || len(fresh) != 1 || fresh[0].gpu == bad.gpu {
		t.Fatalf("it ran in %+v, it runs in %+v; want %+v replaced", before, now, bad)
	}
	if calls := n.servers.matching(" /v1/allocation/"+bad.id+"/stop", time.Time{}); len(calls) != 1 || calls[0].status != http.StatusOK {
		t.Errorf("gpu-fleet stopped it by %+v, want one call", calls)
	}
	var alloc allocation
	err := fetchJSON(nomadAPI+"/v1/allocation/"+fresh[0].id, &alloc)
	if err != nil || alloc.PreviousAllocation != bad.id || alloc.RescheduleTracker != nil {
		t.Errorf("the replacement has %+v, error %v; want it after %s, without a reschedule attempt", alloc, err, bad.id)
	}
}

func has(all []place, one place) bool {
	return slices.ContainsFunc(all, func(p place) bool { return p.id == one.id })
}

func sameIDs(a, b []place) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(p place) bool { return !has(b, p) })
}

// awaitMark waits until a client is marked for this repair; "" = for none.
func (n *nomadRescue) awaitMark(t *testing.T, a *agent, repair string) {
	t.Helper()
	node, err := a.node()
	if err != nil {
		t.Fatal(err)
	}
	await(t, fmt.Sprintf("node %s to be marked %q", node.Name, repair), 60*time.Second, func() error {
		var full struct{ Meta map[string]string }
		err := fetchJSON(nomadAPI+"/v1/node/"+node.ID, &full)
		if err == nil && full.Meta["gpu_repair"] != repair {
			err = fmt.Errorf("its metadata are %v", full.Meta)
		}
		return err
	})
}

// stuck has a GPU fail that a job asks for by its ID, and one whose task can't be ended, as one that waits for a dead GPU in the kernel: its executor
// is stopped.
func (n *nomadRescue) stuck(t *testing.T) {
	rescueJob{name: "pinned", kind: "service", count: 1, device: where("ids", "set_contains", n.free(t))}.submit(t)
	pinned := awaitPlaces(t, nomadWork("pinned"), 1)[0]
	rescueJob{name: "hanging", kind: "service", count: 1, device: prefers("NVIDIA L40S")}.submit(t)
	n.hanging = awaitPlaces(t, nomadWork("hanging"), 1)[0]
	await(t, "the process of the task", 30*time.Second, func() error { // its shell runs before
		for _, w := range sleepers() {
			if w.env["NOMAD_ALLOC_ID"] == n.hanging.id {
				n.executor = parentOf(w.pid)
			}
		}
		if n.executor < 2 { // which is no process, but several
			return errors.New("there is none")
		}
		return nil
	})
	if err := syscall.Kill(n.executor, syscall.SIGSTOP); err != nil {
		t.Fatalf("process %d: %v", n.executor, err)
	}
	failGPU(t, n.machine, pinned.gpu)
	failGPU(t, n.other, n.hanging.gpu)
	n.awaitWait(t, pinned, rescue.ReasonNoPlace)
	n.awaitWait(t, n.hanging, rescue.ReasonEnding)
	if now := awaitPlaces(t, nomadWork("pinned"), 1)[0]; now != pinned {
		t.Errorf("the job without another place runs in %+v, and ran in %+v", now, pinned)
	}
}

// parentOf returns the process that started another one; 0 = it has ended.
func parentOf(pid int) (parent int) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, after, _ := strings.Cut(string(text), ") ")
	var state string
	_, _ = fmt.Sscan(after, &state, &parent) // of a process that has ended there is no text
	return parent
}

// unstuck has the task end, half a minute and more later.
func (n *nomadRescue) unstuck(t *testing.T) {
	if wait := n.awaitWait(t, n.hanging, rescue.ReasonStuck); !wait.Alert {
		t.Errorf("it is no alert: %s", shown(wait))
	}
	if err := syscall.Kill(n.executor, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.awaitOutcome(t, n.hanging, rescue.Moved)
	if calls := n.servers.matching(" /v1/allocation/"+n.hanging.id+"/stop", time.Time{}); len(calls) != 1 {
		t.Errorf("gpu-fleet stopped it by %+v, want one call", calls)
	}
	if now := awaitPlaces(t, nomadWork("hanging"), 1)[0]; now.gpu == n.hanging.gpu {
		t.Errorf("it runs in %+v again", now)
	}
}

// killed has gpu-fleet killed when the reservation is written, and the call has not reached the servers.
func (n *nomadRescue) killed(t *testing.T) {
	w := nomadWork("service")
	before := awaitPlaces(t, w, 2)
	bad, began := on(t, before, "h100"), time.Now()
	killed := n.servers.meddleWith(" /v1/allocation/"+bad.id+"/stop", func() bool {
		n.kill()
		return false
	}, nil)
	failGPU(t, n.machine, bad.gpu)
	n.awaitDone(t, "gpu-fleet to stop "+bad.id, killed)
	if now := awaitPlaces(t, w, 2); !sameIDs(now, before) {
		t.Fatalf("the call did not reach the servers, and it runs in %+v, as before in %+v", now, before)
	}
	n.start(t)
	r, m := n.awaitOutcome(t, bad, rescue.Moved)
	calls := n.servers.matching(" /v1/allocation/[^/]+/stop", began)
	if len(calls) != 2 || calls[0].status != 0 || calls[1].status != http.StatusOK || m.Tries != 2 {
		t.Errorf("the calls are %+v, the move is %s; want one that the servers did not get, and one more", calls, shown(m))
	}
	d, err := n.document()
	if err != nil || len(rescuesOf(d, bad)) != 1 {
		t.Errorf("the attempts of %s are %s, error %v; want one: %s", bad.gpu, shown(rescuesOf(d, bad)), err, shown(r))
	}
}

// withoutDriver has what looks like a fault of all GPUs, and is none of any.
func (n *nomadRescue) withoutDriver(t *testing.T) {
	repairAll(t, n.machine, n.other)
	n.h100.awaitGPUs(t, 8, 8)
	n.l40s.awaitGPUs(t, 6, 6)
	n.awaitMark(t, n.h100, "")
	n.awaitMark(t, n.l40s, "") // else the request for that may come after began
	works := []workload{nomadWork("service"), nomadWork("batch"), nomadWork("system"), nomadWork("hanging")}
	counts, before := []int{2, 2, 2, 1}, [][]place{}
	for i, w := range works {
		before = append(before, awaitPlaces(t, w, counts[i]))
	}
	began := time.Now()
	n.h100.killPlugin(t)
	n.l40s.killPlugin(t)
	if err := errors.Join(n.machine.Unload(), n.other.Unload()); err != nil {
		t.Fatal(err)
	}
	n.h100.awaitGPUs(t, 8, 0)
	n.l40s.awaitGPUs(t, 6, 0)
	n.await(t, "gpu-fleet to show that no GPU takes work", 60*time.Second, func(d report.Document) error {
		if c := d.Clusters[0]; c.FaultyGPUs != 8+6 {
			return fmt.Errorf("it shows %+v", c)
		}
		return nil
	})
	time.Sleep(2 * decision)
	if err := errors.Join(n.machine.Load(), n.other.Load()); err != nil {
		t.Fatal(err)
	}
	n.h100.awaitGPUs(t, 8, 8)
	n.l40s.awaitGPUs(t, 6, 6)
	for i, w := range works {
		if now := awaitPlaces(t, w, counts[i]); !sameIDs(now, before[i]) {
			t.Errorf("it runs in %+v, and ran in %+v", now, before[i])
		}
	}
	if calls := n.servers.matching(stops+"|/v1/client/metadata|/eligibility", began); len(calls) > 0 {
		t.Errorf("gpu-fleet asked for %+v", calls)
	}
}
