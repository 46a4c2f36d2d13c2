//go:build e2e

package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// repairs are the faults of GPUs that a reset ends.
type repairs struct {
	since  map[string]time.Time // of the fault, if the GPU does not take work again so far
	faults map[string]int       // of each GPU
	took   []time.Duration      // from the fault to the first look at the GPU that takes work again
	moved  int                  // moves that arrived with the end of a repair
}

func newRepairs() repairs {
	return repairs{since: map[string]time.Time{}, faults: map[string]int{}}
}

// of reports whether the GPU is being repaired.
func (r *repairs) of(gpu string) bool { _, found := r.since[gpu]; return found }

const (
	repairsEvery  = 8  // in one of so many rounds a GPU fails
	repairsAtOnce = 3  // GPUs that are being repaired at most
	repairsBefore = 80 // moves that are to come when the last GPU fails, during which most of its repair happens

	// repairAtMost is how long a repair may take after what interrupted it last. It is then tried again after a minute, and after five at the second time: an
	// agent has the GPU open if what the agents share is removed during the reset. Then it needs 30 s without a holder, the reset, evidence, 30 s without a
	// holder, and the proof, and waits for as much of two other GPUs, as resets and proofs are made one at a time.
	repairAtMost = 8 * time.Minute

	resetTakes = time.Second // of nvidia-smi, so that it is seen
)

// repairParts has the machine's GPUs be repaired by the agents that have them, and returns what k8s-gpu needs for that.
func repairParts(t *testing.T, m *simdriver.Machine) []string {
	t.Helper()
	if err := errors.Join(m.InstallSMI(t.Context(), ""), m.Slow(simdriver.All, simdriver.SMIReset, resetTakes)); err != nil {
		t.Fatal(err)
	}
	showAgents(t, m)
	for name, sleep := range map[string]string{"policy": "/etc/tandem/sleep", "nomad": "/bin/sleep"} {
		policy := render(t, "policies/moves.yaml", map[string]string{"SLEEP": sleep})
		must(t, "install", "-D", policy, filepath.Join(policyDir(), name+".yaml"))
	}
	must(t, "install", "/bin/busybox", filepath.Join(policyDir(), "sleep")) // the image of k8s-gpu has no program but itself
	render(t, "parts/own/kustomization.yaml", map[string]string{"POLICY": policyDir()})
	render(t, "parts/cdi/kustomization.yaml", map[string]string{"HOOK": hook(m)})
	return []string{"parts/own", shippedPart(t, "reset") + "/pod", renderReset(t, sharedHistory)}
}

// showAgents has the processes of the agents in the simulated machine's /proc, where a reset looks for those that have the GPU open.
func showAgents(t *testing.T, m *simdriver.Machine) {
	t.Helper()
	var showing sync.WaitGroup
	ctx := t.Context()
	showing.Go(func() {
		for ; ctx.Err() == nil; time.Sleep(holdersEvery) {
			for pid := range agents() {
				if held, err := m.HeldBy(pid); err != nil || len(held) == 0 { // it may be one of another machine, whose nodes have the same names
					continue
				}
				process := fmt.Sprintf("/proc/%d", pid)
				_ = os.Symlink(process, m.Root+process) // it may be there
			}
		}
	})
	t.Cleanup(showing.Wait)
}

// breakGPU has a GPU need a reset in the first round, and in some others: one that failed least often so far, since with each fault the evidence for the
// end of the next one must hold for twice as long.
func (mv *moves) breakGPU(t *testing.T) {
	t.Helper()
	r := &mv.repairs
	all := slices.Sorted(maps.Keys(mv.at))
	chance, first := mv.random.IntN(repairsEvery), mv.random.IntN(len(all))
	if mv.rounds > 0 && chance > 0 || len(r.since) >= repairsAtOnce || roundsOf(draMoves, 100)-len(mv.took) < repairsBefore {
		return
	}
	all = slices.DeleteFunc(slices.Concat(all[first:], all[:first]), r.of)
	gpu := slices.MinFunc(all, func(a, b string) int { return cmp.Compare(r.faults[a], r.faults[b]) })
	if err := mv.machine().Set(slotOf(t, mv.machine(), gpu), "recovery_action", "1"); err != nil {
		t.Fatal(err)
	}
	r.since[gpu] = time.Now()
	r.faults[gpu]++
}

// awaitRepairs waits until each GPU takes work that has failed.
func (mv *moves) awaitRepairs(t *testing.T) {
	t.Helper()
	for ; len(mv.repairs.since) > 0; time.Sleep(movesLook) {
		mv.look(t)
	}
	mv.await(t)
}

// lookRepairs notes the GPUs that take work again. It fails if one does not in time after what interrupts a repair: a move of the GPU, the end of an agent,
// and the removal of what agents share.
func (mv *moves) lookRepairs(t *testing.T, offered map[string]string) {
	t.Helper()
	r := &mv.repairs
	for gpu, since := range r.since {
		action, err := mv.machine().Get(slotOf(t, mv.machine(), gpu), "recovery_action")
		switch {
		case err != nil:
			t.Fatal(err)
		case action == "0" && offered[gpu] == mv.at[gpu]:
			r.took = append(r.took, time.Since(since))
			delete(r.since, gpu)
			if _, moving := mv.since[gpu]; moving {
				delete(mv.since, gpu)
				r.moved++
			}
		case time.Since(since) > repairAtMost && time.Since(mv.since[gpu]) > repairAtMost && time.Since(mv.young) > repairAtMost && mv.holders.undisturbed() > repairAtMost:
			t.Fatalf("%s of %s is not repaired after %v; recovery action %s, offered by %q\n%s", gpu, mv.at[gpu], time.Since(since), action, offered[gpu], mv.inspect())
		}
	}
}

// inspect is what both agents show.
func (mv *moves) inspect() string {
	nomad, err := command(binary("nomad-gpu"), "inspect", "--state-dir="+mv.state())
	kube, err2 := command(binary("k8s-gpu"), "inspect", "--state-dir="+mv.state())
	return fmt.Sprintf("%s\n%s\nerrors %v, %v", nomad, kube, err, err2)
}

// killResetServer kills the server that resets GPUs for k8s-gpu, with an nvidia-smi that it runs.
func (mv *moves) killResetServer(t *testing.T) {
	t.Helper()
	for _, pid := range mv.containerProcesses(t) {
		if argv := argvOf(fmt.Sprintf("/proc/%d", pid)); len(argv) < 2 || argv[1] != "reset-server" {
			continue
		}
		mv.holders.ends("k8s-gpu")
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
}

// checkRepaired fails if GPUs were repaired without a reset or a proof. On a busy machine there are few repairs, and one look may miss a proof, which is short.
func (mv *moves) checkRepaired(t *testing.T) {
	t.Helper()
	r, resets, proofs := &mv.repairs, mv.holders.acted("reset"), mv.holders.acted("proof")
	t.Logf("%d faults of GPUs, %d resets, %d proofs; from a fault to new work: %s; %d moves more arrived with that", len(r.took), resets, proofs, percentiles(r.took), r.moved)
	if resets < len(r.took) || proofs == 0 && len(r.took) > 2 {
		t.Errorf("%d GPUs were repaired by %d resets and %d proofs", len(r.took), resets, proofs)
	}
	if text := mv.inspect(); strings.Contains(text, "a person is needed") {
		t.Errorf("GPUs wait for a person:\n%s", text)
	}
}
