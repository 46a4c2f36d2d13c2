package nomadadapter

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// slowUsage is a Source.Usage that takes a while.
type slowUsage struct {
	mu      sync.Mutex
	takes   time.Duration
	pending int                // calls that have not returned
	most    int                // concurrent calls
	read    map[time.Time]bool // start times of the calls that returned usage
}

func (s *slowUsage) call(ctx context.Context) ([]gpu.Usage, error) {
	s.mu.Lock()
	began, takes := time.Now(), s.takes
	s.pending++
	s.most = max(s.most, s.pending)
	s.mu.Unlock()
	defer func() { s.mu.Lock(); defer s.mu.Unlock(); s.pending-- }()
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.read[began] = true
	u := usage(0)
	u.At = began
	return []gpu.Usage{u}, nil
}

func (s *slowUsage) setDuration(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.takes = d
}

// slowStats opens a stream over a source with slowUsage.
func slowStats(ctx context.Context, t *testing.T, takes, interval time.Duration) (*slowUsage, <-chan *device.StatsResponse) {
	t.Helper()
	slow := &slowUsage{takes: takes, read: map[time.Time]bool{}}
	s := newFixture(t, nodeInventory(coretest.GPUs(1)))
	s.Source.usage = slow.call
	return slow, openStats(ctx, t, s, interval)
}

// responses receives for d. It returns the time of each response, and the timestamp of its usage, zero if it had none.
func responses(t *testing.T, ch <-chan *device.StatsResponse, d time.Duration) (came, of []time.Time) {
	t.Helper()
	end := time.After(d)
	for {
		select {
		case r := <-ch:
			stats := instances(t, r)[gpuID(0)]
			at := stats.Timestamp
			if stats.Summary.IntNumeratorVal == nil {
				at = time.Time{}
			}
			came, of = append(came, time.Now()), append(of, at)
		case <-end:
			return came, of
		}
	}
}

func TestUsageSlowerThanTheInterval(t *testing.T) {
	for name, tc := range map[string]struct{ takes, interval time.Duration }{
		"a little":      {1100 * time.Millisecond, time.Second},
		"several times": {2500 * time.Millisecond, time.Second},
		"very long":     {20 * time.Second, time.Second},
		"in time":       {900 * time.Millisecond, time.Second},
		"over 5 s":      {7 * time.Second, 10 * time.Second},
		"once an hour":  {7 * time.Second, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				s, ch := slowStats(ctx, t, tc.takes, tc.interval)
				round := max(tc.takes, tc.interval)
				began := time.Now()
				came, of := responses(t, ch, 100*round)
				cancel()
				synctest.Wait()

				distinct, last := map[time.Time]bool{}, began
				for i, at := range of {
					if !at.IsZero() {
						distinct[at] = true
						if !s.read[at] || came[i].Sub(at) > tc.takes+maxUsageAge+tc.interval {
							t.Errorf("after %v: usage is %v old", came[i].Sub(began), came[i].Sub(at))
						}
					} else if came[i].Sub(began) > tc.takes && tc.interval < maxUsageAge {
						t.Errorf("no usage after %v", came[i].Sub(began))
					}
					if gap := came[i].Sub(last); gap > tc.interval {
						t.Errorf("no response for %v", gap)
					}
					last = came[i]
				}
				if n := len(distinct); n < 98 {
					t.Errorf("%d results in the time of 100", n)
				}
				if s.most != 1 || s.pending != 0 {
					t.Errorf("%d concurrent calls, %d pending", s.most, s.pending)
				}
				if most := 2*int(100*round/tc.interval) + 200; len(came) > most {
					t.Errorf("%d responses", len(came))
				}
			})
		})
	}
}

// While the driver hangs, the last usage is sent for maxUsageAge, with its timestamp; then responses have the health only.
// When the driver answers again, they have usage.
func TestUsageOfAHungDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s, ch := slowStats(ctx, t, 0, time.Second)
		responses(t, ch, 10*time.Second)
		began := time.Now()
		s.setDuration(10 * time.Minute)
		came, of := responses(t, ch, 9*time.Minute)
		for i, at := range of {
			hung := came[i].Sub(began)
			if shown := !at.IsZero(); shown && hung > maxUsageAge+2*time.Second || !shown && hung < maxUsageAge-2*time.Second {
				t.Errorf("after %v: usage sent: %t", hung, shown)
			}
			if !at.IsZero() && came[i].Sub(at) > maxUsageAge+time.Second {
				t.Errorf("usage is %v old", came[i].Sub(at))
			}
		}
		if n := len(came); n < 500 {
			t.Errorf("%d responses in nine minutes", n)
		}
		s.setDuration(0)
		if _, of = responses(t, ch, 2*time.Minute); of[len(of)-1].IsZero() {
			t.Error("no usage after the driver answered again")
		}
		cancel()
		synctest.Wait()
		if s.most != 1 {
			t.Errorf("%d concurrent calls", s.most)
		}
	})
}
