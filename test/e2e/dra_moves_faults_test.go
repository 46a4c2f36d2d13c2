//go:build e2e

package e2e

import (
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// kubeletEvery is how many rounds end with one kill of kubelet, after which GPUs wait for minutes: what a young kubelet has of its pods
// is not complete.
const kubeletEvery = 60

// faultsInRepairs is how many rounds with a GPU that is being repaired end with one fault: a repair needs twice 30 s in which its agent runs and nothing has
// the GPU, of rounds of four.
const faultsInRepairs = 3

// fault does one thing that happens to a node, or nothing. It returns what it was.
func (mv *moves) fault(t *testing.T) string {
	t.Helper()
	chance, calm := mv.random.IntN(7), mv.random.IntN(faultsInRepairs) > 0
	if mv.rounds%kubeletEvery == kubeletEvery-1 {
		mv.kubelet.stop(t, syscall.SIGKILL)
		mv.startAgain()
		return "kubelet killed"
	}
	if calm && len(mv.repairs.since) > 0 {
		return "nothing"
	}
	switch chance {
	case 0:
		mv.holders.ends("k8s-gpu")
		mv.killAgain(t, mv.revive)
		return "k8s-gpu killed"
	case 1:
		mv.drivers = mv.nomad.awaitDrivers(t, mv.drivers+1) // Nomad gives a plugin up that ends before its stream is open
		mv.holders.ends("nomad-gpu")
		mv.nomad.endPlugin(t, syscall.SIGKILL)
		return "nomad-gpu killed"
	case 2:
		must(t, "sh", "-c", "rm -f "+cdiFolder+"/*")
		mv.emptied = append(mv.emptied, time.Now())
		return "CDI folder emptied"
	case 3:
		mv.remove(t, "ownership.json")
		return "owners removed"
	case 4:
		mv.remove(t, "ownership.json", "agents")
		return "owners and files of agents removed"
	case 5:
		mv.killResetServer(t)
		return "reset server killed"
	default:
		return "nothing"
	}
}

// revive starts kubelet again if it ended by a race of its own (of 1.37.1, and perhaps others), and fails if it ended otherwise. A pod whose
// extended resource comes from DRA has no devices of the device plugin that offers the same resource, so kubelet allocates some when it
// starts the container (to none: the resource is DRA's), beside the admission of other pods. Both change a map, devicesToReuse.
func (mv *moves) revive(t *testing.T) {
	t.Helper()
	err := mv.kubelet.alive()
	if err == nil {
		return
	}
	log := readLog(t, "kubelet")
	end := log[max(strings.LastIndex(log, "\npanic: "), strings.LastIndex(log, "\nfatal error: "), 0):]
	reason, _, _ := strings.Cut(strings.TrimSpace(end), "\n")
	if !strings.Contains(end[:min(len(end), 4096)], "devicemanager.(*ManagerImpl).Allocate") {
		t.Fatal(err)
	}
	t.Logf("kubelet ended by its race, and is started again: %s", reason)
	mv.faults["kubelet ended by its race"]++
	mv.startAgain()
}

func (mv *moves) startAgain() {
	mv.startKubelet()
	mv.young = time.Now()
}

// remove removes what the agents share on disk. What no agent remembers would be lost, so it waits for those that were ended.
func (mv *moves) remove(t *testing.T, names ...string) {
	t.Helper()
	await(t, "both agents", agentsAtMost, func() error {
		plan, err := command(binary("k8s-gpu"), "migrate", "plan", "--state-dir", mv.state())
		if err == nil && strings.Contains(plan, "not known: ") {
			err = errors.New(plan)
		}
		return err
	})
	argv := []string{"rm", "-rf"}
	for _, name := range names {
		argv = append(argv, filepath.Join(mv.state(), name))
	}
	mv.holders.ends("nomad-gpu", "k8s-gpu")                                     // as for a reset: that the driver is released is only there
	await(t, "the removal", agentsAtMost, func() error { return try(argv...) }) // agents write into a folder meanwhile
}
