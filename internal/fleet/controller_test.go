package fleet_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// team is a bank, an election and two clusters, of three nodes with two GPUs each, on whose first GPU of each node a service runs.
type team struct {
	*testing.T
	chance      *chance
	bank        *bank
	election    *election
	nomad, kube *region
	policy      rescue.Policy
}

func newTeam(t *testing.T) *team {
	c := newChance(1)
	w := &team{T: t, chance: c, bank: newBank(), election: &election{}, nomad: newRegion(t, c, "nomad", 3, 2), kube: newRegion(t, c, "kube", 3, 2), policy: rescue.Default()}
	for n := range 3 {
		for _, r := range []*region{w.nomad, w.kube} {
			r.run(fmt.Sprintf("%s-w%d", r.c.Name, n), n, 0)
		}
	}
	return w
}

// member is a process of the team that runs.
type member struct {
	*fleet.Controller
	p       *process
	clients []*client
	log     lines
	kill    func()
	ended   chan struct{}
}

// lines is a log.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

// count is how many lines have a text.
func (l *lines) count(text string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.buf.String()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// process adds a process that does not run yet.
func (w *team) process(name string) *member { return w.processWith(name, nil) }

// processWith is process with an election of its own.
func (w *team) processWith(name string, leader fleet.Leader) *member {
	m := &member{p: &process{chance: w.chance, identity: name}, ended: make(chan struct{})}
	if leader == nil {
		leader = seat{w.election, m.p}
	}
	m.clients = []*client{newClient(w.nomad, m.p), newClient(w.kube, m.p)}
	m.Controller = fleet.New(fleet.Options{
		Identity: name, Policy: w.policy, Clusters: []fleet.Cluster{m.clients[0], m.clients[1]}, Store: store{w.bank, m.p}, Leader: leader,
		Log: slog.New(slog.NewTextHandler(&m.log, nil)),
	})
	return m
}

// start has a process run until the test ends, or it is killed.
func (w *team) start(m *member) *member {
	ctx, cancel := context.WithCancel(w.Context())
	m.kill, m.p.kill = cancel, cancel
	go func() {
		defer close(m.ended)
		if err := m.Run(ctx); err != nil {
			w.Error(err)
		}
	}()
	w.Cleanup(func() {
		cancel()
		<-m.ended
		if w.Failed() {
			w.Logf("the log of %s:\n%s", m.p.identity, m.log.String())
		}
	})
	return m
}

// stops checks how often work was stopped in a cluster.
func (w *team) stops(when string, r *region, want int) {
	w.Helper()
	r.locked(func() {
		if len(r.calls) != want {
			w.Errorf("%s: %d calls in cluster %s, want %d: %+v", when, len(r.calls), r.c.Name, want, r.calls)
		}
	})
}

// TestMoved has a GPU of each cluster fail: its work is moved, and all of it is told once.
func TestMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		w.policy.MaxNodes = 2
		one := w.start(w.process("a"))
		time.Sleep(5 * time.Second)
		w.nomad.strike(0, 0, 95)
		w.kube.strike(1, 0, 48)
		time.Sleep(50 * time.Second)
		w.stops("before the delay is over", w.nomad, 0)
		time.Sleep(2 * time.Minute)
		w.stops("after it", w.nomad, 1)
		w.stops("after it", w.kube, 1)
		v := one.View().Load()
		if !v.Leads || v.Leader != "a" || v.StoreErr != "" || len(v.Problems) > 0 || v.Result.Problem != "" {
			t.Errorf("the view is %+v", v)
		}
		for _, cluster := range []string{"nomad", "kube"} {
			if v.Counts.Acts[fleet.ActKey{Cluster: cluster, Answer: "accepted"}] != 1 || v.Counts.Outcomes[fleet.OutcomeKey{Cluster: cluster, Outcome: rescue.Moved}] != 1 {
				t.Errorf("the counts are %+v", v.Counts)
			}
		}
		if n := len(v.Counts.Replaced); n != 2 || v.Counts.Replaced[0].Fault < time.Minute || v.Counts.Replaced[0].Call > 10*time.Second {
			t.Errorf("replaced: %+v", v.Counts.Replaced)
		}
		for text, want := range map[string]int{
			"work is stopped, to run elsewhere": 2, "the orchestrator has answered": 2, "move has ended": 2, "reason=DELAY": 2,
			"node is marked for repair": 1, "this process leads": 1,
		} {
			if n := one.log.count(text); n != want {
				t.Errorf("%d lines with %q, want %d", n, text, want)
			}
		}
		for _, name := range one.clients[0].listed {
			t.Errorf("%s is followed, and no work is on the GPU any more", name)
		}
	})
}

