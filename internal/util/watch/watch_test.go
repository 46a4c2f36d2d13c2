package watch_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// A slow reader skips to the latest value; a reader that starts late begins with the present one.
func TestWatchSkips(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		value := watch.NewValue(0)
		var got []int
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() {
			for v := range value.Watch(ctx) {
				got = append(got, v)
				time.Sleep(time.Second)
			}
		}()
		synctest.Wait()
		for v := range 10 {
			value.Store(v + 1)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if fmt.Sprint(got) != "[0 10]" {
			t.Errorf("saw %v", got)
		}
	})
}

func TestWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		done := make(chan struct{})
		time.AfterFunc(5*time.Second, func() { close(done) })
		for _, c := range []struct {
			name string
			wait func() bool
			want bool
			took time.Duration
		}{
			{"await, time over", func() bool { return watch.Await(ctx, done, 2*time.Second) }, false, 2 * time.Second},
			{"await, done", func() bool { return watch.Await(ctx, done, 10*time.Second) }, true, 3 * time.Second},
			{"sleep", func() bool { return watch.Sleep(ctx, 5*time.Second) }, true, 5 * time.Second},
			{"sleep, context ends", func() bool { return watch.Sleep(ctx, time.Hour) }, false, 50 * time.Second},
			{"await, context ended", func() bool { return watch.Await(ctx, nil, time.Hour) }, false, 0},
		} {
			began := time.Now()
			if got := c.wait(); got != c.want || time.Since(began) != c.took {
				t.Errorf("%s: %t after %v", c.name, got, time.Since(began))
			}
		}
	})
}
