package fleet_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// chance is a source of randomness for any number of goroutines.
type chance struct {
	mu sync.Mutex
	r  *rand.Rand
}

func newChance(seed uint64) *chance {
	return &chance{r: rand.New(rand.NewPCG(seed, 27))} //nolint:gosec // a test
}

func (c *chance) n(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.r.IntN(n)
}

func (c *chance) perm(n int) []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.r.Perm(n)
}

func (c *chance) upTo(d time.Duration) time.Duration {
	return time.Duration(c.n(int(d/time.Millisecond)+1)) * time.Millisecond
}

// process is one process of gpu-fleet, as the servers see it: what it asks them for has a latency, and it may be killed or suspended between two such steps.
// The zero value, with a chance, answers at once and lives.
type process struct {
	*chance
	identity string
	latency  time.Duration // at most, each way
	lost     int           // one of so many requests or answers is lost; 0 = none is

	mu        sync.Mutex
	steps     int    // until it is killed; 0 = it is not
	kill      func() // ends it
	dead      bool
	suspended time.Time // until when
}

var (
	errDead = errors.New("the process has been killed")
	errLost = errors.New("connection reset by peer")
)

// step is before and after each effect that the process has.
func (p *process) step() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.steps > 0 && !p.dead {
		if p.steps--; p.steps == 0 {
			p.dead = true
			p.kill()
		}
	}
	return !p.dead
}

// gate holds a suspended process.
func (p *process) gate() {
	p.mu.Lock()
	until := p.suspended
	p.mu.Unlock()
	time.Sleep(time.Until(until))
}

// die kills the process before its next step.
func (p *process) die() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dead = true
	p.kill()
}

func (p *process) suspend(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.suspended = time.Now().Add(d)
}

// remote has an effect on a server, or not. A process may be suspended before and after.
func (p *process) remote(ctx context.Context, effect func()) error {
	p.gate()
	return p.send(ctx, effect)
}

// send is remote for a request that has left the process.
func (p *process) send(ctx context.Context, effect func()) error {
	if !p.step() {
		return errDead
	}
	if !watch.Sleep(ctx, p.upTo(p.latency)) {
		return ctx.Err()
	}
	if p.lost > 0 && p.n(p.lost) == 0 {
		return errLost
	}
	effect()
	if !p.step() {
		return errDead
	}
	if !watch.Sleep(ctx, p.upTo(p.latency)) {
		return ctx.Err()
	}
	if p.lost > 0 && p.n(p.lost) == 0 {
		return errLost
	}
	p.gate()
	return nil
}

// bank is the server that has the ledger.
type bank struct {
	mu      sync.Mutex
	text    []byte // nil = there is no ledger
	version int
	away    bool
	writes  int
	refuse  func() error // of a write; nil = none is refused
	stopped time.Time    // since when acts are stopped; zero = they are not
	term    uint64
	termAt  time.Time // when it changed
}

func newBank() *bank {
	text, _ := json.Marshal(rescue.NewLedger())
	return &bank{text: text}
}

// ledger is what is stored.
func (b *bank) ledger() (l rescue.Ledger) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_ = json.Unmarshal(b.text, &l)
	return l
}

// locked calls f for what the bank has.
func (b *bank) locked(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
}

// goesAway has the bank answer no more, or again.
func (b *bank) goesAway(away bool) { b.locked(func() { b.away = away }) }

// refusing has writes fail by a function; nil = they do not.
func (b *bank) refusing(f func() error) { b.locked(func() { b.refuse = f }) }

// terms is the term of the ledger.
func (b *bank) terms() (term uint64) {
	b.locked(func() { term = b.term })
	return term
}

// store is the bank for one process.
type store struct {
	*bank
	p *process
}

var errAway = errors.New("connection refused")

func (s store) String() string { return "the bank" }

func (s store) Read(ctx context.Context) (l rescue.Ledger, v fleet.Version, err error) {
	if lost := s.p.remote(ctx, func() { l, v, err = s.read() }); lost != nil {
		return rescue.Ledger{}, "", lost
	}
	return l, v, err
}

