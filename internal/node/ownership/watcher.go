package ownership

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

const (
	firstAtMost   = time.Second            // for the first poll, while the agent waits
	stopAtMost    = 500 * time.Millisecond // for the loops to end; a disk can hang
	restartAtMost = 5 * time.Second        // for an agent to be replaced: until then two may run, or none
	eventPause    = 100 * time.Millisecond // between checks because of file events
)

// timings are the times between checks. They are not configurable.
type timings struct {
	poll   time.Duration // without inotify or while they can't be read or written
	others time.Duration // while another agent has a file: whether it still runs
	alone  time.Duration // otherwise, as events may get lost
}

var defaultTimings = timings{poll: time.Second, others: restartAtMost, alone: 30 * time.Second}

// Monitor receives the node that a Watcher finds, and has the devices that it records. *monitor.Monitor is one.
type Monitor interface {
	UpdateHost(func(*inventory.Host))
	State() core.State
	Changed() <-chan struct{} // closed when there is a newer inventory
	Watchdog() *watchdog.Registry
}

// Options are those of a Watcher.
type Options struct {
	Agent    string      // name of its files; lower case letters, digits and hyphens
	StateDir string      // shared by the agents of the node; "" = overlaps are not seen
	BootID   string      // of the node; "" = unknown
	Config   core.Config // its Policy and Overlap
	Log      *slog.Logger

	// ResetRuns reports whether an nvidia-smi may still reset a GPU of the node, also one whose agent was killed; nil = that is never known.
	ResetRuns func() (bool, error)

	// NewWatcher creates an inotify instance; nil = fsnotify.NewWatcher. It is for tests in which inotify is unavailable.
	NewWatcher func() (*fsnotify.Watcher, error)
}

// Watcher watches one node for one agent. Make one with New, then call Run once; First and Problems are safe for
// concurrent use.
type Watcher struct {
	log     *slog.Logger
	refuse  bool
	store   *store // nil = overlaps are not seen
	timings timings
	resets  func() (bool, error) // see Options.ResetRuns

	decider *decider // nil = no GPU moves between APIs

	newWatcher func() (*fsnotify.Watcher, error) // of inotify; nil = fsnotify.NewWatcher

	first   chan struct{} // closed after the first poll
	changed chan struct{} // capacity 1: a file has changed, or what this process wants for itself

	openDriver *time.Timer // opens it if the disk hangs; used by the goroutine of watchAgents. nil = it is not released

	latest atomic.Pointer[view] // that was read of the files; nil = none

	mu               sync.Mutex
	host             inventory.Host
	ownershipProblem problem.Problem // why the file of the node is not in force; zero = it is
	problem          problem.Problem // why overlaps are not seen completely; zero = they are
	stopped          []otherAgent    // that offer devices of this agent, too, and have not run for long
	faults           []fault
	kept             []kept
}

// New returns a watcher. It reads nothing yet.
func New(o Options) *Watcher {
	w := &Watcher{
		log: o.Log, refuse: o.Config.Overlap == inventory.OverlapRefuse,
		first: make(chan struct{}), changed: make(chan struct{}, 1), timings: defaultTimings, newWatcher: o.NewWatcher, resets: o.ResetRuns,
	}
	if o.StateDir != "" {
		w.store = &store{
			folder: filepath.Join(o.StateDir, FolderName), agent: o.Agent, boot: o.BootID, refuse: w.refuse,
			started: time.Now().UTC(), log: o.Log,
		}
	}
	return w
}

// First is closed after the first poll of Run. Wait for it, but not for long, as a disk can hang: the first inventory has then what the
// node limits. With overlap = refuse nothing is offered before the files are read but what this agent has recorded already.
func (w *Watcher) First() <-chan struct{} { return w.first }

// Run updates the node of the monitor whenever it changes, and records what the monitor offers, until ctx ends. It then returns
// within half a second even if a disk hangs; the hung goroutine is abandoned. While a GPU is taken it waits a little for that to be released.
func (w *Watcher) Run(ctx context.Context, m Monitor) {
	if w.store == nil {
		w.setProblem(errNoFolder)
		close(w.first)
		return
	}
	if w.refuse { // before the disk is read, which can hang
		w.update(m, func(h *inventory.Host) { h.Recorded = inventory.Recorded{Reason: elseUnread, Pending: true} })
	}
	if w.decider != nil {
		var cancel context.CancelFunc
		ctx, cancel = w.decider.untilReleased(ctx)
		defer cancel()
	}
	if !watch.RunUntil(ctx, stopAtMost, func() { w.watchAgents(ctx, m) }) {
		w.log.Warn("files of the agents not released in time: check the disk of the state directory")
	}
}

// update changes a part of the node, and passes it on if that differs.
func (w *Watcher) update(m Monitor, change func(*inventory.Host)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := w.host
	if change(&next); slices.Equal(next.Peers, w.host.Peers) && next.Recorded.Equal(w.host.Recorded) &&
		next.SharesNumbers == w.host.SharesNumbers && next.Numbering.Equal(w.host.Numbering) && next.Ownership.Equal(w.host.Ownership) {
		return
	}
	w.host = next
	m.UpdateHost(func(h *inventory.Host) { // never blocks
		h.Peers, h.Recorded, h.Ownership = next.Peers, next.Recorded, next.Ownership
		h.SharesNumbers, h.Numbering = next.SharesNumbers, next.Numbering
	})
}