// reserved checks the ledger's rescues and their tries.
func (w *team) reserved(when string, tries ...int) {
	w.Helper()
	var got []int
	for _, r := range w.bank.ledger().Rescues {
		for _, m := range r.Moves {
			got = append(got, m.Tries)
		}
	}
	if !slices.Equal(got, tries) {
		w.Errorf("%s: the ledger has rescues with %v tries, want %v", when, got, tries)
	}
}

// TestKilledBeforeCall is case 11: a process is killed between reservation and call. The next leader repeats exactly that act, and one attempt counts.
func TestKilledBeforeCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		one := w.process("a")
		one.clients[0].atLive = one.p.die
		w.start(one)
		time.Sleep(time.Second)
		w.nomad.strike(0, 0, 95)
		time.Sleep(70 * time.Second)
		<-one.ended
		w.stops("the process is dead", w.nomad, 0)
		w.reserved("the process is dead", 1)
		w.start(w.process("b"))
		time.Sleep(2 * time.Minute)
		w.stops("another one leads", w.nomad, 1)
		w.reserved("another one leads", 2)
		if a := w.nomad.made()[0]; a.Subject.Work != "nomad-w0" || a.Term != 2 || !a.done {
			t.Errorf("the call is %+v", a)
		}
	})
}

// TestLedgerUnusable is case 12: with a ledger that is missing or damaged nothing is done, and a problem has the remedy. It is read again until it can be used.
func TestLedgerUnusable(t *testing.T) {
	for name, damage := range map[string]func(*bank){
		"missing":        func(b *bank) { b.text = nil },
		"no JSON":        func(b *bank) { b.text = []byte("{") },
		"empty":          func(b *bank) { b.text = []byte("{}") },
		"newer":          func(b *bank) { b.text = []byte(`{"version":2,"term":1}`) },
		"while it leads": nil,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { testUnusable(t, damage) })
		})
	}
}

func testUnusable(t *testing.T, damage func(*bank)) {
	w := newTeam(t)
	w.policy.MaxNodes = 2
	good := w.bank.text
	if damage != nil {
		damage(w.bank)
	}
	one := w.start(w.process("a"))
	time.Sleep(20 * time.Second)
	if damage == nil {
		w.bank.locked(func() { w.bank.text = nil })
	}
	w.nomad.strike(0, 0, 95)
	w.kube.strike(0, 0, 48)
	time.Sleep(10 * time.Minute)
	w.stops("no ledger", w.nomad, 0)
	w.stops("no ledger", w.kube, 0)
	v := one.View().Load()
	if v.Result.Problem == "" || v.StoreErr == "" || len(v.Problems) != 1 || v.Problems[0].Code != problem.Ledger || v.Problems[0].Remedy == "" {
		t.Errorf("result %q, store %q, problems %+v", v.Result.Problem, v.StoreErr, v.Problems)
	}
	if r := fleet.Plan(v, rescue.ModeAct); r.Problem == "" || len(r.Acts) > 0 {
		t.Errorf("the plan is %+v", r)
	}
	if n := one.log.count("level=ERROR"); n != 1 {
		t.Errorf("%d errors are logged", n)
	}
	if err := one.Stop(t.Context(), "anna", "a try"); err == nil {
		t.Error("stopped without a ledger")
	}
	w.bank.locked(func() { w.bank.text = good })
	time.Sleep(time.Minute)
	w.stops("restored", w.nomad, 1)
	if v := one.View().Load(); v.StoreErr != "" || len(v.Problems) > 0 {
		t.Errorf("store %q, problems %+v", v.StoreErr, v.Problems)
	}
}

