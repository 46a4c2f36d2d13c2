package fleet_test

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

var stormFaults = flag.Int("faults", 10_000, "faults of TestStorm")

// Times of a storm.
const (
	stormLasts = 40 * time.Minute
	// A call may reach its server this long after what it was decided on was read: the servers reserve nothing meanwhile.
	underWay = 20 * time.Second
)

// weather is a team in a storm: faults strike, servers go away, and processes are killed and suspended between any two of their steps.
//
// The servers check each call by their own records: they know neither policy nor decision.
type weather struct {
	testing.TB
	*chance
	policy   rescue.Policy
	bank     *bank
	election *election
	regions  []*realm
	hardware int // nodes, in clusters that are not off
	until    time.Time

	mu       sync.Mutex
	stops    []*stopped
	attempts map[attempt]bool
	sums
}

// sums are what happened.
type sums struct {
	struck, calls, moved, again, killed, torn, suspended, lateFault, latePlace, preempted int
}

// stopped is work that the servers have ended for an act.
type stopped struct {
	hardware string
	ended    time.Time // zero = it has not
}

// attempt is a reservation of which a call was made.
type attempt struct {
	hardware string
	gpu      gpu.DeviceID
	at       time.Time
}

// realm is a region with what was true a short time ago.
type realm struct {
	*region
	w       *weather
	past    []past
	arrived map[string]time.Time
	endsIn  time.Duration // until work that is stopped now has ended
}

// past are the nodes as they were until a time.
type past struct {
	until time.Time
	nodes []rescue.Node
}

// TestStorm has 10,000 faults strike teams of two processes and up to three clusters of both kinds. Whatever happens: all work that is stopped has a GPU with
// a fault that counts, by its orchestrator's own record; each stop is reserved in the ledger before; no budget is exceeded; each replacement has a
// place; nothing is ended for it, unless the policy allows it; and nothing is stopped after a person or quorum has stopped acts, or in mode report.
func TestStorm(t *testing.T) {
	var all sums
	for seed := uint64(0); all.struck < *stormFaults && !t.Failed(); seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWeather(t, seed)
				w.rage()
				all.add(w.sums)
			})
		})
	}
	t.Logf("%+v", all)
	if !t.Failed() && (all.moved < *stormFaults/100 || all.torn == 0 || all.killed < 10) {
		t.Error("the test shows too little")
	}
}

func (s *sums) add(o sums) {
	s.struck += o.struck
	s.calls += o.calls
	s.moved += o.moved
	s.again += o.again
	s.killed += o.killed
	s.torn += o.torn
	s.suspended += o.suspended
	s.lateFault += o.lateFault
	s.latePlace += o.latePlace
	s.preempted += o.preempted
}

func newWeather(t testing.TB, seed uint64) *weather {
	c := newChance(seed)
	w := &weather{TB: t, chance: c, bank: newBank(), election: &election{}, attempts: map[attempt]bool{}, until: time.Now().Add(stormLasts)}
	w.policy = rescue.Policy{
		Delay: c.upTo(90 * time.Second), MaxGPUs: 1 + c.n(5), MaxNodes: 1 + c.n(6), MaxPercent: c.n(3) * 10, CoolDown: c.upTo(2 * time.Minute), Attempts: 1 + c.n(3),
		QuorumNodes: 2 + c.n(20), QuorumTime: 10 * time.Minute, Preempt: c.n(4) == 0, Deadline: time.Duration(c.n(3)) * 10 * time.Minute, Ineligible: c.n(2) == 0,
	}
	for i := range 1 + c.n(3) {
		w.addRegion(fmt.Sprintf("%s-%d", []string{"nomad", "kube"}[c.n(2)], i))
	}
	return w
}

