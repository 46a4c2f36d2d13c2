package live

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// load makes an Allocate and a Reserve every requestInterval, in turn of devices that never change and of devices that may be
// removed at any time.
type load struct {
	scene    *scene
	constant []string // devices that never change

	mu       sync.Mutex
	changing []string          // the others
	resource map[string]string // of each device
	requests int
	longest  time.Duration
	refused  map[string]int // of changing: how often, by the error without the ID
}

const requestInterval = 10 * time.Millisecond

// startLoad starts the requests. stop ends them and logs their number.
func (s *scene) startLoad(t *testing.T, constant, changing []string) (l *load, stop func()) {
	l = &load{scene: s, constant: constant, resource: map[string]string{}, refused: map[string]int{}}
	l.add(changing)
	ctx, cancel := context.WithCancel(context.Background())
	began := time.Now()
	var running sync.WaitGroup
	running.Go(func() { l.run(ctx, t) })
	return l, func() {
		cancel()
		running.Wait()
		t.Logf("%d Allocate and as many Reserve, %.0f a second each; the longest took %v; refused of removed devices: %v",
			l.requests, float64(l.requests)/time.Since(began).Seconds(), l.longest, l.refused)
		if l.requests == 0 {
			t.Error("no requests")
		}
	}
}

// add adds changing devices, with the resources that they have now.
func (l *load) add(ids []string) {
	resource, _ := l.scene.resources()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range slices.Concat(l.constant, ids) {
		if resource[id] != "" {
			l.resource[id] = resource[id]
		}
	}
	l.changing = slices.Compact(slices.Sorted(slices.Values(slices.Concat(l.changing, ids))))
}

func (l *load) run(ctx context.Context, t *testing.T) {
	next := time.NewTicker(requestInterval)
	defer next.Stop()
	for n := 0; ; n++ {
		select {
		case <-next.C:
		case <-ctx.Done():
			return
		}
		l.mu.Lock()
		devices, mayFail := l.constant, n%2 == 1
		if mayFail {
			devices = l.changing
		}
		id := devices[n/2%len(devices)]
		resource := l.resource[id]
		l.mu.Unlock()
		l.request(ctx, t, resource, id, mayFail)
	}
}

func (l *load) request(ctx context.Context, t *testing.T, resource, id string, mayFail bool) {
	began := time.Now()
	_, allocateErr := l.scene.kubelet.Allocate(context.WithoutCancel(ctx), resource, id)
	_, reserveErr := l.scene.nomad.reserve(id)
	took := time.Since(began)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.requests++
	l.longest = max(l.longest, took)
	for call, err := range map[string]error{"Allocate": allocateErr, "Reserve": reserveErr} {
		switch {
		case err == nil:
		case !mayFail:
			t.Errorf("%s of %s, which has not changed: %v", call, id, err)
		case !isRefusal(err, id):
			t.Errorf("%s of %s: %v", call, id, err)
		default:
			l.refused[call+": "+strings.ReplaceAll(status.Convert(err).Message(), id, "ID")]++
		}
	}
}

// isRefusal reports whether an error names the device and states that it was removed.
func isRefusal(err error, id string) bool {
	text := err.Error()
	code := status.Code(err)
	return strings.Contains(text, id) &&
		(strings.Contains(text, "no longer offered") || strings.Contains(text, "unknown device IDs")) &&
		(code == codes.NotFound || code == codes.FailedPrecondition || code == codes.Unknown) // Nomad's plugins have no codes
}

// refusals counts the refused requests.
func (l *load) refusals() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, count := range l.refused {
		n += count
	}
	return n
}