func (b *bank) read() (l rescue.Ledger, v fleet.Version, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.away:
		return l, "", errAway
	case b.text == nil:
		return l, "", fleet.ErrNoLedger
	}
	if l, err = rescue.ParseLedger(b.text); err != nil {
		return l, "", &fleet.DamagedError{Err: err}
	}
	return l, fleet.Version(fmt.Sprint(b.version)), nil
}

func (s store) Write(ctx context.Context, l rescue.Ledger, was fleet.Version) (v fleet.Version, err error) {
	var refuse func() error
	s.locked(func() { refuse = s.refuse })
	if refuse != nil {
		if err := refuse(); err != nil {
			return "", err
		}
	}
	if lost := s.p.remote(ctx, func() { v, err = s.write(l, was) }); lost != nil {
		return "", lost
	}
	return v, err
}

func (b *bank) write(l rescue.Ledger, was fleet.Version) (fleet.Version, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.away:
		return "", errAway
	case b.text == nil:
		return "", fleet.ErrNoLedger
	case was != fleet.Version(fmt.Sprint(b.version)):
		return "", fleet.ErrConflict
	}
	text, err := json.Marshal(l)
	if err != nil {
		return "", err
	}
	if len(text) > 64<<10 {
		return "", fmt.Errorf("%d bytes are too many", len(text))
	}
	switch {
	case l.Stop == nil:
		b.stopped = time.Time{}
	case b.stopped.IsZero():
		b.stopped = time.Now()
	}
	if before := b.term; l.Term != before {
		b.term, b.termAt = l.Term, time.Now()
	}
	b.text = text
	b.version++
	b.writes++
	return fleet.Version(fmt.Sprint(b.version)), nil
}

func (s store) Create(context.Context) error { return fleet.ErrExists }

// election is the server that has the lease.
type election struct {
	mu     sync.Mutex
	holder string
	until  time.Time
}

const (
	leaseFor  = 15 * time.Second
	leadFor   = 10 * time.Second // after a renewal, by the clock of the leader
	renewEach = 2 * time.Second
)

// seat is the election for one process.
type seat struct {
	*election
	p *process
}

func (s seat) Holder() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.holder
}

// take takes or renews the lease.
func (s seat) take(ctx context.Context) (ok bool) {
	err := s.p.remote(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.holder == s.p.identity || time.Now().After(s.until) {
			s.holder, s.until, ok = s.p.identity, time.Now().Add(leaseFor), true
		}
	})
	return ok && err == nil
}

func (s seat) Lead(ctx context.Context, f func(context.Context)) error {
	asked := time.Now()
	for !s.take(ctx) {
		if !watch.Sleep(ctx, renewEach) {
			return ctx.Err()
		}
		asked = time.Now()
	}
	lead, end := context.WithCancel(ctx)
	defer end()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.renew(lead, asked)
		s.p.gate() // a suspended process does not notice
		end()
	}()
	f(lead)
	end()
	<-ended
	_ = s.p.remote(context.WithoutCancel(ctx), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.holder == s.p.identity {
			s.holder, s.until = "", time.Time{}
		}
	})
	return ctx.Err()
}

// renew renews the lease until it can't for too long.
func (s seat) renew(ctx context.Context, good time.Time) {
	for time.Since(good) < leadFor {
		if !watch.Sleep(ctx, renewEach) {
			return
		}
		limit, cancel := context.WithDeadline(ctx, good.Add(leadFor))
		if asked := time.Now(); s.take(limit) {
			good = asked
		}
		cancel()
	}
}

