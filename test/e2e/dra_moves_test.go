//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Variables of TestDRAMoves: how many moves it makes (default 100), after how many minutes it begins no more (default none), and on how
// many GPUs (8 to 64, default 16).
const (
	draMoves   = "E2E_DRA_MOVES"
	draMinutes = "E2E_DRA_MINUTES"
	draGPUs    = "E2E_DRA_GPUS"
)

// apis are those between which GPUs move.
var apis = []string{"device-plugin", "dra", "nomad"}

// moves is a node whose GPUs move between a kubelet's device plugins, its DRA driver and Nomad.
type moves struct {
	*draCluster
	nomad   *agent
	random  *rand.Rand
	holders *holderTrace

	at       map[string]string    // the API of each GPU, as ordered last
	since    map[string]time.Time // of the order, if the GPU was not seen there since
	took     []time.Duration      // from the order to the first look at the GPU there
	replaced int                  // orders that were followed by another one before the GPU was there
	rounds   int
	faults   map[string]int
	drivers  int         // how often nomad-gpu had found the driver when it was killed last
	emptied  []time.Time // of the CDI folder
	young    time.Time   // when kubelet was started again
	repairs  repairs
}

// TestDRAMoves moves GPUs between the three APIs while pods and jobs come and go, and ends agents and kubelet, empties folders and has GPUs need a reset
// meanwhile. No two of pod, claim, allocation, proof and reset ever have one GPU, each move and each repair comes to its end, and no work is stuck.
func TestDRAMoves(t *testing.T) {
	mv := startMoves(t)
	works := startWorks(t, mv.cluster, mv.nomad, len(mv.at), mv.random.Uint64())
	mv.holders = traceHolders(t, mv.machine())
	limit := time.Duration(roundsOf(draMinutes, 24*60)) * time.Minute
	for began := time.Now(); len(mv.took) < roundsOf(draMoves, 100) && time.Since(began) < limit; mv.rounds++ {
		mv.round(t)
		if mv.rounds%50 == 49 {
			t.Logf("%d rounds, %d moves after %v; %s; repairs %s; meanwhile: %v", mv.rounds+1, len(mv.took), time.Since(began).Round(time.Second), percentiles(mv.took), percentiles(mv.repairs.took), mv.faults)
		}
	}
	for _, api := range apis {
		step(t, "all GPUs to "+api, func(t *testing.T) { mv.all(t, api) })
	}
	step(t, "the end of all repairs", mv.awaitRepairs)
	works.stop(t)
	mv.checkEnded(t)
	mv.holders.checkAlone(t)
	mv.checkNames(t)
	mv.checkRepaired(t)
	t.Logf("%d rounds on %d GPUs; moves took: %s; %d more were replaced by another one; meanwhile: %v", mv.rounds, len(mv.at), percentiles(mv.took), mv.replaced, mv.faults)
	checkDriver(t, mv.machine())
}

func startMoves(t *testing.T) *moves {
	t.Helper()
	random := seeded(t)
	m := install(t, "h100x8")
	for slot := 8; slot < roundsOf(draGPUs, 16); slot++ {
		if err := m.Add(slot, fmt.Sprintf("uuid = GPU-%08x-0000-4000-8000-000000000000", slot), fmt.Sprintf("minor = %d", slot)); err != nil {
			t.Fatal(err)
		}
	}
	mv := &moves{draCluster: startDRAOn(t, m), random: random, at: map[string]string{}, since: map[string]time.Time{}, faults: map[string]int{}, repairs: newRepairs()}
	mv.age(t)
	mv.deployPlugin(t, m.Root, sharedHistory, append(repairParts(t, m), shippedPart(t, "dra"), "parts/cdi")...)
	settings := fmt.Sprintf("nomad_address = %q\n    policy_file = %q", nomadAPI, policyDir()+"/nomad.yaml") // a GPU leaves Nomad when its allocations are known
	mv.nomad = launchNomad(t, "nomad", onMachine(m, sharedHistory, settings))
	mv.nomad.awaitReady(t)
	mv.nomad.awaitDrivers(t, 1)
	mv.order(t, thirds(t, m))
	mv.await(t)
	mv.took, mv.replaced = nil, 0 // the first moves have no work to wait for
	return mv
}

// thirds are the GPUs of a machine with a third for each API.
func thirds(t *testing.T, m *simdriver.Machine) map[string]string {
	t.Helper()
	to := map[string]string{}
	for i, gpu := range uuids(t, m) {
		to[gpu] = apis[i%len(apis)]
	}
	return to
}

// movesSettle is for how long an API must have had no holder. Here kubelet writes its status every two seconds, and Nomad's agent sends its
// devices within one.
const movesSettle = "4s"

// order has the agents move GPUs. An agent that was ended a moment ago does not answer so far.
func (mv *moves) order(t *testing.T, to map[string]string) {
	t.Helper()
	for _, api := range apis {
		var gpus []string
		for gpu, target := range to {
			if target == api {
				gpus = append(gpus, gpu)
			}
		}
		if len(gpus) == 0 {
			continue
		}
		argv := append([]string{binary("k8s-gpu"), "migrate", "apply", "--state-dir", mv.state(), "--settle", movesSettle, "--to", api}, gpus...)
		began := time.Now()
		await(t, "migrate apply", agentsAtMost, func() error { return try(argv...) })
		for _, gpu := range gpus {
			if _, moving := mv.since[gpu]; moving {
				mv.replaced++
			}
			mv.at[gpu], mv.since[gpu] = api, began
		}
	}
}

// agentsAtMost is how long it takes until an agent that was ended answers again.
const agentsAtMost = time.Minute

// state is the directory that the agents share.
func (mv *moves) state() string { return filepath.Join(stateDir(), sharedHistory) }

// round orders moves of most GPUs that have arrived, and of some that have not, looks where they are for a while, and breaks
// something. The same seed gives the same faults, but for those that are left out while GPUs are repaired.
func (mv *moves) round(t *testing.T) {
	t.Helper()
	to := map[string]string{}
	for _, gpu := range uuids(t, mv.machine()) {
		api, chance := apis[mv.random.IntN(len(apis))], mv.random.IntN(20)
		if _, moving := mv.since[gpu]; api != mv.at[gpu] && (chance == 0 || !moving && chance < 18) {
			to[gpu] = api
		}
	}
	mv.order(t, to)
	mv.breakGPU(t)
	for until := time.Now().Add(time.Duration(mv.random.Int64N(int64(5 * time.Second)))); time.Now().Before(until); time.Sleep(movesLook) {
		mv.look(t)
	}
	mv.faults[mv.fault(t)]++
	mv.look(t)
}

// all moves every GPU to one API that is not being repaired.
func (mv *moves) all(t *testing.T, api string) {
	t.Helper()
	to := map[string]string{}
	for _, gpu := range slices.Sorted(maps.Keys(mv.at)) {
		if !mv.repairs.of(gpu) {
			to[gpu] = api
		}
	}
	mv.order(t, to)
	mv.await(t)
}
