package storm

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// twoAgents is a machine with both agents, each in a process of its own, with a policy that divides the GPUs by index. They share a
// state directory.
type twoAgents struct {
	*storm
	assignments *assignments
	stateDir    string
	agents      map[string]*agent

	// of the goroutine that makes faults
	split      split
	ahead      time.Duration      // of the wall clock
	driver     bool               // a fault of the driver as a whole is in force
	repaired   map[int]time.Time  // when a GPU may have looked repaired last, by slot
	unreadable map[int]unreadable // by slot
	folderLock *os.File           // of the folder of the agents
	foreign    map[string]bool    // agents that have found the history of another node since the last quiet period
}

// unreadable is the latest time in which a GPU could not always be read.
type unreadable struct{ began, ended time.Time }

func newTwoAgents(t testing.TB, o options) *twoAgents {
	p := &twoAgents{
		storm: newStorm(t, o), assignments: newAssignments(o.limit(3 * time.Second)), stateDir: t.TempDir(), agents: map[string]*agent{},
		repaired: map[int]time.Time{}, unreadable: map[int]unreadable{}, foreign: map[string]bool{},
		split: split{Number: 1, Nomad: []int{0, 1, 2, 3}},
	}
	must(t, os.Symlink("/proc/uptime", filepath.Join(p.Root, "proc/uptime")))
	for n := range gpus {
		p.assignments.addGPU(p.uuid(n), false)
	}
	for _, name := range agentNames {
		p.agents[name] = &agent{name: name, p: p}
	}
	p.atOnce = gpus - 3
	p.kinds = append(p.gpuKinds(), p.agentKinds()...)
	t.Cleanup(func() {
		p.cancel()
		for _, a := range p.agents {
			a.kill()
		}
		must(t, p.Heal(), p.ForgiveViolations())
	})
	must(t, p.startAll(nil))
	return p
}

func (p *twoAgents) uuid(slot int) gpu.DeviceID { return gpu.DeviceID(p.UUID(slot)) }

// Both agents, with rules by index and count: no device is ever in two pools, or offered by both agents, until an operator rebinds.
func TestStormOfTwoAgents(t *testing.T) {
	o := optionsFromEnvironment(t)
	if os.Getenv("TANDEM_STORM_FAULTS") == "" {
		o.faults /= 2 // each takes longer than those of the other tests
	}
	p := newTwoAgents(t, o)
	defer p.report()
	p.quietPeriod()
	began := time.Now()
	for made := 0; p.ctx.Err() == nil && (made < o.faults || time.Since(began) < o.lasts); {
		n := min(200, o.faults)
		in := planned{slots: p.random.Perm(gpus), faults: n, length: time.Duration(n) * 80 * time.Millisecond, driver: true}
		p.play(p.plan(in), made, func() {
			if err := p.assignments.checkBoth(); err != nil {
				p.fail("%w", err)
			}
		})
		made += n
		p.quietPeriod()
		if testing.Verbose() && made%1000 == 0 {
			inventories, moved := p.assignments.counts()
			t.Logf("%v: %d faults, %d inventories, %d changes of index", time.Since(began).Round(time.Second), made, inventories, moved)
		}
	}
	if p.ctx.Err() != nil {
		return
	}
	inventories, moved := p.assignments.counts()
	t.Logf("seed %d, %v, %s\n%d inventories, the NVML index of a GPU changed %d times between two of them", o.seed,
		time.Since(began).Round(time.Second), p.tally(), inventories, moved)
	if moved < o.faults/10 {
		t.Errorf("the NVML index of a GPU changed %d times: too rarely for %d faults to mean anything", moved, o.faults)
	}
}

// quietPeriod begins when no fault is in force. An operator replaces what does not recover and rebinds; then everything must be correct.
func (p *twoAgents) quietPeriod() {
	p.journal.note("quiet period")
	for try := 0; p.ctx.Err() == nil; try++ { // an XID from before may be read only now
		p.replaceAndRebind()
		if p.until(recovery, func() bool { return p.sameNumbering() && len(p.differences()) == 0 }) {
			break
		}
		if try == 2 {
			p.fail("without faults:\n%s", strings.Join(p.differences(), "\n"))
		}
	}
	if p.ctx.Err() == nil {
		p.assignments.forgetPeriods(p.agents[forNomad].offer().Generation)
		p.checkFiles()
		p.checkViolations(len(p.agents), func(line string) bool {
			return strings.Contains(line, "machine.conf") || strings.Contains(line, "faults") // they could not be opened
		})
		must(p.t, p.Heal(simdriver.All))
	}
}

