package rescue_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

var (
	seeds = flag.Uint64("seeds", 20, "random fleets of TestRandomFleets")
	steps = flag.Int("steps", 200, "steps of each")
)

// storm is a world in which faults strike, servers go away, and orchestrators answer at random. It has its own books of what was done.
type storm struct {
	*world
	*rand.Rand

	sent     map[string]*sent // by cluster and work
	reserved []reserved
	struck   int
	moved    int
	prompt   bool // work that was stopped ends in its time
}

// sent is what was done to work.
type sent struct {
	node     string
	done     bool // the orchestrator ends it
	ends     time.Time
	ended    time.Time
	answered rescue.AnswerKind
}

// reserved is an attempt for a GPU.
type reserved struct {
	cluster, node string
	gpu           gpu.DeviceID
	at            time.Time
}

// TestRandomFleets has many steps of random fleets. Whatever happens: all work that is acted on has a GPU with a fault that counts, by its orchestrator's
// own record; no budget is exceeded; each replacement finds a place, wherever the others went; work that was stopped is not stopped again; and mode
// report has the same list.
func TestRandomFleets(t *testing.T) {
	var struck, moved int
	for seed := range *seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := newStorm(t, seed)
			for range *steps {
				s.step()
				if t.Failed() {
					return
				}
			}
			struck, moved = struck+s.struck, moved+s.moved
		})
	}
	t.Logf("%d faults, %d workloads moved", struck, moved)
	if !t.Failed() && moved < 4*int(*seeds) { //nolint:gosec // a small number
		t.Errorf("of %d faults only %d workloads were moved: the test shows too little", struck, moved)
	}
}

func newStorm(t *testing.T, seed uint64) *storm {
	r := rand.New(rand.NewPCG(seed, 27)) //nolint:gosec // a test that repeats
	s := &storm{world: newWorld(t, 1, 1), Rand: r, sent: map[string]*sent{}}
	s.policy = rescue.Policy{
		Delay: time.Duration(r.IntN(90)) * time.Second, MaxGPUs: 1 + r.IntN(5), MaxNodes: 1 + r.IntN(6), MaxPercent: r.IntN(3) * 10,
		CoolDown: time.Duration(r.IntN(120)) * time.Second, Attempts: 1 + r.IntN(3), QuorumNodes: 2 + r.IntN(20), QuorumTime: 10 * minute,
		Preempt: r.IntN(4) == 0, Deadline: time.Duration(r.IntN(3)) * 10 * minute,
	}
	if err := s.policy.Check(); err != nil {
		t.Fatal(err)
	}
	s.clusters = nil
	for i := range 1 + r.IntN(3) {
		kind := []string{"nomad", "kube"}[r.IntN(2)]
		c := newCluster(fmt.Sprintf("%s-%d", kind, i), 2+r.IntN(12), 1+r.IntN(8))
		c.Mode = []rescue.Mode{rescue.ModeAct, rescue.ModeAct, rescue.ModeAct, rescue.ModeAct, rescue.ModeAct, rescue.ModeReport, rescue.ModeOff}[r.IntN(7)]
		s.clusters = append(s.clusters, c)
		s.fill(c)
	}
	return s
}

// fill shares some GPUs of a cluster, and starts work on most.
func (s *storm) fill(c *rescue.Cluster) {
	for i := range c.Nodes {
		for _, pool := range []string{"a", "b", "c"}[s.IntN(3):] {
			c.Pools[pool] = append(c.Pools[pool], c.Nodes[i].Name)
		}
	}
	for n := range c.Nodes {
		for g := range c.Nodes[n].Devices {
			if s.IntN(8) == 0 {
				c.Nodes[n].Devices[g].Kind, c.Nodes[n].Devices[g].Units = "shared", 3
			}
		}
	}
	for range len(c.Nodes) * len(c.Nodes[0].Devices) {
		if s.IntN(4) > 0 {
			s.arrive(c)
		}
	}
}

// arrive starts work, if it has a place.
func (s *storm) arrive(c *rescue.Cluster) {
	s.after++
	one := s.newWork(c, fmt.Sprintf("%s-%d", c.Name, s.after))
	if s.place(c, &one, nil) {
		one.Phase = rescue.Running
		c.Work = append(c.Work, one)
	}
}

// newWork returns work of a random kind that has no place yet.
func (s *storm) newWork(c *rescue.Cluster, id string) rescue.Work {
	one := rescue.Work{
		ID: id, Namespace: "default", Name: id, Controller: rescue.Service, EndsWithin: time.Duration(s.IntN(40)) * time.Second,
		Needs: []rescue.Need{{Kind: []string{"gpu", "gpu", "gpu", "shared"}[s.IntN(4)], Units: 1 + s.IntN(5)/4}},
	}
	if s.IntN(8) == 0 {
		one.Controller = rescue.Controller(s.IntN(6)) //nolint:gosec // one of six
	}
	one.LosesAttempt, one.Preempts = s.IntN(40) == 0, s.IntN(20) == 0
	one.Victims = s.IntN(3)
	one.ByDevice = c.AgentReports && s.IntN(4) == 0
	one.Pool = []string{"all", "a", "b", "c", "none"}[s.IntN(5)]
	return one
}

