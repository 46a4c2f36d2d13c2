package fleet

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// lead is a time for which this process leads.
type lead struct {
	ctx      context.Context //nolint:containedctx // it ends when the process must not act any more
	stepDown func()          // ends ctx
	over     chan struct{}   // closed when the goroutine of Run makes no more calls for it
	leave    func()          // closes over
	calls    sync.WaitGroup

	begun bool // its term is in the ledger
}

// elect takes part in the election until ctx ends.
func (c *Controller) elect(ctx context.Context) {
	for ctx.Err() == nil {
		well := time.AfterFunc(electedWell, c.elected) // it waits for its turn
		err := c.Leader.Lead(ctx, c.hold)
		well.Stop()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			c.problems.Put(problem.Problem{
				Code: problem.Election, Text: "no leader can be elected, and so no work is moved: " + err.Error(),
				Remedy: "give gpu-fleet the rights and the connection that the error names; it tries again",
			}, slog.LevelError, "no leader can be elected", "error", err)
			watch.Notify(c.wake)
		}
		watch.Sleep(ctx, electAgain)
	}
}

// elected ends the problem of an election.
func (c *Controller) elected() { c.problems.End(problem.Election, "", "leader can be elected again") }

// hold gives the lead to the goroutine of Run until ctx ends or that one steps down, and returns when no call is under way any more.
func (c *Controller) hold(ctx context.Context) {
	c.elected()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := &lead{ctx: ctx, stepDown: cancel, over: make(chan struct{})}
	l.leave = sync.OnceFunc(func() { close(l.over) })
	defer l.leave()
	c.leads.Store(l)
	defer context.AfterFunc(ctx, func() { watch.Notify(c.wake) })()
	watch.RunUntil(ctx, CallTimeout, func() {
		<-l.over
		l.calls.Wait()
	})
}

// follow has the goroutine of Run take or leave the lead; latest is the one that was given last.
func (c *Controller) follow(latest *lead) {
	if latest != nil && latest.ctx.Err() != nil {
		latest.leave()
		latest = nil
	}
	if latest == c.lead {
		return
	}
	if c.lead != nil {
		c.lead.stepDown()
		c.lead.leave()
		c.Log.Info("this process does not lead any more", "identity", c.Identity)
	}
	c.lead = latest
	c.ledger.read = time.Time{}
}
