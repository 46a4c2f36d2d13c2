package publisher_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// However long the API server was away, a taint is there within five seconds of its return: while there is no connection the tries are
// frequent, and cost the server nothing.
func TestTaintAfterAnOutage(t *testing.T) {
	inBubble(t, func(a *agent) {
		for i := range 40 {
			a.set(gpu(0))
			a.api.SetDown(true)
			a.after(time.Second)
			a.devices.Store([]kubeapi.Device{tainted(gpu(0), kubeapi.NoSchedule)})
			a.after(time.Duration(i*i) * 700 * time.Millisecond)
			a.api.SetDown(false)
			back := time.Now()
			for len(a.published()[0].Taints) == 0 && time.Since(back) < time.Minute {
				a.after(50 * time.Millisecond)
			}
			if took := time.Since(back); took > 5100*time.Millisecond {
				t.Errorf("outage %d: the taint came after %v", i, took)
			}
		}
	})
}

// A server that answers that it has too much to do is asked no sooner than it wants, and more and more rarely without that. Both goroutines
// of the publisher ask.
func TestBusyServer(t *testing.T) {
	for name, c := range map[string]struct {
		failure kubeapitest.Failure
		most    int // requests in ten minutes
		within  time.Duration
	}{
		"retry after 25 s": {kubeapitest.Failure{Code: 429, Reason: "TooManyRequests", RetryAfter: 25}, 2 * 10 * 60 / 25, 38 * time.Second},
		"no time":          {kubeapitest.Failure{Code: 503, Message: "etcd is gone"}, 2*10*60/15 + 16, 31 * time.Second},
	} {
		inBubble(t, func(a *agent) {
			a.set(gpu(0))
			a.api.Fail("", -1, c.failure)
			a.api.CutWatches()
			a.devices.Store([]kubeapi.Device{tainted(gpu(0), kubeapi.NoSchedule)})
			a.api.ForgetRequests()
			a.after(10 * time.Minute)
			n := len(a.api.Requests())
			t.Logf("%s: %d requests in ten minutes", name, n)
			if n > c.most || n < 10 {
				t.Errorf("%s: %d requests in ten minutes, want at most %d", name, n, c.most)
			}
			a.api.Resume()
			a.after(c.within)
			a.want(tainted(gpu(0), kubeapi.NoSchedule))
		})
	}
}

// The waits of an outage are over when the server lists the slices again: another failure is followed by a short one.
func TestFailureAfterAnOutage(t *testing.T) {
	busy := kubeapitest.Failure{Code: 503, Message: "etcd is gone"}
	inBubble(t, func(a *agent) {
		for range 20 {
			a.set(gpu(0))
			a.api.Fail("", -1, busy)
			a.api.CutWatches()
			a.devices.Store([]kubeapi.Device{tainted(gpu(0), kubeapi.NoSchedule)})
			a.after(10 * time.Minute)
			a.api.Resume()
			a.api.Fail("update", 1, busy)
			back := time.Now()
			for len(a.published()[0].Taints) == 0 && time.Since(back) < 2*time.Minute {
				a.after(50 * time.Millisecond)
			}
			if took := time.Since(back); took > 33*time.Second {
				t.Errorf("the taint came %v after the return", took)
			}
		}
	})
}

// A server that starts refuses for a moment what it allows later: that does not cost a minute.
func TestServerThatStarts(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpu(0))
		a.api.SetDown(true)
		a.after(time.Minute)
		a.devices.Store([]kubeapi.Device{tainted(gpu(0), kubeapi.NoSchedule)})
		a.api.Deny("list", "resourceslices")
		a.api.SetDown(false)
		a.after(6 * time.Second)
		a.api.Allow("list", "resourceslices")
		a.after(7 * time.Second)
		a.want(tainted(gpu(0), kubeapi.NoSchedule))
	})
}

// The agents of many nodes do not come back in step after an outage.
func TestReturnsAreSpread(t *testing.T) {
	const nodes, step = 100, 250 * time.Millisecond
	lists := map[time.Duration]int{}
	for range nodes {
		inBubble(t, func(a *agent) {
			a.set(gpu(0))
			a.api.SetDown(true)
			a.after(10 * time.Minute)
			a.api.ForgetRequests()
			a.api.SetDown(false)
			back := time.Now()
			a.after(6 * time.Second)
			synctest.Wait()
			for _, r := range a.api.Requests() {
				if r.Verb == "watch" {
					lists[r.At.Sub(back)/step]++
					break
				}
			}
		})
	}
	for at, n := range lists {
		if n > nodes/4 {
			t.Errorf("%d of %d nodes came back within %v", n, nodes, step)
		}
		if at*step > 5*time.Second {
			t.Errorf("%d nodes came back after %v", n, at*step)
		}
	}
	if len(lists) < 8 {
		t.Errorf("all came back in %d steps of %v", len(lists), step)
	}
}