// region are the servers of a cluster, and what is true there.
type region struct {
	testing.TB
	*chance
	mu    sync.Mutex
	c     rescue.Cluster // without what is of the time of reading
	away  time.Time      // until when the servers do not answer
	after int            // number of the latest work
	calls []call         // for acts, in order
	check func(rescue.Act, *rescue.Work)
	reply func(rescue.Act) (a rescue.Answer, done bool) // the servers' answer to an act; nil = they do it
	marks []rescue.Mark
	lag   bool // what the servers show of devices is not always of now

	ends  func(*rescue.Work) time.Duration // until work that was stopped has ended; nil = by its own time
	moved func(old, next *rescue.Work)     // called for work that was stopped, with its replacement, which may have no place
}

// call is an act that has reached the servers.
type call struct {
	rescue.Act
	at   time.Time
	kind rescue.AnswerKind
	done bool
}

func (r *region) String() string { return r.c.Name }

// newRegion returns a cluster of nodes with GPUs in which nothing runs. One whose name begins with "nomad" is like a region.
func newRegion(t testing.TB, c *chance, name string, nodes, gpus int) *region {
	nomad := strings.HasPrefix(name, "nomad")
	r := &region{TB: t, chance: c, c: rescue.Cluster{
		Name: name, Mode: rescue.ModeAct, AgentReports: !nomad, Replacements: nomad, Marks: nomad, Pools: map[string][]string{},
	}}
	for n := range nodes {
		node := rescue.Node{Name: fmt.Sprintf("%s-%d", name, n), Ready: true, Schedulable: true}
		for g := range gpus {
			id := gpu.DeviceID(fmt.Sprintf("GPU-%s-%d-%d", name, n, g))
			node.Devices = append(node.Devices, rescue.Device{ID: id, At: gpu.WholeGPU(id), Kind: "gpu", Healthy: true})
		}
		r.c.Nodes = append(r.c.Nodes, node)
		r.c.Pools["all"] = append(r.c.Pools["all"], node.Name)
	}
	return r
}

// locked calls f for what is true.
func (r *region) locked(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// run starts a service on a GPU of a node.
func (r *region) run(id string, n, g int) {
	node := &r.c.Nodes[n]
	r.c.Work = append(r.c.Work, rescue.Work{
		ID: id, Namespace: "default", Name: id, Node: node.Name, Controller: rescue.Service, Phase: rescue.Running, Pool: "all",
		Needs: []rescue.Need{{Kind: "gpu", Units: 1}}, EndsWithin: 5 * time.Second, Holds: []rescue.Hold{{Device: node.Devices[g].ID}},
	})
}

// strike has a GPU fail.
func (r *region) strike(n, g, xid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fault(n, g, rescue.Fault{State: health.Unhealthy, Repair: health.Reset, Cause: fmt.Sprintf("XID_%d", xid), HoldersKnown: true})
}

func (r *region) fault(n, g int, f rescue.Fault) {
	node := &r.c.Nodes[n]
	f.At = gpu.WholeGPU(node.Devices[g].ID)
	f.Since = time.Now()
	node.Faults = append(slices.Clone(node.Faults), f)
	node.Devices[g].Healthy = false
}

// made are the calls that have reached the servers.
func (r *region) made() []call {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.calls)
}

// repair ends the faults of a node.
func (r *region) repair(n int) { r.locked(func() { r.repaired(n) }) }

func (r *region) repaired(n int) {
	node := &r.c.Nodes[n]
	node.Faults = nil
	for g := range node.Devices {
		node.Devices[g].Healthy = true
	}
}

func (r *region) work(id string) *rescue.Work {
	if i := slices.IndexFunc(r.c.Work, func(w rescue.Work) bool { return w.ID == id }); i >= 0 {
		return &r.c.Work[i]
	}
	return nil
}

func (r *region) node(name string) *rescue.Node {
	i := slices.IndexFunc(r.c.Nodes, func(n rescue.Node) bool { return n.Name == name })
	return &r.c.Nodes[i]
}

