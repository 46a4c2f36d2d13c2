package fleet

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// callsAtATime is how many calls are made in a cluster at a time. A cluster that does not answer does not hold up others.
const callsAtATime = 8

// callsWithin is from a decision to the end of its calls: Next repeats an act without an answer after 15 s, by its clock of whole seconds.
const callsWithin = 14 * time.Second

// markAgain is when a mark is made again that the node does not show yet.
const markAgain = 15 * time.Second

// under is a call that is under way, or a mark that was made.
type under struct {
	mark  rescue.Mark // that was made
	until time.Time   // when it may be made again; zero = it is under way
}

// again reports whether a mark is one that was made just now: the node may not show it yet.
func (u under) again(m rescue.Mark) bool {
	return time.Now().Before(u.until) && m.Repair == u.mark.Repair && (m.Eligible == rescue.Unchanged || m.Eligible == u.mark.Eligible)
}

// answer is what came of a call.
type answer struct {
	lead *lead
	key  string
	fold func(*Controller) // in the goroutine of Run
}

// answers are those that the goroutine of Run has not seen.
type answers struct {
	mu  sync.Mutex
	all []answer
}

func (a *answers) add(one answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = append(a.all, one)
}

func (a *answers) take() (all []answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	all, a.all = a.all, nil
	return all
}

// call starts the calls of a decision whose ledger is written.
func (c *Controller) call(r rescue.Result, decided time.Time) {
	s, ends := c.state, decided.Truncate(time.Second).Add(callsWithin)
	for _, a := range r.Acts {
		if a.Listed {
			continue
		}
		c.start(a.Cluster, fmt.Sprintf("act %s %s %s %s", a.Cluster, a.GPU, a.Device, a.Subject.Work), ends, func(ctx context.Context) func(*Controller) {
			given := c.act(ctx, s, a)
			return func(c *Controller) { c.answered(a, given) }
		})
	}
	for _, m := range r.Marks {
		if m.Listed || c.calls[markKey(m)].again(m) {
			continue
		}
		c.start(m.Cluster, markKey(m), ends, func(ctx context.Context) func(*Controller) {
			index, err := c.mark(ctx, s, m)
			return func(c *Controller) { c.marked(m, index, err) }
		})
	}
}

func markKey(m rescue.Mark) string { return "mark " + m.Cluster + " " + m.Node }

// start makes a call in a goroutine of its own, unless one of its key is under way.
func (c *Controller) start(cluster, key string, ends time.Time, f func(context.Context) func(*Controller)) {
	if was, ok := c.calls[key]; ok && was.until.IsZero() {
		return
	}
	c.calls[key] = under{}
	l, slots := c.lead, c.slots[cluster]
	l.calls.Go(func() {
		ctx, cancel := context.WithDeadline(l.ctx, ends)
		defer cancel()
		ctx, cancel = context.WithTimeout(ctx, CallTimeout)
		defer cancel()
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		case <-ctx.Done():
		}
		c.answers.add(answer{l, key, f(ctx)})
		watch.Notify(c.wake)
	})
}

// fold takes the answers to calls into the state. Those of an earlier lead are not of this state.
func (c *Controller) fold() {
	for _, one := range c.answers.take() {
		delete(c.calls, one.key)
		if one.lead == c.lead && c.lead.begun {
			one.fold(c)
		}
	}
	for key, one := range c.calls {
		if !one.until.IsZero() && time.Now().After(one.until) {
			delete(c.calls, key)
		}
	}
}

// act makes the call of an act, if it still holds.
func (c *Controller) act(ctx context.Context, s rescue.State, a rescue.Act) rescue.Answer {
	one := c.clusters[a.Cluster]
	if tooLate(ctx) {
		return rescue.Answer{Kind: rescue.NotMade, Text: othersTookLong}
	}
	live, err := one.Live(ctx, a)
	if err != nil {
		return rescue.Answer{Kind: rescue.NotMade, Text: "node and work can't be read: " + err.Error()}
	}
	if why := c.allowed(ctx, s); why != "" { // after Live, which may take some seconds: a person who has stopped all acts sees none later
		return rescue.Answer{Kind: rescue.NotMade, Text: why}
	}
	if ok, why := c.Policy.Still(s, a, rescue.NewFleet(live), time.Now()); !ok {
		return rescue.Answer{Kind: rescue.NotMade, Text: why}
	}
	if tooLate(ctx) {
		return rescue.Answer{Kind: rescue.NotMade, Text: "there was no time left for the call"}
	}
	return one.Do(ctx, a)
}

const othersTookLong = "others in the cluster took too long"

// allowed returns why nothing may be called any more; "" = it may be. It reads the ledger: a person may have stopped all acts since the decision, and this
// process may have been suspended while another one took the lead.
func (c *Controller) allowed(ctx context.Context, s rescue.State) string {
	if tooLate(ctx) {
		return othersTookLong
	}
	l, _, err := c.Store.Read(ctx)
	switch {
	case err != nil:
		return "the ledger can't be read: " + err.Error()
	case l.Term != s.Term:
		return "another process leads"
	case l.Stop != nil:
		return "all acts are stopped by " + l.Stop.By + ": " + l.Stop.Text
	}
	return ""
}

// tooLate reports whether the time of a call is over. In a process that was suspended the clock tells that before the context does; in a virtual machine
// that was, only the time of day does.
func tooLate(ctx context.Context) bool {
	ends, ok := ctx.Deadline()
	now := time.Now()
	return ctx.Err() != nil || ok && (!now.Before(ends) || !now.Round(0).Before(ends.Round(0)))
}

// answered records the answer to an act.
func (c *Controller) answered(a rescue.Act, given rescue.Answer) {
	before := c.state.Ledger
	c.state = c.state.Answered(a, given, time.Now())
	c.events.answered(a, given)
	c.events.ended(rescue.EndedMoves(before, c.state.Ledger))
}

// mark marks a node, if that is still allowed.
func (c *Controller) mark(ctx context.Context, s rescue.State, m rescue.Mark) (uint64, error) {
	if why := c.allowed(ctx, s); why != "" {
		return 0, errors.New(why)
	}
	if tooLate(ctx) {
		return 0, context.DeadlineExceeded
	}
	return c.clusters[m.Cluster].Mark(ctx, m)
}

// marked records that a node was marked. One that was not is marked at the next decision.
func (c *Controller) marked(m rescue.Mark, index uint64, err error) {
	c.calls[markKey(m)] = under{m, time.Now().Add(markAgain)}
	c.events.marked(m, err)
	if err == nil {
		c.state = c.state.Marked(m, index)
	}
}
