package nomad

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

const (
	lockPath = "/var/gpu-fleet/leader"
	locked   = `{"Path":"gpu-fleet/leader","Items":{"holder":"other"},"Lock":{"ID":"l1"}}`
)

// lead leads until the lease ends, and returns how long that took from now.
func lead(t *testing.T, s *server, change func()) (lasted time.Duration) {
	t.Helper()
	l := s.cluster(t).Leader("", "gpu-fleet", "me")
	err := l.Lead(t.Context(), func(ctx context.Context) {
		time.Sleep(time.Minute)
		if ctx.Err() != nil || l.Holder() != "me" {
			t.Errorf("after a minute of renewals: %v, holder %q", ctx.Err(), l.Holder())
		}
		change()
		began := time.Now()
		<-ctx.Done()
		lasted = time.Since(began)
	})
	if err != nil {
		t.Error(err)
	}
	return lasted
}

// The lead ends TTL after the latest renewal that was sent, or when the servers answer that it is lost.
func TestLeaseEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		status      int
		body        string
		least, most time.Duration
	}{
		"no answer":           {-1, "", lockTTL - renewPause, lockTTL},
		"no leader":           {http.StatusInternalServerError, "No cluster leader", lockTTL - renewPause, lockTTL},
		"another holder":      {http.StatusConflict, "attempting to modify locked variable", 0, renewPause},
		"no process holds it": {http.StatusConflict, "variable doesn't hold a lock", 0, renewPause},
		"variable is gone":    {http.StatusNotFound, "variable not found", 0, renewPause},
		"right is taken":      {http.StatusForbidden, "Permission denied", lockTTL - renewPause, lockTTL},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newServer(0, 0)
				s.bodies[lockPath] = locked
				if d := lead(t, s, func() { s.refuse(lockPath, tc.status, tc.body) }); d < tc.least || d > tc.most {
					t.Errorf("it lasted for %v, want %v to %v", d, tc.least, tc.most)
				}
			})
		})
	}
}

// A process that was stopped for longer than TTL does not act: the clock is looked at before its timer has run.
func TestLeaseAfterStop(t *testing.T) {
	now := time.Now()
	for _, sent := range []time.Time{now.Add(-lockTTL), now.Add(-lockTTL).Round(0)} {
		l := newLease(t.Context(), "l1", now)
		l.timer.Stop()
		if l.Err() != nil {
			t.Error("it ends too early")
		}
		l.sent = sent
		if l.Err() == nil {
			t.Error("it does not end by the clock")
		}
		s := newServer(0, 0)
		if answer := s.cluster(t).Do(l, rescue.Act{Work: []rescue.Target{{ID: "a1"}}}); answer.Kind != rescue.NotMade || len(s.asked) > 0 {
			t.Errorf("%+v, calls %v", answer, s.asked)
		}
	}
	late := newLease(t.Context(), "l1", now.Add(-lockTTL))
	late.renewed(now)
	if late.Err() == nil {
		t.Error("a renewal that was answered too late renews it")
	}
}

// While another process leads, this one waits and knows who it is. A token without the right can't be elected.
func TestAwaitLead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(0, 0)
		s.refuse(lockPath, http.StatusConflict, "{}")
		l := s.cluster(t).Leader("", "gpu-fleet", "me")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := l.Lead(ctx, func(context.Context) { t.Error("it leads") }); err == nil || s.times(lockPath) < 20 {
			t.Errorf("%v after %d calls", err, s.times(lockPath))
		}
		s.refuse(lockPath, http.StatusForbidden, "Permission denied")
		if err := l.Lead(t.Context(), func(context.Context) { t.Error("it leads") }); err == nil {
			t.Error("no error")
		}
	})
}
