package kubeadapter

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// Grant is a device ID that was handed out and that a pod may hold, as it is kept on disk.
type Grant struct {
	Resource string      `json:"resource"`
	ID       core.UnitID `json:"id"`
	NUMANode int         `json:"numaNode"`
	Gone     time.Time   `json:"gone,omitzero"` // since when it is not offered; zero = it was when this was written
}

// GrantStore keeps what must outlive the agent. Load comes first and both are called from one goroutine; they may be
// slow, and say themselves what goes wrong.
type GrantStore interface {
	Load() []Grant
	Save([]Grant)
}

// holdPace holds the times of a tracker.
type holdPace struct {
	ask      time.Duration // limit of one question to the kubelet
	load     time.Duration // for the disk, before devices are offered without what it knows
	soonest  time.Duration // between two questions
	again    time.Duration // longest rest between questions, which grows after each change
	burst    time.Duration // after a change; then questions go on only while something depends on them
	young    time.Duration // since the kubelet started: its answers may lack pods until it has heard from the API server
	stale    time.Duration // since the latest answer, or the start: after that none is expected
	inFlight time.Duration // from Allocate to the kubelet's first answer that has it
	keep     time.Duration // of an ID that left, while the kubelet can't be asked
}

var defaultHoldPace = holdPace{
	ask: 2 * time.Second, load: 2 * time.Second, soonest: 100 * time.Millisecond, again: time.Minute, burst: 5 * time.Minute,
	young: 2 * time.Minute, stale: 5 * time.Minute, inFlight: 10 * time.Second, keep: 24 * time.Hour,
}

// tracker knows which device IDs pods may hold: from the kubelet where it can be asked, and from what was handed out.
//
//	Allocate, Load -> holdings <- run, which asks the kubelet after each change of the offer and each new stream
//	                     |
//	                  lister: the lists of the kubelet, and what Allocate and GetPreferredAllocation may give
type tracker struct {
	src    Source
	socket string // of the pod-resources API; "" = it is not read
	store  GrantStore
	log    *slog.Logger
	pace   holdPace
	bell   *bell         // rung when the holdings change
	asked  chan struct{} // capacity 1: there is reason to ask the kubelet
	dirty  chan struct{} // capacity 1: there is something to save
	loaded chan struct{} // closed when the disk has answered
	noted  []string      // what was logged; of check alone

	mu     sync.Mutex
	latest *holdings
	ours   map[string]bool // resources that this agent has served
	began  time.Time
	good   time.Time // of the latest answer; zero = there was none
	failed string    // why there is none now; "" = there is one, or nobody has asked
}

func newTracker(src Source, o Options) *tracker {
	t := &tracker{
		src: src, socket: o.PodResourcesSocket, store: o.Grants, log: o.Log, pace: defaultHoldPace, bell: newBell(),
		asked: make(chan struct{}, 1), dirty: make(chan struct{}, 1), loaded: make(chan struct{}),
		latest: &holdings{grants: map[unitKey]grant{}}, ours: map[string]bool{}, began: time.Now(),
	}
	if t.socket != "" { // what was handed out before waits for an answer if it is offered under another name now
		t.latest.checked = map[unitKey]bool{}
	}
	for _, resource := range o.Offered {
		t.ours[resource] = true
	}
	return t
}

// now is what is known; nil without a tracker.
func (t *tracker) now() *holdings {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.latest
}

// ask has the kubelet asked soon. It never blocks.
func (t *tracker) ask() {
	if t != nil {
		poke(t.asked)
	}
}