// TestReport is case 24: mode report lists what mode act does, and calls nothing.
func TestReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lists [2][]string
		for i, mode := range []rescue.Mode{rescue.ModeAct, rescue.ModeReport} {
			w := newTeam(t)
			w.policy.Ineligible = true
			w.nomad.c.Mode, w.kube.c.Mode = mode, mode
			w.nomad.run("nomad-x", 2, 1)
			one := w.start(w.process("a"))
			time.Sleep(time.Second)
			w.nomad.strike(0, 0, 95)
			w.kube.strike(1, 0, 48)
			time.Sleep(2 * time.Minute)
			w.nomad.strike(2, 0, 79)
			w.nomad.strike(2, 1, 79)
			time.Sleep(20 * time.Minute)
			lists[i] = one.log.works("work is stopped", "work would be stopped")
			if mode == rescue.ModeReport {
				w.stops("in mode report", w.nomad, 0)
				w.stops("in mode report", w.kube, 0)
				if v := one.View().Load(); len(w.nomad.marks) > 0 || v.Counts.Acts[fleet.ActKey{Cluster: "nomad", Answer: "listed"}] != uint64(len(lists[i])-1) {
					t.Errorf("marks %+v, counts %+v", w.nomad.marks, v.Counts)
				}
			}
			one.kill()
			<-one.ended
		}
		if len(lists[0]) < 3 || !slices.Equal(lists[0], lists[1]) {
			t.Errorf("mode act stops %q, and mode report lists %q", lists[0], lists[1])
		}
	})
}

// works are the IDs of work in lines with one of some texts, in order.
func (l *lines) works(texts ...string) (all []string) {
	for line := range strings.Lines(l.String()) {
		for _, text := range texts {
			if _, id, ok := strings.Cut(line, "work_id="); ok && strings.Contains(line, text) {
				all = append(all, strings.Fields(id)[0])
			}
		}
	}
	return all
}

// TestTwoControllers is case 26: of two processes one acts, also if both are told that they lead.
func TestTwoControllers(t *testing.T) {
	for _, both := range []bool{false, true} {
		t.Run(fmt.Sprint(both), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newTeam(t)
				var all []*member
				for _, name := range []string{"a", "b"} {
					m := w.process(name)
					if both {
						m = w.processWith(name, &always{})
					}
					m.p.latency = 100 * time.Millisecond
					all = append(all, w.start(m))
				}
				time.Sleep(20 * time.Second)
				w.nomad.strike(0, 0, 95)
				time.Sleep(5 * time.Minute)
				w.stops("of two", w.nomad, 1)
				if !both && all[0].View().Load().Leads == all[1].View().Load().Leads {
					t.Error("both lead, or none")
				}
				if n := len(w.bank.ledger().Rescues); n != 1 {
					t.Errorf("%d attempts count", n)
				}
			})
		})
	}
}

// always is an election that all win.
type always struct{}

func (*always) Holder() string { return "" }
func (*always) Lead(ctx context.Context, f func(context.Context)) error {
	f(ctx)
	return ctx.Err()
}

// TestSuspendedLeader is case 36: the leader is suspended between reservation and call, and another process leads and acts. The first one does not
// act when it goes on.
func TestSuspendedLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		one := w.process("a")
		one.clients[0].atLive = func() {
			one.clients[0].atLive = nil
			one.p.suspend(time.Minute)
		}
		w.start(one)
		time.Sleep(5 * time.Second)
		two := w.start(w.process("b"))
		w.nomad.strike(0, 0, 95)
		time.Sleep(62 * time.Second)
		w.reserved("suspended", 1)
		w.stops("suspended", w.nomad, 0)
		time.Sleep(45 * time.Second)
		w.stops("another process leads", w.nomad, 1)
		time.Sleep(5 * time.Minute)
		w.stops("the first one goes on", w.nomad, 1)
		if v := two.View().Load(); !v.Leads || one.View().Load().Leads || v.Result.State.Term != 2 {
			t.Errorf("b leads: %t, in term %d", v.Leads, v.Result.State.Term)
		}
		if n := len(w.bank.ledger().Rescues); n != 1 {
			t.Errorf("%d attempts count", n)
		}
	})
}

