// Package hostwatch watches what a host has beside the driver: MPS control daemons that answer, and other agents that
// offer the same GPUs. An agent works without any of it, and says what it can't see.
package hostwatch

import (
	"cmp"
	"context"
	"iter"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

const (
	every         = time.Second            // between looks
	firstAtMost   = time.Second            // for the first look, while the agent waits
	leaveAtMost   = 500 * time.Millisecond // for the loops to end; a disk can hang
	restartAtMost = 5 * time.Second        // for an agent to be replaced: until then two may run, or none
)

// Machine is what a Watcher tells, and whose offer it claims. *monitor.Monitor is one.
type Machine interface {
	SetHost(core.Host)
	Current() *core.Inventory
	Watch(context.Context) iter.Seq[*core.Inventory]
	Watchdog() *watchdog.Registry
}

// Options say what to watch.
type Options struct {
	Agent    string      // names its files; lower case letters, digits and hyphens
	StateDir string      // shared by the agents of the host; "" = overlaps are not seen
	BootID   string      // of the machine; "" = unknown
	MPSRoot  string      // as this process sees it; "" = DefaultMPSRoot
	Config   core.Config // its policy and Overlap
	Log      *slog.Logger
}

// Watcher watches one host for one agent. Make one with New, then call Run once; Settled and Notes are safe for
// concurrent use.
type Watcher struct {
	log      *slog.Logger
	refuse   bool
	daemons  daemons
	register *register // nil = overlaps are not seen

	looked sync.WaitGroup // the first look of each loop
	first  chan struct{}  // closed after those

	mu      sync.Mutex
	host    core.Host
	trouble string // why overlaps are not seen completely; "" = they are
	gone    []other
}

// New returns a watcher. Nothing is looked at yet.
func New(o Options) *Watcher {
	w := &Watcher{
		log: o.Log, refuse: o.Config.Overlap == core.OverlapRefuse,
		daemons: daemonsOf(o.Config.Policy, cmp.Or(o.MPSRoot, DefaultMPSRoot)), first: make(chan struct{}),
	}
	if o.StateDir != "" {
		w.register = &register{
			folder: filepath.Join(o.StateDir, "claims"), agent: o.Agent, boot: o.BootID, refuse: w.refuse,
			started: time.Now().UTC(), log: o.Log, said: map[string]string{},
		}
	}
	return w
}

// ReadOnce looks once, for one who is not the agent: nothing is claimed, locked or changed. The offer is that of an agent
// that would start now.
func ReadOnce(o Options, inv *core.Inventory) core.Host {
	o.Log = slog.New(slog.DiscardHandler)
	w := New(o)
	var h core.Host
	for _, pool := range w.daemons.of(inv) {
		if w.daemons.ask(pool) == nil {
			h.MPS = append(h.MPS, pool)
		}
	}
	if w.register != nil {
		if mine, others, err := w.register.read(); err == nil { // else the agent would not see more
			h.Claims = against(mine, others, offerOf(inv))
			h.Numbering = numberingOf(append(others, mine))
		}
	}
	return h
}

// AwaitFirst waits for the first look of Run at the host, so that nothing is offered that another agent has claimed; but
// only a moment, as a disk can hang.
func (w *Watcher) AwaitFirst(ctx context.Context) {
	t := time.NewTimer(firstAtMost)
	defer t.Stop()
	select {
	case <-w.first:
	case <-t.C:
	case <-ctx.Done():
	}
}

// Run tells the machine what the host has whenever that changes, and claims what the machine offers, until ctx ends.
// It then returns in time even if a disk hangs; what hangs there is abandoned.
func (w *Watcher) Run(ctx context.Context, m Machine) {
	var loops sync.WaitGroup
	w.looked.Add(1)
	loops.Go(func() { w.watchDaemons(ctx, m) })
	if w.register != nil {
		w.looked.Add(1)
		loops.Go(func() { w.watchClaims(ctx, m) })
	} else {
		w.troubled(errNoFolder)
	}
	ended := make(chan struct{})
	go func() {
		w.looked.Wait()
		close(w.first)
		loops.Wait()
		close(ended)
	}()
	<-ctx.Done()
	t := time.NewTimer(leaveAtMost)
	defer t.Stop()
	select {
	case <-ended:
	case <-t.C:
		w.log.Warn("what this agent claims could not be looked after to the end: does the disk hang?")
	}
}

// tell changes a part of what is known of the host, and passes it on if it is news.
func (w *Watcher) tell(m Machine, change func(*core.Host)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := w.host
	if change(&next); slices.Equal(next.MPS, w.host.MPS) && slices.Equal(next.Claims, w.host.Claims) && next.SharesNumbers == w.host.SharesNumbers && next.Numbering.Equal(w.host.Numbering) {
		return
	}
	w.host = next
	m.SetHost(next) // never blocks
}
