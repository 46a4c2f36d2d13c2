package kubeapi_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// A client waits as long as the server wants, at most a minute, and not in step with others.
func TestWaitAtLeast(t *testing.T) {
	for _, c := range []struct{ asked, wait, from, to time.Duration }{
		{0, time.Second, time.Second, time.Second},
		{2 * time.Second, 5 * time.Second, 5 * time.Second, 5 * time.Second},
		{10 * time.Second, time.Second, 10 * time.Second, 15 * time.Second},
		{10 * time.Minute, time.Second, time.Minute, 90 * time.Second},
		{1, 0, 1, 2},
	} {
		err, waits := fmt.Errorf("x: %w", &kubeapi.StatusError{Code: 429, RetryAfter: c.asked}), map[time.Duration]bool{}
		for range 20 {
			wait := kubeapi.WaitAtLeast(err, c.wait)
			if waits[wait] = true; wait < c.from || wait > c.to {
				t.Errorf("asked for %v: %v", c.asked, wait)
			}
		}
		if inStep := len(waits) == 1; inStep != (c.from == c.to) && c.asked > 1 {
			t.Errorf("asked for %v: %v", c.asked, waits)
		}
	}
	if wait := kubeapi.WaitAtLeast(errors.New("x"), time.Second); wait != time.Second {
		t.Error(wait)
	}
}