// TestStopGetsAhead has a person stop all acts through another process, right before the leader reserves one.
func TestStopGetsAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		one := w.start(w.process("a"))
		time.Sleep(5 * time.Second)
		other := w.process("b")
		w.bank.refusing(func() error {
			w.bank.refusing(nil)
			if err := other.Stop(t.Context(), "anna", "a new driver"); err != nil {
				t.Error(err)
			}
			return nil
		})
		w.nomad.strike(0, 0, 95)
		time.Sleep(5 * time.Minute)
		w.stops("stopped", w.nomad, 0)
		v := one.View().Load()
		if s := v.Result.State.Ledger.Stop; s == nil || s.By != "anna" || v.Counts.Conflicts != 1 || !v.Leads || len(v.Problems) > 0 {
			t.Errorf("stop %+v, conflicts %d, leads %t, problems %+v", s, v.Counts.Conflicts, v.Leads, v.Problems)
		}
		if err := other.Resume(t.Context(), "anna"); err != nil {
			t.Error(err)
		}
		time.Sleep(30 * time.Second)
		w.stops("resumed", w.nomad, 1)
	})
}

// TestStopBeforeCall has a person stop all acts between the reservation and its call.
func TestStopBeforeCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		one := w.process("a")
		one.p.latency = 200 * time.Millisecond
		w.start(one)
		time.Sleep(5 * time.Second)
		w.nomad.strike(0, 0, 95)
		for w.bank.ledger().Rescues == nil {
			time.Sleep(time.Millisecond)
		}
		if err := w.process("b").Stop(t.Context(), "anna", "a new driver"); err != nil {
			t.Error(err)
		}
		time.Sleep(5 * time.Minute)
		w.stops("stopped", w.nomad, 0)
		if n := one.log.count("call is not made"); n != 1 {
			t.Errorf("%d calls were not made", n)
		}
		if err := one.Resume(t.Context(), "anna"); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute)
		w.stops("resumed", w.nomad, 1)
		w.reserved("resumed", 1)
	})
}

// TestStopWhileRead has a person stop all acts while node and work are read for a call, which takes some time: once the order is answered, no call is made.
func TestStopWhileRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		one, other := w.process("a"), w.process("b")
		one.clients[0].atLive = func() {
			time.Sleep(2 * time.Second)
			if err := other.Stop(t.Context(), "anna", "a new driver"); err != nil {
				t.Error(err)
			}
		}
		w.start(one)
		time.Sleep(5 * time.Second)
		w.nomad.strike(0, 0, 95)
		time.Sleep(5 * time.Minute)
		w.stops("stopped", w.nomad, 0)
	})
}

// TestStoreAway has the ledger's store not answer when an act is to be reserved, and when its answer is to be written.
func TestStoreAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		w.policy.MaxNodes = 2
		one := w.start(w.process("a"))
		time.Sleep(5 * time.Second)
		w.nomad.strike(0, 0, 95)
		w.bank.goesAway(true)
		time.Sleep(5 * time.Minute)
		w.stops("away", w.nomad, 0)
		v := one.View().Load()
		if v.StoreErr == "" || len(v.Problems) != 1 || v.Problems[0].Code != problem.LedgerStore || len(v.Result.Acts) != 1 {
			t.Errorf("store %q, problems %+v, acts %+v", v.StoreErr, v.Problems, v.Result.Acts)
		}
		w.bank.goesAway(false)
		w.nomad.locked(func() { w.nomad.check = func(rescue.Act, *rescue.Work) { w.bank.goesAway(true) } })
		w.kube.strike(0, 0, 48)
		time.Sleep(5 * time.Minute)
		w.stops("away before the answer is written", w.nomad, 1)
		w.stops("away before the answer is written", w.kube, 0)
		w.nomad.locked(func() { w.nomad.check = nil })
		w.bank.goesAway(false)
		time.Sleep(5 * time.Minute)
		w.stops("there again", w.nomad, 1)
		w.stops("there again", w.kube, 1)
		w.reserved("there again", 1, 1)
	})
}