// replaceAndRebind replaces the GPUs that do not recover by themselves, and has one of the agents rebind.
func (p *twoAgents) replaceAndRebind() {
	for n := range gpus {
		if p.ctx.Err() == nil && !p.until(5*time.Second, func() bool { return p.healthy(p.uuid(n)) }) {
			if err := p.replaceNow(&fault{slot: n}); err != nil {
				p.fail("%w", err)
			}
		}
	}
	if !p.until(recovery, p.forgotten) {
		p.fail("without faults GPUs are listed that no longer exist")
	}
	if !p.until(recovery, p.sameNumbering) {
		p.fail("without faults the agents have different numberings")
	}
	if p.ctx.Err() != nil {
		return
	}
	a := p.agents[one(p.random, agentNames...)]
	before := a.offer().Generation
	for _, verb := range []string{"rebind", "save"} {
		if err := a.command(verb, ""); err != nil {
			p.fail("%w", err)
		}
	}
	p.until(recovery, func() bool { return p.sameNumbering() && a.offer().Generation > before })
}

// healthy reports whether no agent has a unit of a GPU that takes no work.
func (p *twoAgents) healthy(gpu gpu.DeviceID) bool {
	for _, a := range p.agents {
		if o := a.ready(); o == nil || o.unhealthy(gpu) {
			return false
		}
	}
	return true
}

func (o *offered) unhealthy(gpu gpu.DeviceID) bool {
	return slices.ContainsFunc(o.Units, func(u offeredUnit) bool { return u.GPU == gpu && !u.Schedulable })
}

// forgotten reports whether the agents have dropped all GPUs that no longer exist.
func (p *twoAgents) forgotten() bool {
	present := map[gpu.DeviceID]bool{}
	for n := range gpus {
		present[p.uuid(n)] = true
	}
	for _, a := range p.agents {
		o := a.ready()
		if o == nil {
			return false
		}
		for id := range o.Numbers {
			if !present[id] {
				return false
			}
		}
	}
	return true
}

// differences are those to what must be without faults: each GPU is offered by the agent that its index belongs to.
func (p *twoAgents) differences() (lines []string) {
	slots, err := p.Slots()
	if err != nil || len(slots) != gpus {
		return []string{fmt.Sprintf("there are %d GPUs: %v", len(slots), err)}
	}
	for _, a := range p.agents {
		o := a.ready()
		if o == nil {
			return append(lines, a.name+" has not read the driver")
		}
		offers := map[gpu.DeviceID]offeredUnit{}
		for _, u := range o.Units {
			offers[u.Device] = u
		}
		for index, n := range slots {
			gpu := p.uuid(n)
			u, listed := offers[gpu]
			if mine := p.split.owner(index) == a.name; mine != listed || listed && (!u.Schedulable || policyOf(u.Pool) != p.split.Number) || o.Numbers[gpu].GPU != index {
				lines = append(lines, fmt.Sprintf("%s: GPU %d (%s, number %v, generation %d): listed %v, %+v", a.name, index, gpu, o.Numbers[gpu], o.Generation, listed, u))
			}
		}
	}
	return lines
}

// checkFiles fails the test if a valid history was set aside, or a foreign one was not.
func (p *twoAgents) checkFiles() {
	for _, a := range p.agents {
		if err := a.command("save", ""); err != nil {
			p.fail("%w", err)
		}
		aside, _ := filepath.Glob(a.historyPath() + ".*") // its only error is a bad pattern
		for _, path := range aside {
			if !strings.Contains(path, ".other") {
				p.fail("there is %s", path)
			}
			if err := os.Remove(path); err != nil {
				p.fail("%w", err)
			}
		}
		if p.foreign[a.name] != (len(aside) > 0) {
			p.fail("%s found the history of another node: %v, set aside: %v", a.name, p.foreign[a.name], aside)
		}
	}
	clear(p.foreign)
}
