//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// draMoves is the variable with how many moves TestDRAMoves makes at least.
const draMoves = "E2E_DRA_MOVES"

// sides are the APIs between which GPUs move.
var sides = []string{"device-plugin", "dra", "nomad"}

// moves is a host whose GPUs move between a kubelet's device plugins, its DRA driver and Nomad.
type moves struct {
	*draCluster
	nomad   *agent
	random  *rand.Rand
	holders *holderTrace
	at      map[string]string // the side of each GPU, as ordered last
	took    []time.Duration
	faults  map[string]int
}

// TestDRAMoves moves GPUs between the three sides while pods and jobs come and go, and ends agents and kubelet and empties folders
// meanwhile. No two works ever have one GPU, each move comes to its end, and no work is stuck.
func TestDRAMoves(t *testing.T) {
	if os.Getenv(draMoves) == "" {
		t.Skipf("set %s to the number of moves: a first move waits until kubelet is two minutes old", draMoves)
	}
	mv := startMoves(t)
	works := startWorks(t, mv.cluster, mv.nomad, mv.random.Uint64())
	mv.holders = traceHolders(t, mv.machine())
	for done := 0; done < roundsOf(draMoves, 30); {
		done += mv.next(t)
	}
	for _, side := range sides {
		step(t, "all GPUs to "+side, func(t *testing.T) { mv.all(t, side) })
	}
	works.stop(t)
	mv.holders.checkAlone(t)
	mv.checkNames(t)
	t.Logf("moves took: %s; meanwhile: %v", percentiles(mv.took), mv.faults)
	checkDriver(t, mv.machine())
}

func startMoves(t *testing.T) *moves {
	t.Helper()
	random := seeded(t)
	c := startDRA(t, "h100x8")
	mv := &moves{draCluster: c, random: random, at: map[string]string{}, faults: map[string]int{}}
	m := c.machine()
	render(t, "parts/cdi/kustomization.yaml", map[string]string{"HOOK": hook(m)})
	c.deployPlugin(t, m.Root, sharedHistory, shippedPart(t, "dra"), "parts/cdi")
	mv.nomad = launchNomad(t, "nomad", onMachine(m, sharedHistory, fmt.Sprintf("nomad_address = %q", nomadAPI))) // a GPU leaves Nomad when its allocations are known
	mv.nomad.awaitReady(t)
	mv.nomad.awaitDrivers(t, 1)
	to := map[string]string{}
	for i, gpu := range uuids(t, m) {
		to[gpu] = sides[i%len(sides)]
	}
	mv.order(t, to)
	mv.await(t)
	return mv
}

// movesSettle is for how long a side must have had no holder. Here kubelet writes its status every two seconds, and Nomad's agent sends its
// devices within one.
const movesSettle = "4s"

// order has the agents move GPUs.
func (mv *moves) order(t *testing.T, to map[string]string) {
	t.Helper()
	for _, side := range sides {
		var gpus []string
		for gpu, target := range to {
			if target == side {
				gpus = append(gpus, gpu)
			}
		}
		if len(gpus) > 0 {
			must(t, append([]string{
				binary("k8s-gpu"), "migrate", "apply", "--state-dir", filepath.Join(stateDir(), sharedHistory), "--settle", movesSettle, "--to", side,
			}, gpus...)...)
		}
	}
	maps.Copy(mv.at, to)
}

// next orders some moves, breaks something meanwhile, and waits until they are done. It returns how many there were.
func (mv *moves) next(t *testing.T) (count int) {
	t.Helper()
	to := map[string]string{}
	for _, gpu := range uuids(t, mv.machine()) {
		if side := sides[mv.random.IntN(len(sides))]; mv.random.IntN(2) == 0 && side != mv.at[gpu] {
			to[gpu] = side
		}
	}
	began := time.Now()
	mv.order(t, to)
	pause(mv.random, 5*time.Second)
	what := mv.fault(t)
	mv.faults[what]++
	if mv.random.IntN(4) == 0 { // another order before this one is done
		return len(to)
	}
	mv.await(t)
	mv.took = append(mv.took, time.Since(began))
	t.Logf("%d moves after %v; %s; now %v", len(to), time.Since(began).Round(time.Millisecond), what, slices.Sorted(maps.Values(mv.at)))
	return len(to)
}

// fault does one thing that happens to a node, or nothing.
func (mv *moves) fault(t *testing.T) string {
	t.Helper()
	switch mv.random.IntN(6) {
	case 0:
		mv.killAgain(t)
		return "k8s-gpu killed"
	case 1:
		mv.nomad.endPlugin(t, syscall.SIGKILL)
		return "nomad-gpu killed"
	case 2:
		must(t, "sh", "-c", "rm -f "+cdiFolder+"/*")
		return "CDI folder emptied"
	case 3:
		must(t, "rm", "-f", filepath.Join(stateDir(), sharedHistory, "assignments.json"))
		return "assignments removed"
	case 5: // afterwards GPUs wait for minutes: what a young kubelet has of its pods is not complete
		mv.kubelet.stop(t, syscall.SIGKILL)
		mv.startKubelet()
		return "kubelet killed"
	default:
		return "nothing"
	}
}

// offers are the sides that offer each GPU to new work.
func (mv *moves) offers() (map[string]string, error) {
	offered := map[string]string{}
	add := func(gpu, side string) { offered[gpu] = strings.TrimPrefix(offered[gpu]+" "+side, " ") }
	plugin, err := mv.healthy(gpuResource)
	for _, gpu := range plugin {
		add(gpu, "device-plugin")
	}
	devices, err2 := mv.published()
	for _, gpu := range slices.Collect(maps.Keys(mv.at)) {
		if d, found := devices[deviceName(gpu)]; found && len(d.Taints) == 0 {
			add(gpu, "dra")
		}
	}
	n, err3 := mv.nomad.node()
	for _, g := range n.gpus() {
		if g.Healthy {
			add(g.ID, "nomad")
		}
	}
	return offered, errors.Join(err, err2, err3)
}

// movesAtMost is how long a move may take: works run for four seconds and wait for eight, then the side settles.
const movesAtMost = offersAtMost + time.Minute

// await waits until each GPU is offered by the side that was ordered, and by no other.
func (mv *moves) await(t *testing.T) {
	t.Helper()
	await(t, "the moves to be done", movesAtMost, func() error {
		offered, err := mv.offers()
		if err == nil && !maps.Equal(offered, mv.at) {
			err = fmt.Errorf("offered %v, want %v", offered, mv.at)
		}
		return errors.Join(err, mv.kubelet.alive(), mv.nomad.process.alive())
	})
}

// all moves every GPU to one side.
func (mv *moves) all(t *testing.T, side string) {
	t.Helper()
	to := map[string]string{}
	for gpu := range mv.at {
		to[gpu] = side
	}
	mv.order(t, to)
	mv.await(t)
}

// checkNames fails if a container had a CDI name that no file defined, beyond the moments in which the folder was empty.
func (mv *moves) checkNames(t *testing.T) {
	t.Helper()
	var list struct {
		Items []struct{ Reason, Message string }
	}
	if err := mv.get("/api/v1/namespaces/default/events", &list); err != nil {
		t.Fatal(err)
	}
	reasons := map[string]int{}
	for _, e := range list.Items {
		reasons[e.Reason]++
		if strings.Contains(e.Message, "unresolvable") && mv.faults["CDI folder emptied"] == 0 {
			t.Errorf("%s: %s", e.Reason, e.Message)
		}
		if e.Reason == "FailedPrepareDynamicResources" {
			t.Logf("%s", e.Message)
		}
	}
	t.Logf("events of pods: %v", reasons)
}
