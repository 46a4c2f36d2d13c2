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

	"github.com/tandem-gpu/tandem/test/rig"
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
	if u.Name == "" {
		return
	}
	began, late := time.Now(), w.late(answerLimit)
	disturbed, err := w.kubelet.allocate(w.ctx, u.Name, id)
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
		if other.Name == u.Name && other.Healthy {
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
	got, err := running.Prefer(ctx, u.Name, available, nil, n)
	if _, after := w.kubelet.now(); before != after || err != nil && !w.kubelet.undisturbed(time.Now()) {
		return
	}
	w.timed("GetPreferredAllocation", began, late)
	if err != nil || len(got) > n || slices.ContainsFunc(got, func(id string) bool { return !slices.Contains(available, id) }) {
		w.fail("GetPreferredAllocation(%d of %v): %v, %v", n, available, got, err)
	}
}

// answerLimit is how long an answer may take.
const answerLimit = 5 * time.Second

// timed fails the test if an answer took too long.
func (w *oneAgent) timed(call string, began time.Time, late func() bool) {
	took := time.Since(began)
	if !late() {
		return
	}
	w.rest(2 * checkEvery) // so that checkViews finds out whether this process did not run
	if late() {
		w.fail("%s took %v", call, took)
	}
}

// choose draws a unit that an orchestrator has, or sometimes one that never existed.
func choose(r *rand.Rand, view map[string]rig.View) (string, rig.View) {
	ids := make([]string, 0, len(view)+1)
	for id := range view {
		ids = append(ids, id)
	}
	if slices.Sort(ids); len(ids) == 0 {
		return unknownUnit, rig.View{}
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
	case id != unknownUnit && err != nil:
		w.check(fmt.Sprintf("%s answers %q", call, err), id, false, asked)
	case id != unknownUnit:
		w.check(call+" answers", id, true, asked)
	case err == nil:
		w.fail("%s hands out a device that never existed", call)
	}
}
