//go:build e2e

package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// repair is a team whose GPUs are repaired by the agents that have them.
type repair struct {
	*team
	gpuFleet
}

// repaired is what happened to a faulty GPU, in the order in which it does, and how long after the fault.
type repaired struct {
	agent string
	place
	steps []repairStep
}

type repairStep struct {
	what string
	took time.Duration
}

// TestRepair has a GPU of each orchestrator report XID 95 under work: its work is moved, its agent resets and proves it, and it takes work again. No other
// work of the node is touched, and no person does anything.
func TestRepair(t *testing.T) {
	r := startRepair(t)
	step(t, "a GPU of each orchestrator fails under work", r.wholeWay)
	step(t, "a reset that does not help is left to a person", r.inVain)
	r.process.stop(t, syscall.SIGTERM)
	for _, m := range r.machines {
		checkDriver(t, m)
	}
}

func startRepair(t *testing.T) *repair {
	t.Helper()
	r := &repair{team: startTeam(t, "repair", 0, shippedPart(t, "hand-over"), shippedPart(t, "reset")+"/pod", renderReset(t, h100History))}
	if err := r.machine.InstallSMI(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	r.gpuFleet = gpuFleet{
		owner: t,
		clusters: []map[string]any{
			{"name": "dc1", "kind": "nomad", "address": nomadAPI},
			{"name": "east", "kind": "kubernetes", "kubeconfig": r.kube.fleetAccount(t, kubeAPI)},
		},
		ledger: map[string]any{"file": filepath.Join(stateDir(), "gpu-fleet", "ledger.json")},
	}
	for _, name := range []string{"train", "steady"} {
		fleetJob{name: name, device: prefers(model)}.submit(t)
		deployment(name, 1).apply(t)
		awaitPlaces(t, nomadWork(name), 1)
		awaitPlaces(t, r.kube.kubeWork(name), 1)
	}
	showAgents(t, r.machine)
	r.configure(t, "act", settings(nil))
	r.verb(t, "init")
	r.start(t)
	return r
}

// renderReset is the part that has the reset server beside a simulated machine, with this state directory.
func renderReset(t *testing.T, history string) string {
	t.Helper()
	render(t, "parts/reset/kustomization.yaml", map[string]string{"MACHINE": filepath.Join(stateDir(), "machine"), "HISTORY": filepath.Join(stateDir(), history)})
	return "parts/reset"
}

// wholeWay is from the faults to new work on the same GPUs.
func (r *repair) wholeWay(t *testing.T) {
	works := map[string]workload{"nomad-gpu": nomadWork("train"), "k8s-gpu": r.kube.kubeWork("train")}
	steady := []place{awaitPlaces(t, nomadWork("steady"), 1)[0], awaitPlaces(t, r.kube.kubeWork("steady"), 1)[0]}
	var all []*repaired
	for _, agent := range []string{"nomad-gpu", "k8s-gpu"} {
		all = append(all, &repaired{agent: agent, place: awaitPlaces(t, works[agent], 1)[0]})
	}
	began := time.Now()
	for _, one := range all {
		r.fail(t, one.place)
	}
	for _, one := range all {
		_, took := works[one.agent].awaitElsewhere(t, one.place, began)
		one.steps = append(one.steps, repairStep{"its work runs elsewhere", took})
		r.awaitOutcome(t, one.place, rescue.Moved)
	}
	r.follow(t, all, began)
	for _, w := range []workload{nomadWork("steady"), r.kube.kubeWork("steady")} {
		if now := awaitPlaces(t, w, 1)[0]; !slices.Contains(steady, now) {
			t.Errorf("other work of %s was touched: it runs in %+v, it ran in %+v", w.orchestrator, now, steady)
		}
	}
	r.newWork(t, all)
	t.Logf("after the fault:\n%s", repairTable(t, all))
}

// follow waits until each GPU was reset, has passed its proof, and takes work, and notes when. While a GPU is reset the others are listed.
func (r *repair) follow(t *testing.T, all []*repaired, began time.Time) {
	t.Helper()
	listed := map[string]int{}
	await(t, "the repair of the GPUs", 5*time.Minute, func() error {
		var missing []error
		for _, one := range all {
			now, err := r.report(one.agent)
			if err != nil {
				missing = append(missing, err)
				continue
			}
			if n := len(now.Devices); listed[one.agent] != 0 && n != listed[one.agent] {
				t.Errorf("%s lists %d devices, and listed %d", one.agent, n, listed[one.agent])
			}
			listed[one.agent] = len(now.Devices)
			missing = append(missing, one.look(now, time.Since(began)))
		}
		return errors.Join(missing...)
	})
}

// look notes the next step that has happened, and returns what is to come; nil = nothing.
func (one *repaired) look(r report.Report, after time.Duration) error {
	reset, proof, device := report.Reset{}, report.Proof{}, report.Device{}
	for _, x := range r.Resets {
		if string(x.GPU) == one.gpu {
			reset = x
		}
	}
	for _, x := range r.Proofs {
		if string(x.GPU) == one.gpu {
			proof = x
		}
	}
	for _, x := range r.Devices {
		if string(x.ID) == one.gpu {
			device = x
		}
	}
	steps := []struct {
		what string
		done bool
	}{
		{"its reset begins", reset.Running != "" || reset.Result != ""},
		{"it was reset", reset.Result == "done"},
		{"it has passed its proof", proof.Result == "passed" && proof.Reason == "reset"},
		{"it takes work", device.Schedulable},
	}
	for _, s := range steps {
		noted := slices.ContainsFunc(one.steps, func(n repairStep) bool { return n.what == s.what })
		switch {
		case noted:
		case s.done:
			one.steps = append(one.steps, repairStep{s.what, after})
		default:
			return fmt.Errorf("%s of %s: not yet: %s: %s, reset %+v, proof %+v", one.gpu, one.agent, s.what, device.Health, reset, proof)
		}
	}
	return nil
}

// report is that of an agent of node1.
func (r *repair) report(agent string) (report.Report, error) {
	return control.Report(r.owner.Context(), control.Path(filepath.Join(stateDir(), h100History), agent))
}

// newWork has new work on the GPUs that were repaired: a job that asks for its GPU, and pods on all GPUs that are free.
func (r *repair) newWork(t *testing.T, all []*repaired) {
	t.Helper()
	for _, one := range all {
		w, count := nomadWork("new"), 1
		if one.agent == "nomad-gpu" {
			fleetJob{name: "new", device: where("ids", "set_contains", one.gpu)}.submit(t)
		} else {
			w, count = r.kube.kubeWork("new"), 4+8-2 // of node1 and node2, without those of train and steady
			deployment("new", count).apply(t)
		}
		if places := awaitPlaces(t, w, count); !slices.ContainsFunc(places, func(p place) bool { return p.gpu == one.gpu }) {
			t.Errorf("no new work of %s is on %s: %+v", w.orchestrator, one.gpu, places)
		}
	}
}

// inVain has a GPU whose reset changes nothing: on a node with NVSwitches there is no second one.
func (r *repair) inVain(t *testing.T) {
	must(t, "nomad", "job", "stop", "-address="+nomadAPI, "-detach", "new")
	awaitPlaces(t, nomadWork("new"), 0)
	var bad string
	await(t, "a GPU without work", time.Minute, func() error {
		now, err := r.report("nomad-gpu")
		for _, d := range now.Devices {
			if d.Schedulable && len(d.Owners) == 0 && d.Cause == "" {
				bad = string(d.ID)
			}
		}
		return cmp.Or(err, map[bool]error{true: errors.New("there is none")}[bad == ""])
	})
	slot := slotOf(t, r.machine, bad)
	if err := errors.Join(r.machine.Set(slot, "reset_keeps_fault", "yes"), r.machine.Set(slot, "recovery_action", "1")); err != nil {
		t.Fatal(err)
	}
	await(t, "the GPU to wait for a person", 2*time.Minute, func() error {
		now, err := r.report("nomad-gpu")
		i := slices.IndexFunc(now.Resets, func(x report.Reset) bool { return string(x.GPU) == bad })
		if err != nil || i < 0 {
			return errors.Join(err, fmt.Errorf("resets %+v", now.Resets))
		}
		if x := now.Resets[i]; x.Attempts != 1 || x.WaitsFor != "ATTEMPTS_USED" || !x.NeedsPerson {
			return fmt.Errorf("%+v", x)
		}
		return nil
	})
	t.Logf("inspect:\n%s", must(t, binary("nomad-gpu"), "inspect", "--state-dir="+filepath.Join(stateDir(), h100History)))
}

// repairTable is a row for each step, with its times.
func repairTable(t *testing.T, all []*repaired) string {
	t.Helper()
	var b strings.Builder
	fmt.Fprintln(&b, "| after XID 95 | "+strings.Join(agentsOf(all), " | ")+" |\n|---|---|---|")
	for i, s := range all[0].steps {
		fmt.Fprintf(&b, "| %s |", s.what)
		for _, one := range all {
			fmt.Fprintf(&b, " %.1f s |", one.steps[i].took.Seconds())
		}
		fmt.Fprintln(&b)
	}
	write(t, "../logs/repair-times.md", []byte(b.String()))
	return b.String()
}

func agentsOf(all []*repaired) (names []string) {
	for _, one := range all {
		names = append(names, one.agent)
	}
	return names
}