// place gives work devices of a random node that has them free; old is the work that it replaces, whose healthy devices it may use.
func (s *storm) place(c *rescue.Cluster, one, old *rescue.Work) bool {
	for _, n := range s.Perm(len(c.Nodes)) {
		node := &c.Nodes[n]
		if !slices.Contains(c.Pools[one.Pool], node.Name) || !node.Ready || node.Draining || !node.Schedulable {
			continue
		}
		var holds []rescue.Hold
		for _, g := range s.Perm(len(node.Devices)) {
			dev := &node.Devices[g]
			if dev.Kind != one.Needs[0].Kind || !dev.Healthy || len(holds) == one.Needs[0].Units {
				continue
			}
			for range max(dev.Units, 1) - s.used(c, dev, old) {
				if len(holds) < one.Needs[0].Units {
					holds = append(holds, rescue.Hold{Device: dev.ID})
				}
			}
		}
		if len(holds) == one.Needs[0].Units {
			one.Node, one.Holds, one.Phase = node.Name, holds, rescue.Pending
			return true
		}
	}
	return false
}

// used is how many units of a device work has, but for one workload.
func (s *storm) used(c *rescue.Cluster, dev *rescue.Device, but *rescue.Work) (n int) {
	for i := range c.Work {
		w := &c.Work[i]
		if w.Phase == rescue.Ended || but != nil && w.ID == but.ID {
			continue
		}
		for _, h := range w.Holds {
			if h.Device == dev.ID {
				n++
			}
		}
	}
	return n
}

// step has something happen, decides, checks what is decided, and has it done.
func (s *storm) step() {
	s.now = s.now.Add(time.Duration(1+s.IntN(40)) * time.Second)
	for range s.IntN(4) {
		s.happen()
	}
	s.continueWork()
	if s.IntN(10) > 0 {
		s.answering()
	} else {
		s.clusters[0].ReadAt = s.now
	}
	s.show()
	s.lag()
	switch {
	case s.IntN(20) == 0:
		s.restart()
	case s.state.Ledger.Stop != nil && s.IntN(2) == 0:
		s.state = s.state.Resumed(s.now)
	case s.IntN(100) == 0:
		s.state = s.state.Stopped("anna", "a try", s.now)
	}
	before, f := s.state, s.fleet()
	r := s.next()
	s.check(before, f, r)
	for _, i := range s.Perm(len(r.Acts)) {
		if !r.Acts[i].Listed {
			s.do(r.Acts[i])
		}
	}
}

// happen changes a node of a cluster.
func (s *storm) happen() {
	c := s.clusters[s.IntN(len(s.clusters))]
	n := s.IntN(len(c.Nodes))
	node := &c.Nodes[n]
	switch s.IntN(24) {
	case 0, 1, 6, 7, 8, 9:
		s.repair(c.Name, n)
	case 2:
		node.Ready = s.IntN(3) > 0
	case 3:
		node.Draining = s.IntN(3) == 0
	case 4:
		node.Schedulable = s.IntN(3) > 0
	case 10, 11:
		s.arrive(c)
	case 12: // work ends
		if w := &c.Work; len(*w) > 0 {
			if one := &(*w)[s.IntN(len(*w))]; one.Phase == rescue.Running {
				one.Phase = rescue.Ended
			}
		}
	case 5:
		c.Problem = []string{"", "", "", "connection refused"}[s.IntN(4)]
	default:
		s.strike(c, n)
	}
}

func (s *storm) strike(c *rescue.Cluster, n int) {
	f := xid([]int{48, 62, 74, 79, 95, 119, 120, 140}[s.IntN(8)])
	f.Since = s.now.Add(-time.Duration(s.IntN(120)) * time.Second)
	switch s.IntN(30) {
	case 0:
		f.State = health.Degraded
	case 1:
		f.Simulated = true
	case 2, 3, 4, 5:
		f.State, f.Repair = health.GPULost, health.Reboot
	case 6:
		f.HoldersKnown = false
	}
	s.fault(c.Name, n, s.IntN(len(c.Nodes[n].Devices)), f)
	s.struck++
}

