package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// What a ledger keeps of a stop, in bytes: it is small.
const (
	maxBy   = 100
	maxText = 300
)

// Stop has a person stop all acts of the team. Any process may, also one that does not Run: the one that leads finds it in the ledger before its next act.
func (c *Controller) Stop(ctx context.Context, by, text string) error {
	if err := errors.Join(checkText("by", by, maxBy), checkText("text", text, maxText)); err != nil {
		return err
	}
	if err := c.change(ctx, func(s rescue.State) rescue.State { return s.Stopped(by, text, time.Now()) }); err != nil {
		return fmt.Errorf("acts are not stopped for certain: %w", err)
	}
	c.Log.Warn("a person stops all acts", "by", by, "text", text)
	return nil
}

// Resume has a person allow acts again. Any process may, as with Stop.
func (c *Controller) Resume(ctx context.Context, by string) error {
	if err := checkText("by", by, maxBy); err != nil {
		return err
	}
	if err := c.change(ctx, func(s rescue.State) rescue.State { return s.Resumed(time.Now()) }); err != nil {
		return fmt.Errorf("acts are not resumed for certain: %w", err)
	}
	c.Log.Warn("a person allows acts again", "by", by)
	return nil
}

func checkText(key, value string, most int) error {
	if value == "" || len(value) > most {
		return &setting.Error{Key: key, Value: value[:min(len(value), 20)], Remedy: fmt.Sprintf("want a text of 1 to %d bytes, not %d", most, len(value))}
	}
	return nil
}

// change changes the stored ledger, however often others write it meanwhile, and has this process read it.
func (c *Controller) change(ctx context.Context, f func(rescue.State) rescue.State) error {
	defer watch.Notify(c.wake)
	defer c.changed.Store(true)
	for {
		l, version, err := c.Store.Read(ctx)
		if err != nil {
			return err
		}
		_, err = c.Store.Write(ctx, f(rescue.State{Ledger: l}).Ledger, version)
		if !errors.Is(err, ErrConflict) {
			return err
		}
		if !watch.Sleep(ctx, conflictPause) {
			return errors.Join(ctx.Err(), err)
		}
	}
}

const conflictPause = 100 * time.Millisecond // before a change is tried again