func (w *weather) addRegion(name string) {
	r := &realm{region: newRegion(w, w.chance, name, 2+w.n(12), 1+w.n(8)), w: w, arrived: map[string]time.Time{}}
	r.lag, r.check, r.reply, r.moved = true, r.judge, r.answer, r.placed
	r.ends = func(one *rescue.Work) time.Duration {
		r.endsIn = w.upTo(one.EndsWithin)
		if w.n(20) == 0 {
			r.endsIn = one.EndsWithin + w.upTo(5*time.Minute) // its process can't be ended
		}
		return r.endsIn
	}
	r.c.Mode = []rescue.Mode{rescue.ModeAct, rescue.ModeAct, rescue.ModeAct, rescue.ModeAct, rescue.ModeAct, rescue.ModeReport, rescue.ModeOff}[w.n(7)]
	for i := range r.c.Nodes {
		n := &r.c.Nodes[i]
		if i == 0 {
			n.Hardware = "shared"
		}
		for _, pool := range []string{"a", "b", "c"}[w.n(3):] {
			r.c.Pools[pool] = append(r.c.Pools[pool], n.Name)
		}
		for g := range n.Devices {
			if w.n(8) == 0 {
				n.Devices[g].Kind, n.Devices[g].Units = "shared", 3
			}
		}
	}
	for range len(r.c.Nodes) * len(r.c.Nodes[0].Devices) {
		if w.n(4) > 0 {
			r.arrive()
		}
	}
	if r.c.Mode != rescue.ModeOff {
		w.hardware += len(r.c.Nodes)
	}
	w.regions = append(w.regions, r)
}

// rage has the storm last for its time.
func (w *weather) rage() {
	ctx, cancel := context.WithDeadline(w.Context(), w.until)
	defer cancel()
	var all sync.WaitGroup
	for i := range 2 {
		all.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				w.live(ctx, fmt.Sprintf("%c%d", 'a'+i, n))
				time.Sleep(w.upTo(40 * time.Second))
			}
		})
	}
	all.Go(func() { w.person(ctx) })
	for ctx.Err() == nil && !w.Failed() {
		time.Sleep(w.upTo(10 * time.Second))
		for range w.n(5) {
			w.regions[w.n(len(w.regions))].happen()
		}
		w.bank.mu.Lock()
		w.bank.away = w.n(30) == 0
		w.bank.mu.Unlock()
	}
	cancel()
	all.Wait()
	for _, r := range w.regions {
		for _, one := range r.calls {
			if one.kind == rescue.Accepted && !one.done {
				w.again++
			}
		}
	}
	time.Sleep(time.Hour) // work that ends
}

// live is the life of a process, which is killed after some steps.
func (w *weather) live(ctx context.Context, name string) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p := &process{chance: w.chance, identity: name, latency: w.upTo(2 * time.Second), lost: 10 + w.n(50), steps: 1 + w.n(1000), kill: cancel}
	if w.n(10) == 0 {
		p.latency *= 4
	}
	var clusters []fleet.Cluster
	for _, r := range w.regions {
		c := newClient(r.region, p)
		c.each = 8 * time.Second
		c.atLive, c.atDo = w.tear(p), w.tear(p)
		clusters = append(clusters, c)
	}
	if w.n(3) == 0 {
		time.AfterFunc(w.upTo(10*time.Minute), func() {
			if ctx.Err() == nil {
				p.suspend(w.upTo(90 * time.Second))
				w.count(func() { w.suspended++ })
			}
		})
	}
	c := fleet.New(fleet.Options{
		Identity: name, Policy: w.policy, Clusters: clusters, Store: store{w.bank, p}, Leader: seat{w.election, p}, Log: slog.New(slog.DiscardHandler),
	})
	if err := c.Run(ctx); err != nil {
		w.Error(err)
	}
	if ctx.Err() != nil {
		w.count(func() { w.killed++ })
	}
}

// tear kills a process between the reservation of an act and its call, or between the call and the answer.
func (w *weather) tear(p *process) func() {
	return func() {
		if w.n(20) == 0 {
			p.die()
			w.count(func() { w.torn++ })
		}
	}
}