// continueWork ends what was stopped, if its process can be ended, and starts replacements.
func (s *storm) continueWork() {
	for _, c := range s.clusters {
		for i := range c.Work {
			w := &c.Work[i]
			if one := s.sent[c.Name+" "+w.ID]; one != nil && one.done && w.Phase == rescue.Ending && !s.now.Before(one.ends) && (s.prompt || s.IntN(20) > 0) {
				w.Phase, one.ended = rescue.Ended, s.now
			}
			if w.Phase == rescue.Pending && (w.Replaces == "" || s.work(w.Replaces).Phase == rescue.Ended) {
				w.Phase = rescue.Running
			}
		}
	}
}

// lag has the servers show some devices as they were.
func (s *storm) lag() {
	for _, c := range s.clusters {
		for i := range c.Work {
			for h := range c.Work[i].Holds {
				switch s.IntN(12) {
				case 0:
					c.Work[i].Holds[h].Shown = rescue.ShownHealthy
				case 1:
					c.Work[i].Holds[h].Shown = rescue.NotShown
				}
			}
		}
	}
}

// check compares a result with the rules, by the storm's own books.
func (s *storm) check(before rescue.State, f rescue.Fleet, r rescue.Result) {
	s.Helper()
	if err := r.State.Ledger.Check(); err != nil {
		s.Errorf("the ledger: %v", err)
	}
	if n := len(text(s.T, r.State.Ledger)); n > 64<<10 {
		s.Errorf("the ledger has %d bytes", n)
	}
	listed := s.policy.Next(before, f.InMode(rescue.ModeReport), s.now).Acts
	acted := s.policy.Next(before, f.InMode(rescue.ModeAct), s.now).Acts
	for i := range listed {
		if !listed[i].Listed {
			s.Errorf("mode report makes an act: %+v", listed[i])
		}
		listed[i].Listed = false
	}
	if !hasListed(before) && !reflect.DeepEqual(listed, acted) {
		s.Errorf("mode report lists\n%+v\nand mode act does\n%+v", listed, acted)
	}
	for _, a := range r.Acts {
		s.checkAct(a)
	}
}

// hasListed reports whether the ledger has what was only listed: mode act forgets that.
func hasListed(s rescue.State) bool {
	return slices.ContainsFunc(s.Ledger.Rescues, func(r rescue.Rescue) bool { return r.Listed })
}

func (s *storm) checkAct(a rescue.Act) {
	c := s.cluster(a.Cluster)
	i := slices.IndexFunc(c.Nodes, func(n rescue.Node) bool { return n.Name == a.Node })
	node := &c.Nodes[i]
	if c.Mode != rescue.ModeAct != a.Listed || c.Problem != "" || !node.Ready || node.Draining || s.state.Ledger.Stop != nil {
		s.Errorf("%+v: mode %s, problem %q, node %+v, stop %+v", a, c.Mode, c.Problem, node, s.state.Ledger.Stop)
	}
	for _, t := range a.Work {
		w := s.work(t.ID)
		if w.Node != a.Node || w.Phase != rescue.Running || w.Controller != rescue.Service && w.Controller != rescue.Batch || w.LosesAttempt || !s.struckBy(node, w, a.GPU) {
			s.Errorf("%+v: the work is %+v, the faults %+v", a, w, node.Faults)
		}
	}
	if a.Listed {
		return
	}
	s.checkBudget(a)
}

// struckBy reports whether work holds a GPU with a fault that counts, and the servers do not show its device as healthy.
func (s *storm) struckBy(node *rescue.Node, w *rescue.Work, id gpu.DeviceID) bool {
	return slices.ContainsFunc(w.Holds, func(h rescue.Hold) bool {
		return h.Shown != rescue.ShownHealthy && h.Device == id && slices.ContainsFunc(node.Faults, func(f rescue.Fault) bool {
			return f.At.GPU == id && f.State >= health.Unhealthy && !f.Simulated && f.Repair != health.NoRepair
		})
	})
}

// checkBudget counts an act in the storm's own books.
func (s *storm) checkBudget(a rescue.Act) {
	for _, t := range a.Work {
		if one := s.sent[a.Cluster+" "+t.ID]; one != nil && one.answered == rescue.Accepted {
			s.Errorf("%+v: it was stopped before", a)
		}
	}
	s.checkAttempt(a)
	busy := map[string]bool{a.Node: true}
	for _, one := range s.sent {
		if one.done && (one.ended.IsZero() || s.now.Sub(one.ended) < s.policy.CoolDown) {
			busy[one.node] = true
		}
	}
	nodes := 0
	for _, c := range s.clusters {
		if c.Mode != rescue.ModeOff {
			nodes += len(c.Nodes)
		}
	}
	if most := max(s.policy.MaxNodes, nodes*s.policy.MaxPercent/100); len(busy) > most {
		s.Errorf("%+v: acts on %v, and %d nodes are allowed", a, busy, most)
	}
	for _, t := range a.Work {
		if one := s.sent[a.Cluster+" "+t.ID]; one == nil {
			s.sent[a.Cluster+" "+t.ID] = &sent{node: a.Node}
		}
	}
}

