package ownership

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

var (
	faultRuns = flag.Int("faults", 60, "runs of TestDiskFaults")
	faultSeed = flag.Uint64("faultseed", 1, "of the first run of TestDiskFaults")
)

// faultyNode is a node with two agents on a disk with faults.
type faultyNode struct {
	*testing.T
	*rand.Rand
	smallDisk smallDisk
	seed      uint64
	boots     int
	fault     string // "" = none
	unlock    func() // of the folder, with the fault "locked"; nil = it is not locked
	agents    []*faultyAgent
	history   []string

	given, offeredUnrecorded, unseen int
}

// faultyAgent is an agent with its orchestrator.
type faultyAgent struct {
	name    string
	api     inventory.API
	gpus    []int
	running *agent // nil = it does not run
	restart time.Time
	work    map[int]bool // by GPU
	record  *record
}

func (n *faultyNode) did(format string, args ...any) {
	n.history = append(n.history, fmt.Sprintf(format, args...))
}

// set sets a fault of the disk. One that is in use can't become read-only.
func (n *faultyNode) set(fault string) {
	d := n.smallDisk
	switch {
	case n.fault == "read-only":
		check.NoError(n, d.remount(0, ""))
	case n.unlock != nil:
		n.unlock()
		n.unlock = nil
	}
	d.free()
	switch n.fault = fault; fault {
	case "full":
		d.fill()
	case "no inode":
		d.takeInodes()
	case "locked": // by an agent that waits for the disk
		if n.unlock, _ = lockFolder(n.Context(), d.path(FolderName)); n.unlock == nil {
			n.fault = ""
		}
	case "read-only":
		if err := d.remount(syscall.MS_RDONLY, ""); err != nil {
			n.fault = ""
		}
	}
	n.did("the disk is %q", n.fault)
}

func (n *faultyNode) start(a *faultyAgent) {
	a.running = start(n.T, setup{
		name: a.name, stateDir: n.smallDisk.dir, boot: fmt.Sprint("boot-", n.boots),
		cfg:   on(inventory.OverlapRefuse, a.gpus...),
		serve: func(w *Watcher) { w.Serve([]inventory.API{a.api}, Readers{a.api: a.record.read}) },
	})
}

// kill ends an agent. One that could leave nothing on disk is started again soon: later no agent could know that it was
// there.
func (n *faultyNode) kill(a *faultyAgent) {
	synctest.Wait()
	a.restart = time.Time{}
	if a.running.watcher.store.stateLock != nil {
		a.restart = time.Now().Add(time.Duration(n.IntN(15)) * time.Second)
		n.unseen++
	}
	if a.running.watcher.store.unrecorded {
		n.offeredUnrecorded++
	}
	a.running.end()
	a.running = nil
}

// step does something at random.
func (n *faultyNode) step() {
	a := n.agents[n.IntN(2)]
	switch n.IntN(12) {
	case 0, 1:
		n.set([]string{"", "", "full", "full", "no inode", "read-only", "locked"}[n.IntN(7)])
	case 2, 3, 4:
		if a.running == nil {
			gpus := a.gpus
			if n.IntN(4) == 0 { // another policy
				a.gpus = [][]int{{0, 1, 2, 3}, {0, 1}, {2}, {3, 1}}[n.IntN(4)]
			}
			n.did("%s starts with %v", a.name, a.gpus)
			n.start(a)
			a.gpus = gpus
		}
	case 5:
		if a.running != nil {
			n.did("%s is killed", a.name)
			n.kill(a)
		}
	case 6:
		if n.IntN(4) > 0 {
			break
		}
		n.did("reboot")
		n.boots++
		for _, a := range n.agents {
			if a.running != nil {
				n.kill(a)
			}
			a.restart, a.work = time.Time{}, map[int]bool{}
			a.record.hold(nil)
		}
	case 7:
		for id := range a.work {
			delete(a.work, id)
			n.did("work of %s on GPU %d ends", a.name, id)
			a.record.hold(a.work)
			break
		}
	default:
		if a.running == nil {
			break
		}
		if all := a.running.schedulable(); len(all) > 0 {
			id := all[n.IntN(len(all))]
			n.did("%s gives GPU %d out", a.name, id)
			a.running.watcher.Reserved([]gpu.Device{{At: whole(id)}})
			a.work[id] = true
			a.record.hold(a.work)
			n.given++
		}
	}
}

