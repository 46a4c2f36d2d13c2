package agents

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	// backWithin is how soon after the last fault each GPU is held or offered: a minute, and as much for a busy machine.
	backWithin = 2 * time.Minute

	// messageTime is how long an orchestrator may still have an older list.
	messageTime = 3 * time.Second
)

// Both agents share a machine and a disk, with the default settings. Whatever the disk and the driver do, and whenever agents are killed
// and the node is rebooted: no hardware has two holders, none is offered while another has it, and all of it comes back.
//
//	TANDEM_INTERLEAVINGS=500   how many; 4 by default
//	TANDEM_STORM_SEED=1        the first seed, 1 by default; a failure prints its own
func TestOneHolder(t *testing.T) {
	t.Parallel()
	first, err := strconv.ParseUint(cmp.Or(os.Getenv("TANDEM_STORM_SEED"), "1"), 10, 64)
	check.NoError(t, err)
	n, err := strconv.ParseUint(cmp.Or(os.Getenv("TANDEM_INTERLEAVINGS"), "4"), 10, 64)
	check.NoError(t, err)
	for seed := first; seed < first+n; seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			newNode(t, seed).run()
		})
	}
}

// place is hardware: a GPU, or an instance of one.
type place struct {
	slot     int
	instance string // "" = the whole GPU
}

func (p place) overlaps(o place) bool {
	return p.slot == o.slot && (p.instance == "" || o.instance == "" || p.instance == o.instance)
}

// workload is work that an orchestrator has started.
type workload struct {
	at                 place
	agent              *agent
	id, group, started string // started is its name
}

// node is a machine with both agents and what their orchestrators know.
type node struct {
	*testing.T
	random  *rand.Rand
	driver  *simdriver.Machine
	disk    *faultyDisk
	agents  []*agent
	api     *nomadAPI
	pods    *kubelettest.PodResources
	places  map[string]place // by device ID
	calls   []string         // of NVML, that an agent makes
	work    []workload
	names   int
	suspect map[string]time.Time // what looks wrong, and since when
	journal strings.Builder
	began   time.Time
}

func newNode(t *testing.T, seed uint64) *node {
	n, k := newBoth(t, map[string]any{"health_period": "500ms", "recovery_dwell": "2s"})
	k.settings["mig_strategy"] = "mixed"
	w := &node{
		T: t, random: rand.New(rand.NewPCG(seed, 0)), driver: n.driver, disk: newFaultyDisk(t, n.dir), agents: []*agent{n, k},
		suspect: map[string]time.Time{}, began: time.Now(),
	}
	check.NoError(t, os.Mkdir(w.disk.state(), 0o700)) // as the kubelet does for a pod, and the package for a host
	for _, a := range w.agents {
		a.state = w.disk.state()
		a.settings["state_dir"] = a.state
	}
	w.api, n.settings["nomad_address"] = startNomadAPI(t)
	socket := filepath.Join(k.dir, "pods", "kubelet.sock")
	pods, err := kubelettest.ServePodResources(socket)
	check.NoError(t, err)
	t.Cleanup(pods.Close)
	w.pods, k.settings["pod_resources_socket"] = pods, socket
	w.divide()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("TANDEM_STORM_SEED=%d\n%s", seed, &w.journal)
		}
	})
	return w
}

// divide makes seven instances of GPU 0 and notes what each ID means.
func (w *node) divide() {
	check.NoError(w.T, w.driver.SetMIG(0, slices.Repeat([]string{"1g.10gb"}, 7)...))
	instances, err := w.driver.Instances(0)
	check.NoError(w.T, err)
	w.places = map[string]place{}
	for slot := range 8 {
		w.places[w.driver.UUID(slot)] = place{slot: slot}
	}
	for _, id := range instances {
		w.places[id] = place{instance: id}
	}
}

func (w *node) note(format string, args ...any) {
	fmt.Fprintf(&w.journal, "%8.3f ", time.Since(w.began).Seconds())
	fmt.Fprintf(&w.journal, format+"\n", args...)
}

// run makes random steps, ends all faults, and waits until the whole machine is in use or offered.
func (w *node) run() {
	w.begin()
	for range 20 {
		w.step()
		w.pass(time.Duration(w.random.IntN(1000)) * time.Millisecond)
	}
	w.note("all faults end")
	w.disk.heal(w.T)
	check.NoError(w.T, w.driver.Heal())
	for _, a := range w.agents {
		w.start(a)
	}
	healed := time.Now()
	for {
		missing := w.missing()
		if len(missing) == 0 {
			break
		}
		if time.Since(healed) > backWithin {
			w.Fatalf("%v after the last fault neither held nor offered: %v", backWithin, missing)
		}
		w.pass(100 * time.Millisecond)
	}
	w.Logf("%d workloads; all hardware after %v", w.names, time.Since(healed).Round(time.Millisecond))
}