// TestWritesFail has the ledger be read and not written: nothing is called, and nothing that was not called is in the ledger later.
func TestWritesFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		one := w.start(w.process("a"))
		time.Sleep(5 * time.Second)
		w.bank.refusing(func() error { return errAway })
		w.nomad.strike(0, 0, 95)
		time.Sleep(5 * time.Minute)
		w.stops("not written", w.nomad, 0)
		if v := one.View().Load(); len(v.Result.State.Ledger.Rescues) > 0 || len(v.Problems) != 1 {
			t.Errorf("ledger %+v, problems %+v", v.Result.State.Ledger, v.Problems)
		}
		w.bank.refusing(nil)
		time.Sleep(time.Minute)
		w.stops("written", w.nomad, 1)
		w.reserved("written", 1)
		if r := w.bank.ledger().Rescues[0]; r.Reserved.Sub(r.Began) < 5*time.Minute {
			t.Errorf("reserved %v after its beginning", r.Reserved.Sub(r.Began))
		}
	})
}

// TestTermOfAnother has the first write of a leader fail, while another process begins the term of that number: it is not taken for its own. Later another
// process begins a term, and the leader steps down, before it leads again with a term of its own.
func TestTermOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		lead := func() {
			l, v, err := w.bank.read()
			if _, err2 := w.bank.write(rescue.State{Ledger: l}.Lead().Ledger, v); err != nil || err2 != nil {
				t.Error(err, err2)
			}
		}
		w.bank.refusing(func() error {
			w.bank.refusing(nil)
			lead()
			return errLost
		})
		one := w.start(w.process("a"))
		time.Sleep(time.Minute)
		if v := one.View().Load(); w.bank.terms() != 2 || !v.Leads || v.Result.State.Term != 2 {
			t.Errorf("term %d, leads %t in term %d", w.bank.terms(), v.Leads, v.Result.State.Term)
		}
		lead()
		time.Sleep(time.Minute)
		if v := one.View().Load(); w.bank.terms() != 4 || !v.Leads || v.Result.State.Term != 4 || one.log.count("this one steps down") != 1 {
			t.Errorf("term %d, leads %t in term %d", w.bank.terms(), v.Leads, v.Result.State.Term)
		}
	})
}

// TestRepairedBeforeCall has a fault end between the reservation and its call: there is no call, and the move is cancelled.
func TestRepairedBeforeCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		one := w.process("a")
		one.clients[0].atLive = func() { w.nomad.repair(0) }
		w.start(one)
		w.nomad.strike(0, 0, 95)
		time.Sleep(5 * time.Minute)
		w.stops("repaired", w.nomad, 0)
		if n := one.View().Load().Counts.Outcomes[fleet.OutcomeKey{Cluster: "nomad", Outcome: rescue.Cancelled}]; n != 1 {
			t.Errorf("%d moves are cancelled", n)
		}
	})
}

// noLeader is an election that is not possible at first.
type noLeader struct {
	always
	tries atomic.Int32
}

func (n *noLeader) Lead(ctx context.Context, f func(context.Context)) error {
	if n.tries.Add(1) < 5 {
		return errors.New("forbidden")
	}
	return n.always.Lead(ctx, f)
}

// TestElection has no leader be elected at first: a problem tells it, once.
func TestElection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		one := w.start(w.processWith("a", &noLeader{}))
		time.Sleep(15 * time.Second)
		if v := one.View().Load(); v.Leads || len(v.Problems) != 1 || v.Problems[0].Code != problem.Election || one.log.count("level=ERROR") != 1 {
			t.Errorf("leads %t, problems %+v", v.Leads, v.Problems)
		}
		time.Sleep(15 * time.Second)
		if v := one.View().Load(); !v.Leads || len(v.Problems) > 0 {
			t.Errorf("leads %t, problems %+v", v.Leads, v.Problems)
		}
	})
}

