package fleet_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
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
func (w *team) process(name string) *member {
	m := &member{p: &process{chance: w.chance, identity: name}, ended: make(chan struct{})}
	m.clients = []*client{newClient(w.nomad, m.p), newClient(w.kube, m.p)}
	m.Controller = fleet.New(fleet.Options{
		Identity: name, Policy: w.policy, Clusters: []fleet.Cluster{m.clients[0], m.clients[1]}, Store: store{w.bank, m.p}, Leader: seat{w.election, m.p},
		Log: slog.New(slog.NewTextHandler(&m.log, nil)),
	})
	return m
}

// start has a process run until the test ends, or it is killed.
func (w *team) start(m *member) *member {
	ctx, cancel := context.WithCancel(w.Context())
	m.kill = func() {
		cancel()
	}
	m.p.kill = cancel
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
		w.nomad.locked(func() { w.nomad.strike(0, 0, 95) })
		w.kube.locked(func() { w.kube.strike(1, 0, 48) })
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