func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// grant notes that units were handed out. It is called while the kubelet waits, and waits for no disk.
func (t *tracker) grant(units []core.Unit) {
	if t == nil || len(units) == 0 {
		return
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, u := range units {
		if _, known := t.latest.grants[keyOf(u)]; !known {
			poke(t.dirty)
		}
	}
	t.latest = t.latest.granted(now, units)
}

// begin takes up what an earlier agent handed out and asks the kubelet for the first time, before anything is offered;
// a disk or a kubelet that hangs is not waited for. The saver runs until ctx ends.
func (t *tracker) begin(ctx context.Context) (saved <-chan struct{}) {
	done := make(chan struct{})
	go func() { // left behind if the disk hangs
		defer close(done)
		t.save(ctx)
	}()
	if t.store != nil {
		wait, cancel := context.WithTimeout(ctx, t.pace.load)
		defer cancel()
		select {
		case <-t.loaded:
		case <-wait.Done():
			if ctx.Err() == nil {
				t.log.Warn("what was handed out before can't be read and is not waited for: does the disk hang?")
			}
		}
	}
	t.check(ctx)
	return done
}

// run asks the kubelet when there is reason to, until ctx ends.
func (t *tracker) run(ctx context.Context, turns *watchdog.Task) {
	defer turns.Done()
	since := time.Now() // of the latest reason
	for {
		rest := t.rest(time.Since(since))
		turns.Heartbeat(rest)
		var due <-chan time.Time
		if rest > 0 {
			due = time.After(rest)
		}
		select {
		case <-t.asked:
			since = time.Now()
		case <-due:
		case <-ctx.Done():
			return
		}
		turns.Heartbeat(t.pace.ask + t.pace.soonest)
		t.check(ctx)
		if !pause(ctx, t.pace.soonest) {
			return
		}
	}
}

// rest is how long to wait before the kubelet is asked again, given the time since the latest reason; 0 = until there is
// another.
func (t *tracker) rest(since time.Duration) time.Duration {
	h, inv := t.now(), t.src.Current()
	if t.socket != "" && since < t.pace.burst {
		return min(max(since, t.pace.soonest), t.pace.again)
	}
	if len(h.vanished(listings(inv))) > 0 || len(h.withheld(inv)) > 0 {
		return t.pace.again
	}
	return 0
}

// follow makes changed readable after each new inventory, and asks the kubelet again if other units are offered or
// under other resources.
func (t *tracker) follow(ctx context.Context, changed chan<- struct{}) {
	var last map[unitKey]int
	for inv := range t.src.Watch(ctx) {
		if offered := t.offered(inv); !maps.Equal(offered, last) {
			last = offered
			t.ask()
		}
		poke(changed)
	}
}

// offered are the units of an inventory with their NUMA nodes. Their resources are this agent's from now on.
func (t *tracker) offered(inv *core.Inventory) map[unitKey]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	offered := make(map[unitKey]int, inv.Len())
	for u := range inv.Units() {
		offered[keyOf(u)] = u.Device.NUMANode
		t.ours[ResourceOf(u)] = true
	}
	return offered
}

// check asks the kubelet and takes its answer in.
func (t *tracker) check(ctx context.Context) {
	inv := t.src.Current()
	r := reading{offered: t.offered(inv), ready: inv.Driver().State == core.DriverReady}
	if t.socket != "" {
		limit, cancel := context.WithTimeout(ctx, t.pace.ask)
		answer, err := podresources.List(limit, t.socket)
		cancel()
		if ctx.Err() != nil {
			return
		}
		r.now = time.Now()
		r.unreadable = errors.Is(err, podresources.ErrNoFolder)
		if t.read(r.now, err); err == nil {
			r.answer = &answer
			age := r.now.Sub(answer.Started)
			r.partial = answer.Pods == 0 || age >= 0 && age < t.pace.young
		}
	} else {
		r.now = time.Now()
	}
	t.take(inv, r)
}

// read notes whether the kubelet answered, and logs a change.
func (t *tracker) read(now time.Time, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		if t.failed != "" || t.good.IsZero() {
			t.log.Info("the kubelet's pod-resources API is read: a device that a pod holds is known", "socket", t.socket)
		}
		t.good, t.failed = now, ""
		return
	}
	if t.failed == "" {
		t.log.Info("the kubelet's pod-resources API can't be read: whether a pod holds a device is not known",
			"socket", t.socket, "error", err)
	}
	t.failed = err.Error()
}

// take makes the holdings that follow from a reading the latest.
func (t *tracker) take(inv *core.Inventory, r reading) {
	t.mu.Lock()
	prev := t.latest
	last := t.began
	if t.good.After(last) {
		last = t.good
	}
	r.unreadable = t.socket != "" && r.answer == nil && (r.unreadable || r.now.Sub(last) >= t.pace.stale)
	r.ours = t.ours
	next := prev.after(r, t.pace)
	t.latest = next
	t.mu.Unlock()
	notes := next.notes(next.vanished(listings(inv)))
	for _, note := range notes {
		if r.ready && !slices.Contains(t.noted, note) {
			t.log.Info(note)
		}
	}
	t.noted = notes
	if !maps.EqualFunc(prev.grants, next.grants, func(a, b grant) bool { return a.numaNode == b.numaNode && a.gone.Equal(b.gone) }) {
		poke(t.dirty)
	}
	if !next.equal(prev) {
		t.bell.ring()
	}
}

// equal reports whether two holdings lead to the same lists.
func (h *holdings) equal(o *holdings) bool {
	same := func(a, b grant) bool { return a.numaNode == b.numaNode }
	return maps.EqualFunc(h.grants, o.grants, same) && maps.Equal(h.pods, o.pods) && maps.Equal(h.checked, o.checked) &&
		(h.checked == nil) == (o.checked == nil)
}
