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

// work asks for devices on both sides, as if jobs came and went, until the storm ends.
func (w *storm) work(running *sync.WaitGroup) {
	jobs := []func(*rand.Rand){w.reserve, w.allocate, w.prefer}
	for i, job := range jobs {
		running.Go(func() {
			r := rand.New(rand.NewPCG(w.o.seed, uint64(i)+1))
			for w.ctx.Err() == nil {
				job(r)
				w.rest(time.Duration(10+r.IntN(40)) * time.Millisecond)
			}
		})
	}
}

// bogus is a unit that never was.
const bogus = "GPU-00000000-0000-0000-0000-000000000000"

// reserve asks Nomad's plugin for one unit, or for one that never was.
func (w *storm) reserve(r *rand.Rand) {
	id, _ := choose(r, w.nomad.view())
	began, late := time.Now(), w.late(slowest)
	_, err := w.nomad.plugin.Reserve([]string{id})
	w.timed("Reserve", began, late)
	if err != nil && !strings.Contains(err.Error(), "unhealthy devices") && !strings.Contains(err.Error(), "unknown device IDs") {
		w.wrong("Reserve(%s): %w", id, err)
	}
	w.answered("Reserve", id, err, began)
}

// allocate asks the kubelet's plugin.
func (w *storm) allocate(r *rand.Rand) {
	id, u := choose(r, w.kubelet.view())
	if u.of == "" {
		return
	}
	began, late := time.Now(), w.late(slowest)
	disturbed, err := w.kubelet.allocate(w.ctx, u.of, id)
	if disturbed {
		return
	}
	w.timed("Allocate", began, late)
	if refused := status.Code(err); refused != codes.OK && refused != codes.FailedPrecondition && refused != codes.NotFound {
		if w.kubelet.steady(time.Now()) { // else the plugin is between two sockets
			w.wrong("Allocate(%s): %w", id, err)
		}
		return
	}
	w.answered("Allocate", id, err, began)
}

// prefer asks which units to take, of all that are healthy.
func (w *storm) prefer(r *rand.Rand) {
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
	began, late := time.Now(), w.late(slowest)
	got, err := running.Prefer(ctx, u.of, available, nil, n)
	if _, after := w.kubelet.now(); before != after || err != nil && !w.kubelet.steady(time.Now()) {
		return
	}
	w.timed("GetPreferredAllocation", began, late)
	strange := slices.ContainsFunc(got, func(id string) bool { return !slices.Contains(available, id) })
	if err != nil || len(got) > n || strange {
		w.wrong("GetPreferredAllocation(%d of %v): %v, %v", n, available, got, err)
	}
}

// slowest is how long an answer may take. How long answers do take is printed.
const slowest = 5 * time.Second

// timed enters how long an answer took.
func (w *storm) timed(call string, began time.Time, late func() bool) {
	took := time.Since(began)
	w.took.add(call, took)
	if !late() {
		return
	}
	w.rest(2 * lookEvery) // so that it is known if everything stood still
	if late() {
		w.wrong("%s took %v", call, took)
	}
}

// choose picks a unit that an orchestrator has, and now and then one that never was.
func choose(r *rand.Rand, view map[string]unit) (string, unit) {
	ids := make([]string, 0, len(view)+1)
	for id := range view {
		ids = append(ids, id)
	}
	if slices.Sort(ids); len(ids) == 0 {
		return bogus, unit{}
	}
	id := one(r, ids...)
	if r.IntN(20) == 0 {
		return bogus, view[id]
	}
	return id, view[id]
}

// answered judges an answer.
func (w *storm) answered(call, id string, err error, asked time.Time) {
	switch {
	case id != bogus:
		w.judge(call+" answers", id, err == nil, asked)
	case err == nil:
		w.wrong("%s hands out a device that never was", call)
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

// String says of each call how often it was made, the 99th percentile and the longest.
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