// TestQuorumIsTold has three nodes get a fault of one cause: nothing is called, and the log tells it once.
func TestQuorumIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		one := w.start(w.process("a"))
		time.Sleep(5 * time.Second)
		for n := range 3 {
			w.nomad.strike(n, 0, 79)
		}
		time.Sleep(10 * time.Minute)
		w.stops("by quorum", w.nomad, 0)
		if n := one.log.count(`"all acts are stopped" by=quorum`); n != 1 {
			t.Errorf("told %d times", n)
		}
		if err := one.Resume(t.Context(), "anna"); err != nil {
			t.Error(err)
		}
		time.Sleep(10 * time.Minute)
		w.stops("resumed", w.nomad, 3)
		if n := one.log.count("acts are allowed again"); n != 1 {
			t.Errorf("told %d times", n)
		}
	})
}

// TestHangingCluster has the calls of one cluster not end: another one is not held up.
func TestHangingCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		w.policy.MaxNodes, w.policy.QuorumNodes = 10, 10
		one := w.process("a")
		one.clients[0].hangs = true
		w.start(one)
		time.Sleep(5 * time.Second)
		for n := range 3 {
			w.nomad.strike(n, 0, 95)
		}
		time.Sleep(5 * time.Second)
		w.kube.strike(0, 0, 48)
		began := time.Now()
		for len(w.kube.made()) == 0 && time.Since(began) < 10*time.Minute {
			time.Sleep(100 * time.Millisecond)
		}
		if took := time.Since(began); took > w.policy.Delay+3*time.Second {
			t.Errorf("the other cluster had to wait for %v", took)
		}
		time.Sleep(time.Minute)
		if v := one.View().Load(); v.Counts.Acts[fleet.ActKey{Cluster: "nomad", Answer: "failed"}] == 0 {
			t.Errorf("counts %+v", v.Counts)
		}
	})
}

// TestOff has a cluster in mode off: nothing is asked of its servers.
func TestOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		w.nomad.c.Mode = rescue.ModeOff
		one := w.start(w.process("a"))
		time.Sleep(time.Minute)
		if c := one.clients[0].shown.Load(); !c.ReadAt.IsZero() {
			t.Errorf("it was read at %v", c.ReadAt)
		}
		if c := one.View().Load().Clusters[1]; c.ReadAt.IsZero() {
			t.Error("the other one was not read")
		}
	})
}

// TestManyChanges has a cluster change a thousand times a second: there is one decision a second.
func TestManyChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		one := w.start(w.process("a"))
		time.Sleep(5 * time.Second)
		var views atomic.Int32
		go func() {
			for range one.View().Watch(t.Context()) {
				views.Add(1)
			}
		}()
		for range 10_000 {
			one.clients[0].shown.Store(w.nomad.snapshot())
			time.Sleep(time.Millisecond)
		}
		if n := views.Load(); n < 9 || n > 12 {
			t.Errorf("%d decisions in 10 s", n)
		}
	})
}

// TestAnswers has an orchestrator not let an act through, and refuse another one for good.
func TestAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		var allows atomic.Bool
		w.kube.reply = func(a rescue.Act) (rescue.Answer, bool) {
			switch {
			case a.Subject.Work == "kube-w1":
				return rescue.Answer{Kind: rescue.Denied, Text: "two budgets"}, false
			case !allows.Load():
				return rescue.Answer{Kind: rescue.Blocked, Text: "a budget", Remedy: "change it"}, false
			}
			return rescue.Answer{Kind: rescue.Accepted}, true
		}
		one := w.start(w.process("a"))
		time.Sleep(time.Second)
		w.kube.strike(0, 0, 48)
		w.kube.strike(1, 0, 79)
		time.Sleep(10 * time.Minute)
		v := one.View().Load()
		if v.Counts.Acts[fleet.ActKey{Cluster: "kube", Answer: "denied"}] != 1 || v.Counts.Acts[fleet.ActKey{Cluster: "kube", Answer: "blocked"}] < 20 {
			t.Errorf("counts %+v", v.Counts)
		}
		for text, want := range map[string]int{
			"reason=BLOCKED": 1, "answer=blocked": 1, "answer=denied": 1, "rescue is refused": 1, "outcome=refused": 1, "work is stopped": 2,
		} {
			if n := one.log.count(text); n != want {
				t.Errorf("%d lines with %s, want %d", n, text, want)
			}
		}
		allows.Store(true)
		time.Sleep(time.Minute)
		if calls := w.kube.made(); calls[len(calls)-1].kind != rescue.Accepted || calls[len(calls)-1].Subject.Work != "kube-w0" {
			t.Errorf("the calls are %+v", calls)
		}
	})
}