// snapshot is what the servers show now.
func (r *region) snapshot() rescue.Cluster {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.c
	c.ReadAt = time.Now()
	c.Nodes = cloneNodes(c.Nodes)
	c.Work = slices.Clone(c.Work)
	for i := range c.Work {
		w := &c.Work[i]
		w.Holds = slices.Clone(w.Holds)
		if w.Node == "" || w.Phase == rescue.Ended {
			continue
		}
		node := &c.Nodes[slices.IndexFunc(c.Nodes, func(n rescue.Node) bool { return n.Name == w.Node })]
		r.show(node, w)
	}
	for i := range c.Nodes {
		if n := &c.Nodes[i]; c.AgentReports && n.Ready {
			n.ReportedAt = c.ReadAt
		}
	}
	return c
}

func cloneNodes(all []rescue.Node) []rescue.Node {
	all = slices.Clone(all)
	for i := range all {
		all[i].Devices, all[i].Faults = slices.Clone(all[i].Devices), slices.Clone(all[i].Faults)
		for j := range all[i].Faults {
			all[i].Faults[j].Holders = nil
		}
	}
	return all
}

// show has the servers show the devices of work, and the agent of the node name it as the holder of a GPU with a fault.
func (r *region) show(node *rescue.Node, w *rescue.Work) {
	for h := range w.Holds {
		hold := &w.Holds[h]
		for i := range node.Devices {
			if dev := &node.Devices[i]; dev.ID == hold.Device {
				hold.Shown = rescue.ShownUnhealthy
				if dev.Healthy {
					hold.Shown = rescue.ShownHealthy
				}
			}
		}
		if r.lag {
			switch r.n(12) {
			case 0:
				hold.Shown = rescue.ShownHealthy
			case 1:
				hold.Shown = rescue.NotShown
			}
		}
		for i := range node.Faults {
			if f := &node.Faults[i]; f.HoldersKnown && f.At.GPU == hold.Device && !slices.Contains(f.Holders, w.ID) {
				f.Holders = append(f.Holders, w.ID)
			}
		}
	}
}

// stop carries out an act: the work is ending, and its replacement has its place at once.
func (r *region) stop(a rescue.Act) rescue.Answer {
	r.mu.Lock()
	defer r.mu.Unlock()
	given, done := rescue.Answer{Kind: rescue.Accepted}, true
	if r.reply != nil {
		given, done = r.reply(a)
	}
	for _, t := range a.Work {
		w := r.work(t.ID)
		if w == nil || w.Phase == rescue.Ended {
			given, done = rescue.Answer{Kind: rescue.NotFound}, false
			continue
		}
		if w.Phase == rescue.Ending {
			given, done = rescue.Answer{Kind: rescue.Accepted}, false
			continue
		}
		if r.check != nil {
			r.check(a, w)
		}
		if done {
			r.end(w)
		}
	}
	r.calls = append(r.calls, call{a, time.Now(), given.Kind, done})
	return given
}

// end has work end, and a replacement start.
func (r *region) end(w *rescue.Work) {
	w.Phase = rescue.Ending
	id, after := w.ID, w.EndsWithin
	if r.ends != nil {
		after = r.ends(w)
	}
	time.AfterFunc(after, func() {
		r.locked(func() { r.work(id).Phase = rescue.Ended })
	})
	r.after++
	next := *w
	next.ID, next.Replaces, next.Holds, next.Node, next.Phase = fmt.Sprintf("%s-r%d", r.c.Name, r.after), w.ID, nil, "", rescue.Pending
	r.place(&next, r.c.Nodes, r.c.Work)
	if r.moved != nil {
		r.moved(w, &next)
	}
	r.c.Work = append(r.c.Work, next)
	time.AfterFunc(after+time.Second, func() {
		r.locked(func() {
			if one := r.work(next.ID); one.Phase == rescue.Pending && one.Node != "" {
				one.Phase = rescue.Running
			}
		})
	})
}

