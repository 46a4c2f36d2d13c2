package storm

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// startRequests requests devices of both plugins, as for short workloads, until the test ends.
func (w *oneAgent) startRequests(running *sync.WaitGroup) {
	for i, request := range []func(*rand.Rand){w.reserve, w.allocate, w.prefer} {
		running.Go(func() {
			r := rand.New(rand.NewPCG(w.o.seed, uint64(i)+1))
			for w.ctx.Err() == nil {
				request(r)
				w.rest(time.Duration(10+r.IntN(40)) * time.Millisecond)
			}
		})
	}
}

// unknownUnit is a unit that never existed.
const unknownUnit = "GPU-00000000-0000-0000-0000-000000000000"

// reserve requests a unit of Nomad's plugin.
func (w *oneAgent) reserve(r *rand.Rand) {
	id, _ := choose(r, w.nomad.view())
	began, late := time.Now(), w.late(answerLimit)
	_, err := w.nomad.plugin.Reserve([]string{id})
	w.timed("Reserve", began, late)
	if err != nil && !strings.Contains(err.Error(), "unhealthy devices") && !strings.Contains(err.Error(), "unknown device IDs") {
		w.fail("Reserve(%s): %w", id, err)
	}
	w.checkAnswer("Reserve", id, err, began)
}

// allocate requests a unit of the kubelet's plugin.
func (w *oneAgent) allocate(r *rand.Rand) {
	id, u := choose(r, w.kubelet.view())
	if u.of == "" {
		return
	}
	began, late := time.Now(), w.late(answerLimit)
	disturbed, err := w.kubelet.allocate(w.ctx, u.of, id)
	if disturbed {
		return
	}
	w.timed("Allocate", began, late)
	if refused := status.Code(err); refused != codes.OK && refused != codes.FailedPrecondition && refused != codes.NotFound {
		if w.kubelet.undisturbed(time.Now()) { // else the plugin is between two sockets
			w.fail("Allocate(%s): %w", id, err)
		}
		return
	}
	w.checkAnswer("Allocate", id, err, began)
}

// prefer requests the preferred units of all that are healthy.
func (w *oneAgent) prefer(r *rand.Rand) {
	view := w.kubelet.view()
	_, u := choose(r, view)
	var available []string
	for id, other := range view {
		if other.of == u.of && other.healthy {
			available = append(available, id)
		}
	}
	running, before := w.kubelet.now()
	if len(available) == 0 || running == nil {
		return
	}
	n := 1 + r.IntN(len(available))
	ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
	defer cancel()
	began, late := time.Now(), w.late(answerLimit)
	got, err := running.Prefer(ctx, u.of, available, nil, n)
	if _, after := w.kubelet.now(); before != after || err != nil && !w.kubelet.undisturbed(time.Now()) {
		return
	}
	w.timed("GetPreferredAllocation", began, late)
	if err != nil || len(got) > n || slices.ContainsFunc(got, func(id string) bool { return !slices.Contains(available, id) }) {
		w.fail("GetPreferredAllocation(%d of %v): %v, %v", n, available, got, err)
	}
}

// answerLimit is how long an answer may take. The times are printed.
const answerLimit = 5 * time.Second

// timed records how long an answer took.
func (w *oneAgent) timed(call string, began time.Time, late func() bool) {
	took := time.Since(began)
	w.latencies.add(call, took)
	if !late() {
		return
	}
	w.rest(2 * checkEvery) // so that checkViews finds out whether this process did not run
	if late() {
		w.fail("%s took %v", call, took)
	}
}

// choose draws a unit that an orchestrator has, or sometimes one that never existed.
func choose(r *rand.Rand, view map[string]unit) (string, unit) {
	ids := make([]string, 0, len(view)+1)
	for id := range view {
		ids = append(ids, id)
	}
	if slices.Sort(ids); len(ids) == 0 {
		return unknownUnit, unit{}
	}
	id := one(r, ids...)
	if r.IntN(20) == 0 {
		return unknownUnit, view[id]
	}
	return id, view[id]
}

// checkAnswer fails the test if a unit must not, or must, be handed out.
func (w *oneAgent) checkAnswer(call, id string, err error, asked time.Time) {
	switch {
	case id != unknownUnit:
		w.check(call+" answers", id, err == nil, asked)
	case err == nil:
		w.fail("%s hands out a device that never existed", call)
	}
}

// latencies are how long requests took. They are safe for concurrent use.
type latencies struct {
	mu  sync.Mutex
	all map[string][]time.Duration
}

func (l *latencies) add(call string, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all == nil {
		l.all = map[string][]time.Duration{}
	}
	l.all[call] = append(l.all[call], took)
}

// String has, for each call, the number, the percentiles and the longest.
func (l *latencies) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var lines []string
	for call, all := range l.all {
		slices.Sort(all)
		lines = append(lines, fmt.Sprintf("%-24s %7d calls  p50 %v  p99 %v  max %v", call, len(all), all[len(all)/2], all[len(all)*99/100], all[len(all)-1]))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