// pass lets time pass. No GPU is ever offered twice, or offered while the other agent's work has it.
func (n *faultyNode) pass(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		pass(250 * time.Millisecond)
		for i, a := range n.agents {
			if a.running == nil {
				if !a.restart.IsZero() && time.Now().After(a.restart) {
					n.did("%s is restarted", a.name)
					n.start(a)
				}
				continue
			}
			other := n.agents[1-i]
			for _, id := range a.running.schedulable() {
				if other.work[id] {
					n.fatal("GPU %d is offered by %s, and work of %s has it", id, a.name, other.name)
				}
				if other.running != nil && slices.Contains(other.running.schedulable(), id) {
					n.fatal("GPU %d is offered by both agents", id)
				}
			}
		}
	}
}

func (n *faultyNode) fatal(format string, args ...any) {
	n.Helper()
	for _, a := range n.agents {
		if a.running != nil {
			n.Logf("%s: %+v\n%s", a.name, a.running.watcher.store, a.running.log)
		}
	}
	n.Fatalf("seed %d: %s after:\n%s", n.seed, fmt.Sprintf(format, args...), strings.Join(n.history, "\n"))
}

// hold sets which GPUs work has.
func (r *record) hold(gpus map[int]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.by = map[gpu.DeviceID]string{}
	for id := range gpus {
		r.by[coretest.GPU(id)] = fmt.Sprint("work on GPU ", id)
	}
}

// Two agents start, end and give GPUs out, the node is rebooted, and the disk is full, without inodes, read-only or hangs,
// all at random. No GPU is ever offered by both agents, or offered by one while the other's work has it. When the disk
// works and both run, each GPU is offered within a minute.
func TestDiskFaults(t *testing.T) {
	given, unrecorded, unseen := 0, 0, 0
	for run := range *faultRuns {
		seed := *faultSeed + uint64(run)
		d := mount(t, 0)
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 7))
			gpus := [][][]int{{{0, 1, 2, 3}, {0, 1, 2, 3}}, {{0, 1, 2}, {1, 2, 3}}, {{0, 1}, {2, 3}}}[random.IntN(3)]
			n := &faultyNode{T: t, Rand: random, smallDisk: d, seed: seed, agents: []*faultyAgent{
				{name: "nomad-gpu", api: inventory.Nomad, gpus: gpus[0], work: map[int]bool{}, record: &record{}},
				{name: "k8s-gpu", api: inventory.DevicePlugin, gpus: gpus[1], work: map[int]bool{}, record: &record{}},
			}}
			if n.IntN(2) == 0 {
				check.NoError(t, os.Mkdir(d.path(FolderName), 0o700))
			}
			n.set([]string{"", "full", "no inode", "read-only"}[n.IntN(4)])
			n.did("the GPUs are %v", gpus)
			for range 40 {
				n.step()
				n.pass(time.Duration(n.IntN(8000)) * time.Millisecond)
			}
			n.did("the disk works, no work runs, and both agents are restarted")
			n.set("")
			n.pass(time.Second)
			for _, a := range n.agents {
				if a.running != nil {
					n.kill(a)
				}
				a.work = map[int]bool{}
				a.record.hold(nil)
				n.start(a)
			}
			n.pass(time.Minute)
			offered := slices.Concat(n.agents[0].running.schedulable(), n.agents[1].running.schedulable())
			slices.Sort(offered)
			if !slices.Equal(offered, []int{0, 1, 2, 3}) {
				n.fatal("only %v are offered", offered)
			}
			given, unrecorded, unseen = given+n.given, unrecorded+n.offeredUnrecorded, unseen+n.unseen
		})
	}
	t.Logf("%d times given out, %d times killed while GPUs were not recorded, %d times without a link",
		given, unrecorded, unseen)
	if given < *faultRuns || unrecorded < *faultRuns/10 || unseen < *faultRuns/20 {
		t.Error("little happened")
	}
}