// TestMarks has all GPUs of a node fail: it is marked and ineligible, which is in the ledger before, and eligible again after the repair.
func TestMarks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		w.policy.Ineligible, w.policy.MaxGPUs = true, 2
		one := w.process("a")
		one.p.latency = 300 * time.Millisecond
		w.start(one)
		time.Sleep(time.Second)
		w.nomad.strike(0, 0, 79)
		w.nomad.strike(0, 1, 79)
		time.Sleep(2 * time.Minute)
		if n := w.nomad.c.Nodes[0]; n.Schedulable || n.Mark != health.Reset {
			t.Errorf("the node is %+v", n)
		}
		if l := w.bank.ledger().Ineligible; len(l) != 1 || l[0].Index == 0 {
			t.Errorf("the ledger has %+v", l)
		}
		if n := len(w.nomad.marks); n != 1 {
			t.Errorf("%d calls: %+v", n, w.nomad.marks)
		}
		w.nomad.repair(0)
		time.Sleep(2 * time.Minute)
		if n := w.nomad.c.Nodes[0]; !n.Schedulable || n.Mark != health.NoRepair || len(w.bank.ledger().Ineligible) > 0 || len(w.nomad.marks) != 2 {
			t.Errorf("the node is %+v, the ledger has %+v, the calls %+v", n, w.bank.ledger().Ineligible, w.nomad.marks)
		}
	})
}

// TestReplicaShows has a process that does not lead decide on a copy: it shows what waits, and writes and calls nothing.
func TestReplicaShows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTeam(t)
		w.election.holder, w.election.until = "another", time.Now().Add(24*time.Hour)
		one := w.start(w.process("b"))
		w.nomad.strike(0, 0, 95)
		time.Sleep(5 * time.Minute)
		v := one.View().Load()
		if v.Leads || v.Leader != "another" || len(v.Result.Acts) != 1 || w.bank.writes > 0 || len(v.Counts.Acts) > 0 {
			t.Errorf("leads %t, leader %q, acts %+v, %d writes, counts %+v", v.Leads, v.Leader, v.Result.Acts, w.bank.writes, v.Counts)
		}
		w.stops("a replica", w.nomad, 0)
		if log := one.log.String(); log != "" {
			t.Errorf("a replica logs %s", log)
		}
		if r := fleet.Plan(v, rescue.ModeReport); len(r.Acts) != 1 || !r.Acts[0].Listed {
			t.Errorf("the plan is %+v", r.Acts)
		}
	})
}

// What a person gives for a stop has limits, for the ledger is small.
func TestStopTexts(t *testing.T) {
	w := newTeam(t)
	m := w.process("a")
	for _, err := range []error{
		m.Stop(t.Context(), "", "x"), m.Stop(t.Context(), "x", ""), m.Stop(t.Context(), "x", strings.Repeat("x", 301)), m.Resume(t.Context(), ""),
	} {
		if _, ok := errors.AsType[*setting.Error](err); !ok {
			t.Errorf("%v", err)
		}
	}
	if err := m.Stop(t.Context(), "anna", "a driver"); err != nil || w.bank.ledger().Stop == nil {
		t.Errorf("%v, %+v", err, w.bank.ledger())
	}
}