// place gives work devices of a random node that has them free.
func (r *region) place(one *rescue.Work, nodes []rescue.Node, work []rescue.Work) bool {
	for _, n := range r.perm(len(nodes)) {
		node := &nodes[n]
		if !slices.Contains(r.c.Pools[one.Pool], node.Name) || !node.Ready || node.Draining || !node.Schedulable {
			continue
		}
		var holds []rescue.Hold
		for _, g := range r.perm(len(node.Devices)) {
			dev := &node.Devices[g]
			if dev.Kind != one.Needs[0].Kind || !dev.Healthy {
				continue
			}
			for range max(dev.Units, 1) - used(work, dev.ID, one.Replaces) {
				if len(holds) < one.Needs[0].Units {
					holds = append(holds, rescue.Hold{Device: dev.ID})
				}
			}
		}
		if len(holds) == one.Needs[0].Units {
			one.Node, one.Holds = node.Name, holds
			return true
		}
	}
	return false
}

// used is how many units of a device work has, but for one workload.
func used(work []rescue.Work, id gpu.DeviceID, but string) (n int) {
	for i := range work {
		if w := &work[i]; w.Phase != rescue.Ended && w.ID != but {
			for _, h := range w.Holds {
				if h.Device == id {
					n++
				}
			}
		}
	}
	return n
}

// client is the region for one process.
type client struct {
	*region
	p      *process
	shown  *watch.Value[rescue.Cluster]
	each   time.Duration // between two looks, at most
	hangs  bool          // a call does not end
	atLive func()        // called before node and work are read for an act; nil = nothing
	atDo   func()        // called after an act has reached the servers, before their answer
	listed []string      // by Follow
}

func newClient(r *region, p *process) *client {
	return &client{region: r, p: p, shown: watch.NewValue(rescue.Cluster{Name: r.c.Name, Mode: r.c.Mode, Problem: "not read yet"}), each: time.Second}
}

func (c *client) Name() string     { return c.c.Name }
func (c *client) Kind() fleet.Kind { return fleet.Nomad }

func (c *client) Run(ctx context.Context) error {
	for ok := true; ok; ok = watch.Sleep(ctx, c.each/2+c.p.upTo(c.each/2)) {
		c.p.gate()
		if time.Now().Before(c.gone()) {
			one := c.shown.Load()
			one.Problem = errAway.Error()
			c.shown.Store(one)
			continue
		}
		c.shown.Store(c.snapshot())
	}
	return nil
}

func (c *client) gone() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.away
}

func (c *client) Shown() *watch.Value[rescue.Cluster] { return c.shown }
func (c *client) Follow(work []string)                { c.locked(func() { c.listed = work }) }
func (c *client) Problems() []problem.Problem         { return nil }

func (c *client) Live(ctx context.Context, _ rescue.Act) (live rescue.Cluster, err error) {
	if c.atLive != nil {
		c.atLive()
	}
	if time.Now().Before(c.gone()) {
		return live, errAway
	}
	err = c.p.remote(ctx, func() { live = c.snapshot() })
	return live, err
}

func (c *client) Do(ctx context.Context, a rescue.Act) (given rescue.Answer) {
	if c.hangs {
		<-ctx.Done()
		return rescue.Answer{Kind: rescue.Failed, Text: ctx.Err().Error()}
	}
	if time.Now().Before(c.gone()) {
		return rescue.Answer{Kind: rescue.Failed, Text: errAway.Error()}
	}
	if err := c.p.send(ctx, func() {
		given = c.stop(a)
		if c.atDo != nil {
			c.atDo()
		}
	}); err != nil {
		return rescue.Answer{Kind: rescue.Failed, Text: err.Error()}
	}
	return given
}

func (c *client) Mark(ctx context.Context, m rescue.Mark) (index uint64, err error) {
	err = c.p.remote(ctx, func() {
		c.locked(func() {
			c.marks = append(c.marks, m)
			n := c.node(m.Node)
			n.Mark, n.MarkIsOurs = m.Repair, m.Repair != health.NoRepair
			if m.Eligible != rescue.Unchanged {
				n.Schedulable = m.Eligible == rescue.MakeEligible
				c.after++
				index = uint64(c.after) //nolint:gosec // small
				n.ChangedIndex = index
			}
		})
	})
	return index, err
}
