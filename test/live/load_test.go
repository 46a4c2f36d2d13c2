package live

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// load is work that starts all the time: a hundred times a second an Allocate and a Reserve, of devices that
// are left alone and of devices that may be withdrawn at any moment, in turn.
type load struct {
	scene *scene

	mu      sync.Mutex
	alone   []string          // devices that nobody touches
	wanted  []string          // devices that come and go
	known   map[string]string // the resource of each
	asked   int
	longest time.Duration
	refused map[string]int // of the wanted: how often, by what was said, without the IDs
}

const everyRequest = 10 * time.Millisecond

// press starts asking. stop ends it and says what it was like.
func (s *scene) press(t *testing.T, alone, wanted []string) (l *load, stop func()) {
	l = &load{scene: s, alone: alone, known: map[string]string{}, refused: map[string]int{}}
	l.learn(wanted)
	ctx, cancel := context.WithCancel(context.Background())
	began := time.Now()
	var asking sync.WaitGroup
	asking.Go(func() { l.run(ctx, t) })
	return l, func() {
		cancel()
		asking.Wait()
		t.Logf("%d Allocate and as many Reserve, %.0f a second each; the longest took %v; refused of what was withdrawn: %v",
			l.asked, float64(l.asked)/time.Since(began).Seconds(), l.longest, l.refused)
		if l.asked == 0 {
			t.Error("nobody asked")
		}
	}
}

// learn adds devices that come and go, as the orchestrators know them now.
func (l *load) learn(ids []string) {
	resource, _ := l.scene.resources()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range slices.Concat(l.alone, ids) {
		if resource[id] != "" {
			l.known[id] = resource[id]
		}
	}
	l.wanted = slices.Compact(slices.Sorted(slices.Values(slices.Concat(l.wanted, ids))))
}

func (l *load) run(ctx context.Context, t *testing.T) {
	next := time.NewTicker(everyRequest)
	defer next.Stop()
	for n := 0; ; n++ {
		select {
		case <-next.C:
		case <-ctx.Done():
			return
		}
		l.mu.Lock()
		of, mayFail := l.alone, n%2 == 1
		if mayFail {
			of = l.wanted
		}
		id := of[n/2%len(of)]
		resource := l.known[id]
		l.mu.Unlock()
		l.ask(ctx, t, resource, id, mayFail)
	}
}

func (l *load) ask(ctx context.Context, t *testing.T, resource, id string, mayFail bool) {
	began := time.Now()
	_, kubelet := l.scene.kubelet.Allocate(context.WithoutCancel(ctx), resource, id)
	_, nomad := l.scene.nomad.reserve(id)
	took := time.Since(began)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked++
	l.longest = max(l.longest, took)
	for side, err := range map[string]error{"Allocate": kubelet, "Reserve": nomad} {
		switch {
		case err == nil:
		case !mayFail:
			t.Errorf("%s of %s, which nobody touches: %v", side, id, err)
		case !isClear(err, id):
			t.Errorf("%s of %s: not a clear refusal: %v", side, id, err)
		default:
			l.refused[side+": "+strings.ReplaceAll(status.Convert(err).Message(), id, "ID")]++
		}
	}
}

// isClear reports whether an error names the device and says that it is no longer there.
func isClear(err error, id string) bool {
	text := err.Error()
	code := status.Code(err)
	return strings.Contains(text, id) &&
		(strings.Contains(text, "no longer offered") || strings.Contains(text, "unknown device IDs")) &&
		(code == codes.NotFound || code == codes.FailedPrecondition || code == codes.Unknown) // Nomad's plugins have no codes
}

// texts are what the refusals said.
func (l *load) texts() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.refused))
}
