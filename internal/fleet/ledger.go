package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// ledger is what a controller knows of the stored ledger.
type ledger struct {
	read    time.Time // when it was read or written last; zero = it has to be read before anything else
	stored  rescue.Ledger
	text    []byte // of stored
	version Version
	err     error
}

// loaded is what a controller may do with the ledger that it has.
type loaded int

const (
	ledgerUnusable loaded = iota // nothing: there is none
	ledgerOld                    // decide, and not act: it can't be read now
	ledgerRead                   // all
)

// load reads the stored ledger if this has to be, and begins the term of a lead.
func (c *Controller) load(ctx context.Context) loaded {
	if c.changed.Swap(false) || time.Since(c.ledger.read) >= every-settle {
		if err := c.read(ctx); err != nil {
			return c.notRead(ctx, err)
		}
	}
	if c.lead != nil && !c.lead.begun && !c.begin() {
		return ledgerOld
	}
	return ledgerRead
}

// read reads the ledger and takes over what others may have changed.
func (c *Controller) read(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	l, version, err := c.Store.Read(ctx)
	if err != nil {
		return err
	}
	before := c.ledger.stored
	c.ledger = ledger{read: time.Now(), stored: l, text: text(l), version: version}
	c.ledgerProblem(nil)
	switch {
	case c.lead == nil || !c.lead.begun:
		c.copy(l)
	case l.Term != c.state.Term:
		c.Log.Warn("another process leads: this one steps down", "identity", c.Identity, "term", c.state.Term, "its_term", l.Term)
		c.follow(nil)
		c.copy(l)
	case !bytes.Equal(text(before.Stop), text(l.Stop)) || !before.ResumedAt.Equal(l.ResumedAt):
		c.state.Ledger.Stop, c.state.Ledger.ResumedAt = l.Stop, l.ResumedAt // by a person, through another process
	}
	return nil
}

// copy has this process decide on a copy of the stored ledger.
func (c *Controller) copy(l rescue.Ledger) {
	c.state.Ledger, c.state.Term = l, l.Term
	if l.Term == 0 {
		c.state = c.state.Lead() // no process has led yet
	}
}

// notRead is for a ledger that could not be read. One that is missing or damaged is not replaced by what was known: a person decides what holds.
func (c *Controller) notRead(ctx context.Context, err error) loaded {
	c.ledger.read = time.Time{}
	if ctx.Err() == nil {
		c.ledgerProblem(err)
	}
	if _, damaged := errors.AsType[*DamagedError](err); damaged || errors.Is(err, ErrNoLedger) {
		c.state.Ledger, c.state.Term = rescue.Ledger{}, 0
		if c.lead != nil {
			c.lead.begun = false
		}
	}
	if c.state.Term == 0 {
		return ledgerUnusable
	}
	return ledgerOld
}

// begin begins the term of a lead. It has begun only when its write has succeeded: after any other answer the term may be that of another process.
func (c *Controller) begin() bool {
	c.state.Ledger = c.ledger.stored
	next := c.state.Lead()
	if !c.write(next.Ledger) {
		return false
	}
	c.lead.begun = true
	c.state = next
	c.Log.Info("this process leads", "identity", c.Identity, "term", next.Term, "ledger", c.Store.String())
	return true
}

// write stores a ledger, if it is not the one that is stored. After an error it is read again before anything else.
func (c *Controller) write(l rescue.Ledger) bool {
	if c.lead.ctx.Err() != nil {
		return false
	}
	next := text(l)
	if bytes.Equal(next, c.ledger.text) {
		return true
	}
	ctx, cancel := context.WithTimeout(c.lead.ctx, CallTimeout)
	defer cancel()
	version, err := c.Store.Write(ctx, l, c.ledger.version)
	if err == nil {
		c.ledger = ledger{read: time.Now(), stored: l, text: next, version: version}
		c.ledgerProblem(nil)
		return true
	}
	c.ledger.read = time.Time{}
	switch {
	case errors.Is(err, ErrConflict):
		c.events.counts.Conflicts++
		c.decideBy(time.Now())
	case c.lead.ctx.Err() == nil:
		c.ledgerProblem(err)
	}
	return false
}

// ledgerProblem records why the ledger can't be read or written; nil = it can.
func (c *Controller) ledgerProblem(err error) {
	c.ledger.err = err
	if err == nil {
		c.problems.End(problem.Ledger, "", "ledger can be used again", "ledger", c.Store.String())
		c.problems.End(problem.LedgerStore, "", "ledger can be read and written again", "ledger", c.Store.String())
		return
	}
	c.decideBy(time.Now().Add(tryAgain))
	p := problem.Problem{
		Code: problem.LedgerStore, Text: "no work is moved: the ledger can't be read or written: " + err.Error(),
		Remedy: "give gpu-fleet the rights and the connection, or the file, that the error names; it tries again",
	}
	if _, damaged := errors.AsType[*DamagedError](err); damaged {
		p = problem.Problem{
			Code: problem.Ledger, Text: "no work is moved: " + err.Error() + " (" + c.Store.String() + ")",
			Remedy: "restore it from a backup; or, if no act of the last day is to count, remove it and create an empty one: gpu-fleet init",
		}
	} else if errors.Is(err, ErrNoLedger) {
		p = problem.Problem{
			Code: problem.Ledger, Text: "no work is moved: there is no ledger (" + c.Store.String() + ")",
			Remedy: "after the installation create it: gpu-fleet init. If there was one, restore it from a backup, unless no act of the last day is to count",
		}
	}
	c.problems.Put(p, slog.LevelError, "ledger can't be used, and no work is moved", "ledger", c.Store.String(), "error", err)
}

// text is how a part of a ledger is stored: two of the same text are the same.
func text(part any) []byte {
	b, _ := json.Marshal(part) // numbers, texts and times of this program
	return b
}
