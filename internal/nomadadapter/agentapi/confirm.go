package agentapi

import (
	"context"
	"errors"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// confirmTime is how long a query of Confirm may take. A later answer would be of no use.
const confirmTime = 10 * time.Second

// Confirmation is the answer to a query that did not wait, by the leader of the servers. It has every allocation that was placed before the
// query, and so every one whose devices the client had reserved by then; if the token may not see all, at least the reservations.
type Confirmation struct {
	Record holders.Record
	At     time.Time // of the query; zero = there was none
	Err    error
}

// Confirm asks for a confirmation, which Confirmed returns later, and reports whether Run makes the query. The answers that Run follows may be a
// minute old, and those of a server that lags behind. It never blocks.
func (c *Client) Confirm() (asked bool) {
	if c.http == nil {
		return false
	}
	watch.Notify(c.wanted)
	return true
}

// Confirmed returns the latest confirmation.
func (c *Client) Confirmed() Confirmation {
	c.mu.Lock()
	defer c.mu.Unlock()
	is := c.confirmed
	is.Record = c.withReserved(is.Record)
	return is
}

// confirm makes a query after each Confirm, until ctx ends.
func (c *Client) confirm(ctx context.Context, tasks *watchdog.Registry) {
	task := tasks.Register("nomad agent API: confirmation")
	defer task.Done()
	reconcile.Loop{
		On: []reconcile.Source{reconcile.Signal(c.wanted)}, Task: task, Limit: confirmTime + minPause,
	}.Run(ctx, func(ctx context.Context, cause reconcile.Cause) time.Duration {
		if cause == reconcile.Start {
			return reconcile.Never
		}
		is, err := c.present(ctx)
		if ctx.Err() != nil {
			return reconcile.Never
		}
		c.mu.Lock()
		c.confirmed = Confirmation{Record: is.record, At: is.asked, Err: err}
		if err == nil {
			c.endReservations(is)
			c.see(is.record, true)
		}
		c.mu.Unlock()
		watch.Sleep(ctx, minPause)
		return reconcile.Never
	})
}

// present returns the allocations as the leader has them. With an error it has only the time.
func (c *Client) present(ctx context.Context) (answer, error) {
	failed := answer{asked: time.Now()}
	ctx, cancel := context.WithTimeoutCause(ctx, confirmTime, errors.New("no answer in time"))
	defer cancel()
	c, err := c.withToken()
	if err != nil {
		return failed, err
	}
	node, err := c.thisNode(ctx)
	if err != nil {
		return failed, err
	}
	is, _, err := c.allocations(ctx, node, "")
	if err != nil {
		return failed, err
	}
	is.asked = failed.asked
	return is, nil
}
