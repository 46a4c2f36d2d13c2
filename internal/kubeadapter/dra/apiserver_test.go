package dra

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// While the API server does not answer, a new claim waits, and everything else works. It is prepared as soon as the server is back.
func TestAPIServerAway(t *testing.T) {
	r := newRig(t, build(coretest.GPUs(3), health.Ledger{}, config()), func(a *Adapter) { a.limits.call = time.Second })
	for i, name := range []string{"a", "b", "c"} {
		r.api.put(newClaim(name, result(coretest.GPU(i))))
	}
	r.await("a prepared claim", func() bool { _, err := r.prepareOne("a"); return err == nil }) // a busy machine may need several tries
	away := errors.Join(kubeapi.ErrUnavailable, errors.New("connect: connection refused"))
	r.api.fail(away)
	r.await("an error with the cause", func() bool {
		_, err := r.prepareOne("b")
		return err != nil && strings.HasPrefix(err.Error(), "the API server does not answer (waited") && strings.Contains(err.Error(), "connection refused")
	})
	r.await("the answer again", func() bool { _, err := r.prepareOne("a"); return err == nil })
	r.await("its end", func() bool { return r.unprepare("a") == nil })
	r.change = []func(*Adapter){func(a *Adapter) {}}
	r.start()
	calls := r.api.count()
	result := make(chan error, 1)
	go func() { _, err := r.prepareOne("c"); result <- err }()
	r.await("a try", func() bool { return r.api.count() > calls })
	r.api.fail(nil)
	began := time.Now()
	if err := <-result; err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 30*time.Second { // 5 ms are between two tries here, 250 ms else
		t.Errorf("prepared %v after the server was back", took)
	}
}

// A server that has too much to do is asked no sooner than it wants, and more and more rarely.
func TestAPIServerBusy(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		most int
	}{
		"retry after 300 ms": {&kubeapi.StatusError{Code: 429, RetryAfter: 300 * time.Millisecond}, 4},
		"no time":            {&kubeapi.StatusError{Code: 503}, 20},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := &api{err: c.err}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				a := New(coretest.NewSource(), Options{API: api})
				a.limits.apiRetry = 5 * time.Millisecond
				_, err := a.readClaim(ctx, claimRef{"default", "a", uidOf("a")})
				if err == nil || !strings.HasPrefix(err.Error(), "the API server does not answer (waited 1s)") {
					t.Error(err)
				}
				if n := api.count(); n > c.most || n < 2 {
					t.Errorf("%d requests in a second, want at most %d", n, c.most)
				}
			})
		})
	}
}
