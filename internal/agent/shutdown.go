package agent

import (
	"context"
	"errors"
	"time"
)

// ShutdownTimeout is the time between a signal and the end of the process: a little more than a driver call that hangs is given.
// A disk that hangs is given no more, as nothing in this process can end the wait for it.
const ShutdownTimeout = 1800 * time.Millisecond

// FlushTimeout is what remains for the log of the two seconds that a process is given after a signal.
const FlushTimeout = 200 * time.Millisecond

// ReaderTimeout is how long an agent that ends because of an error, which is in its log, waits for the reader of that log.
const ReaderTimeout = 5 * time.Second

// ErrShutdownTimeout means that a process ends as requested, although a task has not returned.
var ErrShutdownTimeout = errors.New("not everything stopped within the time for it: the process exits without it")

// RunUntil calls do, and returns its result or, if do has not returned some time after ctx ended, ErrShutdownTimeout. within is called at that end.
func RunUntil(ctx context.Context, within func() time.Duration, do func() error) error {
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(within()):
		return ErrShutdownTimeout
	}
}