func (w *weather) count(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// person stops and resumes.
func (w *weather) person(ctx context.Context) {
	p := &process{chance: w.chance, identity: "person", kill: func() {}}
	c := fleet.New(fleet.Options{Policy: w.policy, Store: store{w.bank, p}, Log: slog.New(slog.DiscardHandler)})
	for ctx.Err() == nil {
		time.Sleep(5*time.Second + w.upTo(20*time.Second))
		if w.bank.ledger().Stop != nil {
			_ = c.Resume(ctx, "anna") // or not: it is tried again
		} else if w.n(20) == 0 {
			_ = c.Stop(ctx, "anna", "a try")
		}
	}
}

// arrive starts work, if it has a place.
func (r *realm) arrive() {
	r.after++
	id := fmt.Sprintf("%s-w%d", r.c.Name, r.after)
	one := rescue.Work{
		ID: id, Namespace: "default", Name: id, Controller: rescue.Service, EndsWithin: time.Duration(r.n(40)) * time.Second, Phase: rescue.Running,
		Needs:        []rescue.Need{{Kind: []string{"gpu", "gpu", "gpu", "shared"}[r.n(4)], Units: 1 + r.n(5)/4}},
		LosesAttempt: r.n(40) == 0, Preempts: r.n(20) == 0, Victims: r.n(3), ByDevice: r.c.AgentReports && r.n(4) == 0,
		Pool: []string{"all", "a", "b", "c", "none"}[r.n(5)],
	}
	if r.n(8) == 0 {
		one.Controller = rescue.Controller(r.n(6)) //nolint:gosec // one of six
	}
	if r.place(&one, r.c.Nodes, r.c.Work) {
		r.c.Work = append(r.c.Work, one)
		r.arrived[id] = time.Now()
	}
}

// happen changes a node of the cluster.
func (r *realm) happen() {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.past = append(slices.DeleteFunc(r.past, func(p past) bool { return now.Sub(p.until) > underWay }), past{now, cloneNodes(r.c.Nodes)})
	n := r.n(len(r.c.Nodes))
	node := &r.c.Nodes[n]
	switch r.n(24) {
	case 0, 1, 6, 7, 8, 9:
		r.repaired(n)
	case 2:
		node.Ready = r.n(3) > 0
	case 3:
		node.Draining = r.n(3) == 0
	case 4:
		node.Schedulable = r.n(3) > 0
		node.ChangedIndex++
	case 5:
		r.away = now.Add(r.upTo(2 * time.Minute))
	case 10, 11:
		r.arrive()
	case 12: // work ends
		if len(r.c.Work) > 0 {
			if one := &r.c.Work[r.n(len(r.c.Work))]; one.Phase == rescue.Running {
				one.Phase = rescue.Ended
			}
		}
	default:
		r.strikeAny(n)
	}
}

func (r *realm) strikeAny(n int) {
	f := rescue.Fault{
		State: health.Unhealthy, Repair: health.Reset, Cause: fmt.Sprintf("XID_%d", []int{48, 62, 74, 79, 95, 119, 120, 140}[r.n(8)]), HoldersKnown: true,
	}
	switch r.n(30) {
	case 0:
		f.State = health.Degraded
	case 1:
		f.Simulated = true
	case 2, 3, 4, 5:
		f.State, f.Repair = health.GPULost, health.Reboot
	case 6:
		f.HoldersKnown = false
	}
	r.fault(n, r.n(len(r.c.Nodes[n].Devices)), f)
	r.w.count(func() { r.w.struck++ })
}

// answer is the servers' answer to an act.
func (r *realm) answer(rescue.Act) (rescue.Answer, bool) {
	switch r.n(7) {
	case 0:
		return rescue.Answer{Kind: rescue.Blocked, Text: "a budget"}, false
	case 1:
		return rescue.Answer{Kind: rescue.Failed, Text: "an error"}, r.n(2) == 0
	case 2:
		return rescue.Answer{Kind: rescue.Denied, Text: "two budgets"}, false
	}
	return rescue.Answer{Kind: rescue.Accepted}, true
}

// judge checks an act on work that runs, when it has reached the servers.
func (r *realm) judge(a rescue.Act, one *rescue.Work) {
	w := r.w
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls++
	switch {
	case r.c.Mode != rescue.ModeAct:
		w.Errorf("%+v: the mode is %s", a, r.c.Mode)
	case one.Controller != rescue.Service && one.Controller != rescue.Batch || one.LosesAttempt || one.Preempts && !w.policy.Preempt:
		w.Errorf("%+v: the work is %+v", a, one)
	case a.Victims > 0 && (!w.policy.Preempt || a.Victims > 1):
		w.Errorf("%+v: %d victims", a, a.Victims)
	case one.Node != a.Node:
		w.Errorf("%+v: the work is on node %s", a, one.Node)
	}
	if !r.struck(r.c.Nodes, a, one) {
		if !slices.ContainsFunc(r.past, func(p past) bool { return time.Since(p.until) <= fleet.CallTimeout && r.struck(p.nodes, a, one) }) {
			w.Errorf("%+v: the work has no GPU with a fault: %+v", a, one)
		}
		w.lateFault++
	}
	r.judgeLedger(a)
}

// judgeLedger checks an act by the ledger that is stored.
func (r *realm) judgeLedger(a rescue.Act) {
	w, l := r.w, r.w.bank.ledger()
	w.bank.mu.Lock()
	stopped, termAt := w.bank.stopped, w.bank.termAt
	w.bank.mu.Unlock()
	if !stopped.IsZero() && time.Since(stopped) > fleet.CallTimeout {
		w.Errorf("%+v: acts have been stopped for %v", a, time.Since(stopped))
	}
	if a.Term != l.Term && time.Since(termAt) > fleet.CallTimeout {
		w.Errorf("%+v: the term has been %d for %v", a, l.Term, time.Since(termAt))
	}
	for _, one := range l.Rescues {
		for _, m := range one.Moves {
			if one.Cluster == a.Cluster && one.GPU == a.GPU && !one.Listed && m.Outcome == rescue.Open && m.Work[0].ID == a.Subject.Work && m.Tries > 0 {
				r.judgeBudget(a, attempt{r.hardware(r.node(a.Node)), one.GPU, one.Reserved})
				return
			}
		}
	}
	w.Errorf("%+v is not reserved", a)
}

// hardware names a node in all regions that have it. A hostname that two regions of one orchestrator have is of two nodes.
func (r *realm) hardware(n *rescue.Node) string {
	same := map[bool]int{}
	for _, one := range r.w.regions {
		if one.c.Mode != rescue.ModeOff && one.c.Nodes[0].Hardware == n.Hardware {
			same[one.c.AgentReports]++
		}
	}
	if n.Hardware == "" || max(same[false], same[true]) > 1 {
		return r.c.Name + "/" + n.Name
	}
	return n.Hardware
}

// judgeBudget checks an act by the calls that were made before.
func (r *realm) judgeBudget(a rescue.Act, next attempt) {
	w := r.w
	w.attempts[next] = true
	attempts, gpus := 0, map[gpu.DeviceID]bool{}
	for one := range w.attempts {
		if one.at.After(next.at) {
			continue
		}
		if one.gpu == next.gpu && next.at.Sub(one.at) < 24*time.Hour {
			attempts++
		}
		if one.hardware == next.hardware && next.at.Sub(one.at) < time.Hour {
			gpus[one.gpu] = true
		}
	}
	if attempts > w.policy.Attempts || len(gpus) > w.policy.MaxGPUs {
		w.Errorf("%+v: %d attempts within a day, %d GPUs of the node within an hour; the policy is %+v", a, attempts, len(gpus), w.policy)
	}
	busy := map[string]bool{next.hardware: true}
	for _, s := range w.stops {
		if s.ended.IsZero() || time.Since(s.ended) < w.policy.CoolDown-time.Second {
			busy[s.hardware] = true
		}
	}
	if most := max(w.policy.MaxNodes, w.hardware*w.policy.MaxPercent/100); len(busy) > most {
		w.Errorf("%+v: acts on %d nodes, and %d are allowed", a, len(busy), most)
	}
}

// struck reports whether work has hardware with a fault that counts.
func (r *realm) struck(nodes []rescue.Node, a rescue.Act, one *rescue.Work) bool {
	i := slices.IndexFunc(nodes, func(n rescue.Node) bool { return n.Name == one.Node })
	return slices.ContainsFunc(one.Holds, func(h rescue.Hold) bool {
		return h.Device == a.GPU && slices.ContainsFunc(nodes[i].Faults, func(f rescue.Fault) bool {
			return f.At.GPU == a.GPU && f.State >= health.Unhealthy && !f.Simulated
		})
	})
}

// placed checks the replacement of work that was stopped. One without a place had one when it was decided on, and others have taken it since.
func (r *realm) placed(old, next *rescue.Work) {
	w, node := r.w, r.node(old.Node)
	one := &stopped{hardware: r.hardware(node)}
	id := old.ID
	w.count(func() {
		w.stops = append(w.stops, one)
		w.moved++
	})
	time.AfterFunc(r.endsIn, func() { w.count(func() { one.ended = time.Now() }) })
	if next.Node != "" {
		return
	}
	if w.policy.Preempt && old.Preempts && old.Victims == 1 {
		w.count(func() { w.preempted++ })
		return
	}
	since := slices.DeleteFunc(slices.Clone(r.c.Work), func(one rescue.Work) bool { return time.Since(r.arrived[one.ID]) < underWay })
	if !slices.ContainsFunc(r.past, func(p past) bool {
		try := *next
		return time.Since(p.until) <= underWay && r.place(&try, p.nodes, since)
	}) {
		w.Errorf("%s was stopped, and its replacement has no place: %+v", id, next)
	}
	w.count(func() { w.latePlace++ })
}