// begin starts the node: one agent may be alone for a time, and the disk may be unusable from the beginning.
func (w *node) begin() {
	if w.random.IntN(2) == 0 {
		w.harmDisk()
	}
	first := w.random.IntN(2)
	w.start(w.agents[first])
	if w.random.IntN(2) == 0 {
		w.pass(time.Second)
		w.place(w.agents[first])
	}
	w.start(w.agents[1-first])
}

func (w *node) step() {
	a := w.agents[w.random.IntN(2)]
	switch n := w.random.IntN(100); {
	case n < 16:
		w.start(a)
	case n < 22:
		w.kill(a)
	case n < 25:
		w.reboot()
	case n < 59:
		w.place(a)
	case n < 62:
		w.finish()
	case n < 80:
		w.harmDisk()
	case n < 86:
		w.note("the disk is sound")
		w.disk.heal(w.T)
	case n < 97:
		w.lie()
	default:
		w.note("the driver tells the truth")
		check.NoError(w.T, w.driver.Heal())
	}
}

// pass lets time pass, and looks at what the orchestrators have.
func (w *node) pass(d time.Duration) {
	for end := time.Now().Add(d); ; time.Sleep(20 * time.Millisecond) {
		w.look()
		if time.Now().After(end) {
			return
		}
	}
}

func (w *node) running(a *agent) bool { return a.process != nil && !a.exited() }

func (w *node) start(a *agent) {
	if w.running(a) {
		return
	}
	w.note("%s starts", a.program)
	a.start()
}

func (w *node) kill(a *agent) {
	if !w.running(a) {
		return
	}
	w.note("%s is killed", a.program)
	check.NoError(w.T, w.disk.thaw()) // a process that waits for the disk does not end
	a.kill()
}

// reboot ends all processes and all work. What is wrong with the disk stays.
func (w *node) reboot() {
	for _, a := range w.agents {
		w.kill(a)
	}
	w.note("the node is rebooted")
	for _, each := range w.work {
		w.end(each)
	}
	w.work = nil
	check.NoError(w.T, w.driver.Reboot())
	w.divide()
	clear(w.suspect)
}

// harmDisk makes the disk full, read-only or slow.
func (w *node) harmDisk() {
	check.NoError(w.T, w.disk.thaw())
	switch w.random.IntN(4) {
	case 0:
		w.note("the disk is full")
		check.NoError(w.T, w.disk.fill())
	case 1:
		w.note("the disk has no inodes")
		check.NoError(w.T, w.disk.useInodes())
	case 2:
		w.note("the disk is read-only")
		check.NoError(w.T, w.disk.readOnly())
	default:
		took := time.Duration(500+w.random.IntN(6000)) * time.Millisecond
		w.note("writes take %v", took)
		check.NoError(w.T, w.disk.slow(took, w.pass))
	}
}

// lie makes a call of NVML answer wrongly: once for each agent, for three seconds, or until the driver tells the truth.
func (w *node) lie() {
	if len(w.calls) == 0 {
		calls, err := w.driver.Calls()
		check.NoError(w.T, err)
		w.calls = slices.Sorted(maps.Keys(calls))
		w.calls = slices.DeleteFunc(w.calls, func(call string) bool { return strings.HasPrefix(call, "nvmlErrorString") })
		if len(w.calls) == 0 {
			return
		}
	}
	call := w.calls[w.random.IntN(len(w.calls))]
	code := []string{"NOT_SUPPORTED", "NO_PERMISSION", "INVALID_ARGUMENT", "FUNCTION_NOT_FOUND"}[w.random.IntN(4)]
	target := []simdriver.Target{simdriver.All, simdriver.GPU(0), simdriver.GPU(w.random.IntN(8))}[w.random.IntN(3)]
	switch w.random.IntN(3) {
	case 0:
		w.note("%s %s answers %s once", target, call, code)
		check.NoError(w.T, w.driver.Fail(target, call, code, 1))
	case 1:
		w.note("%s %s answers %s for 3 s", target, call, code)
		check.NoError(w.T, w.driver.Fail(target, call, code, simdriver.Always))
		w.pass(3 * time.Second)
		check.NoError(w.T, w.driver.Heal())
	default:
		w.note("%s %s answers %s from now on", target, call, code)
		check.NoError(w.T, w.driver.Fail(target, call, code, simdriver.Always))
	}
}

// offers are the healthy devices that an orchestrator has of an agent.
func (w *node) offers(a *agent) map[string]rig.View {
	if !w.running(a) {
		return nil
	}
	var seen map[string]rig.View
	if a.program == nomadGPU {
		seen = a.nomad.Devices()
	} else {
		seen = rig.KubeletDevices(a.kubelet)
	}
	maps.DeleteFunc(seen, func(_ string, v rig.View) bool { return !v.Healthy })
	return seen
}