func (s *storm) checkAttempt(a rescue.Act) {
	i := slices.IndexFunc(s.state.Ledger.Rescues, func(r rescue.Rescue) bool {
		return !r.Listed && r.GPU == a.GPU && r.Reserved.Equal(s.now)
	})
	if i < 0 {
		return // a repeated act, or one that had to wait
	}
	attempts, gpus := 1, map[gpu.DeviceID]bool{a.GPU: true}
	for _, r := range s.reserved {
		if r.gpu == a.GPU && r.at.Equal(s.now) {
			return // counted: another workload of it
		}
		if r.gpu == a.GPU && s.now.Sub(r.at) < 24*time.Hour {
			attempts++
		}
		if r.cluster == a.Cluster && r.node == a.Node && s.now.Sub(r.at) < time.Hour {
			gpus[r.gpu] = true
		}
	}
	if attempts > s.policy.Attempts || len(gpus) > s.policy.MaxGPUs {
		s.Errorf("%+v: %d attempts within a day, %d GPUs of the node within an hour", a, attempts, len(gpus))
	}
	s.reserved = append(s.reserved, reserved{a.Cluster, a.Node, a.GPU, s.now})
}

// do has the orchestrator carry out an act, or not. A replacement gets its place at once, before any other thing happens.
func (s *storm) do(a rescue.Act) {
	if ok, why := s.policy.Still(s.state, a, s.fleet(), s.now); !ok {
		s.Errorf("%+v does not hold right after it was decided: %s", a, why)
	}
	kind := []rescue.AnswerKind{rescue.Accepted, rescue.Accepted, rescue.Accepted, rescue.Blocked, rescue.Failed, rescue.Accepted, rescue.Denied}[s.IntN(7)]
	done := kind == rescue.Accepted || kind == rescue.Failed && s.IntN(2) == 0
	for _, t := range a.Work {
		one := s.sent[a.Cluster+" "+t.ID]
		one.answered = kind
		if done {
			one.done, one.ends = true, s.now.Add(t.EndsWithin)
			s.stop(a, t.ID)
		}
	}
	if s.IntN(20) > 0 { // else the answer is lost
		s.answer(a, kind)
	}
}

func (s *storm) stop(a rescue.Act, id string) {
	c := s.cluster(a.Cluster)
	old := s.work(id)
	old.Phase = rescue.Ending
	s.after++
	next := *old
	next.ID, next.Replaces, next.Holds, next.Node = fmt.Sprintf("%s-%d", c.Name, s.after), id, nil, ""
	if !s.place(c, &next, old) {
		if a.Victims == 0 {
			s.Errorf("%+v: its replacement has no place", a)
		}
		return
	}
	c.Work = append(c.Work, next)
	s.moved++
}

// TestReportIsAct has 10,000 faults strike one fleet for which two controllers decide, one in mode act and one in mode report. What the first has done the
// second lists, step by step: with its own ledger, in which no act was made.
func TestReportIsAct(t *testing.T) {
	struck, acts := 0, 0
	for seed := uint64(1000); struck < 10_000; seed++ {
		s := newStorm(t, seed)
		s.prompt = true
		report := s.state
		for range *steps {
			s.happen()
			s.happen()
			s.now = s.now.Add(time.Duration(1+s.IntN(40)) * time.Second)
			s.continueWork()
			s.answering()
			s.show()
			if s.state.Ledger.Stop != nil && s.IntN(2) == 0 {
				s.state, report = s.state.Resumed(s.now), report.Resumed(s.now)
			}
			f := s.fleet()
			r, listed := s.policy.Next(s.state, f.InMode(rescue.ModeAct), s.now), s.policy.Next(report, f.InMode(rescue.ModeReport), s.now)
			s.state, report = r.State, listed.State
			if !sameActs(r.Acts, listed.Acts) {
				t.Fatalf("seed %d: mode act does\n%+v\nand mode report lists\n%+v\nits waits %+v", seed, r.Acts, listed.Acts, listed.Waits)
			}
			for _, a := range r.Acts {
				s.answer(a, rescue.Accepted)
				for _, one := range a.Work {
					s.sent[a.Cluster+" "+one.ID] = &sent{node: a.Node, done: true, ends: s.now.Add(one.EndsWithin)}
					s.stop(a, one.ID)
				}
			}
			acts += len(r.Acts)
		}
		struck += s.struck
	}
	t.Logf("%d faults, %d acts", struck, acts)
}

// sameActs reports whether the second has the acts of the first, all of them only listed.
func sameActs(acts, listed []rescue.Act) bool {
	return slices.EqualFunc(acts, listed, func(a, b rescue.Act) bool {
		was := b.Listed
		b.Listed = false
		return !a.Listed && was && reflect.DeepEqual(a, b)
	})
}