// uses reports whether an orchestrator counts a device as in use: Nomad by group and ID, the kubelet by resource and ID.
func (w *node) uses(a *agent, v rig.View) bool {
	return slices.ContainsFunc(w.work, func(o workload) bool { return o.agent == a && o.id == v.ID && o.group == v.Name })
}

// place has an orchestrator start work on a device that it takes for free.
func (w *node) place(a *agent) {
	free := w.offers(a)
	maps.DeleteFunc(free, func(_ string, v rig.View) bool { return w.uses(a, v) })
	if len(free) == 0 {
		return
	}
	ids := slices.Sorted(maps.Keys(free))
	id := ids[w.random.IntN(min(len(ids), 3))] // agents meet at the same GPUs
	at, known := w.places[id]
	if !known {
		w.Fatalf("%s offers %s, which does not exist", a.program, id)
	}
	w.names++
	next := workload{at: at, agent: a, id: id, group: free[id].Name, started: fmt.Sprintf("work%d", w.names)}
	if a.program == nomadGPU { // the client has the allocation before it reserves
		w.api.hold(next.started, id)
	}
	ctx, cancel := context.WithTimeout(w.Context(), timeout)
	defer cancel()
	var err error
	if a.program == nomadGPU {
		_, err = a.nomad.Reserve(id)
	} else {
		_, err = rig.Allocate(ctx, a.kubelet, next.group, id)
	}
	if err != nil {
		w.note("%s refuses %s for %s: %v", a.program, id, next.started, err)
		w.end(next)
		return
	}
	w.note("%s gives %s to %s", a.program, id, next.started)
	for _, o := range w.work {
		if o.at.overlaps(at) {
			w.Fatalf("%s of %s and %s of %s have the same hardware: %s and %s", o.started, o.agent.program, next.started, a.program, o.id, id)
		}
	}
	w.work = append(w.work, next)
	if a.program != nomadGPU {
		w.pods.Hold("default/"+next.started, next.group, id)
		w.record(a)
	}
}

// record writes the kubelet's checkpoint.
func (w *node) record(a *agent) {
	var all []kubelettest.CheckpointEntry
	for _, o := range w.work {
		if o.agent == a {
			all = append(all, kubelettest.Entry("default/"+o.started, "main", o.group, o.id))
		}
	}
	check.NoError(w.T, a.kubelet.Record(all...))
}

// finish ends one workload.
func (w *node) finish() {
	if len(w.work) == 0 {
		return
	}
	i := w.random.IntN(len(w.work))
	each := w.work[i]
	w.note("%s ends", each.started)
	w.work = slices.Delete(w.work, i, i+1)
	w.end(each)
}

// end removes a workload from what its orchestrator knows.
func (w *node) end(each workload) {
	if each.agent.program == nomadGPU {
		w.api.hold(each.started, "")
		return
	}
	w.pods.Forget("default/" + each.started)
	w.record(each.agent)
}

// look fails the test if an orchestrator has what it must not have, for longer than a message may take.
func (w *node) look() {
	now := map[string]bool{}
	all := []map[string]rig.View{w.offers(w.agents[0]), w.offers(w.agents[1])}
	for i, offers := range all {
		a := w.agents[i]
		for id, v := range offers {
			at := w.places[id]
			for _, o := range w.work {
				if o.at.overlaps(at) && (o.agent != a || o.id != id || o.group != v.Name) {
					now[fmt.Sprintf("%s offers %s as %s, which %s of %s has as %s", a.program, id, v.Name, o.started, o.agent.program, o.id)] = true
				}
			}
			for j, others := range all {
				for other := range others {
					if (j > i || j == i && other > id) && w.places[other].overlaps(at) {
						now[fmt.Sprintf("%s offers %s, and %s offers %s", a.program, id, w.agents[j].program, other)] = true
					}
				}
			}
		}
	}
	for what := range now {
		if w.suspect[what].IsZero() {
			w.suspect[what] = time.Now()
		}
		if time.Since(w.suspect[what]) > messageTime {
			w.note("%s", what)
			w.Fatal(what)
		}
	}
	maps.DeleteFunc(w.suspect, func(what string, _ time.Time) bool { return !now[what] })
}

// missing is the hardware that nothing has and that nothing offers.
func (w *node) missing() (ids []string) {
	seen := maps.Clone(w.offers(w.agents[0]))
	if seen == nil {
		seen = map[string]rig.View{}
	}
	maps.Copy(seen, w.offers(w.agents[1]))
	for id, at := range w.places {
		if _, offered := seen[id]; offered || id == w.driver.UUID(0) {
			continue
		}
		if !slices.ContainsFunc(w.work, func(o workload) bool { return o.at == at }) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}
