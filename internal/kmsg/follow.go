package kmsg

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
)

// ErrUnavailable says that the kernel log can't be read here. A node works without it, but sees fewer XIDs.
var ErrUnavailable = errors.New("kernel log is not readable")

const (
	remedy = "give the agent the host's device /dev/kmsg (a container must be allowed to open it, or be privileged) and, where sysctl kernel.dmesg_restrict is 1, the capability CAP_SYSLOG"

	// recordSize bounds a record: what a read of the device returns at most (CONSOLE_EXT_LOG_MAX in older
	// kernels, PRINTK_MESSAGE_MAX, which is less, in newer). A longer line is skipped.
	recordSize = 8 << 10

	// pollEvery is the pause before the next look at a regular file that was read to its end.
	pollEvery = 200 * time.Millisecond
)

// Follow calls emit with the XIDs that appear in the kernel log from now on, in its order, until ctx ends
// or the log can't be read. It always returns an error: the context's, one that is ErrUnavailable and says
// what the agent needs, or that of a failed read. emit is called from the goroutine that called Follow.
//
// If after is not 0, records that are still in the log count too, from the one that follows that sequence
// number. It must be of the present boot: the kernel counts anew at each. A line that Follow held (see
// holdFor) when it ended has not been emitted, so the Seq of the last emitted line is the right one to go
// on with.
//
// If path is a regular file, everything in it counts as new, and what is appended later is read within
// pollEvery. Records must have increasing sequence numbers there as in the log: one that was seen, or a
// lower one, is the same record again.
func Follow(ctx context.Context, path string, after uint64, emit func(Line)) error {
	f, err := open(path, after)
	if err != nil {
		return fmt.Errorf("%w: %w: %s", ErrUnavailable, err, remedy)
	}
	defer func() { _ = f.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = f.Close() }) // ends a read that waits
	defer stop()

	lines := make(chan Line)
	var reader sync.WaitGroup
	var failure error
	reader.Go(func() {
		defer close(lines)
		failure = read(ctx, f, after, lines)
	})
	hold(ctx, lines, emit)
	reader.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	return fmt.Errorf("kernel log: %w", failure)
}

// open opens the log without blocking, so that the runtime waits for records and Close ends the wait.
func open(path string, after uint64) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && info.Mode()&os.ModeCharDevice != 0 && after == 0 {
		_, err = f.Seek(0, io.SeekEnd) // after the last record; opened, the log is at the oldest it has
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// read sends the XIDs in log until reading fails, which it does at the latest after ctx has ended.
func read(ctx context.Context, log io.Reader, after uint64, lines chan<- Line) error {
	// A read of the device gives one whole record, which ends with a newline, so the buffer is empty
	// before each and has room for any.
	records := bufio.NewReaderSize(tail(ctx, log), recordSize)
	seen, tooLong := after != 0, false
	for {
		record, more, err := records.ReadLine()
		if err != nil {
			return err
		}
		whole := !more && !tooLong
		tooLong = more
		if !whole {
			continue
		}
		line, ok := Parse(string(record))
		if !ok || seen && line.Seq <= after {
			continue
		}
		seen, after = true, line.Seq
		select {
		case lines <- line:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tail makes a log that ends, or has nothing at the moment, one that goes on until ctx ends.
func tail(ctx context.Context, log io.Reader) io.Reader {
	return readerFunc(func(p []byte) (int, error) {
		for {
			n, err := log.Read(p)
			switch {
			case n > 0:
				return n, nil
			case errors.Is(err, syscall.EPIPE):
				// Records were overwritten before they could be read. The next read gives the oldest there is.
			case err == nil, errors.Is(err, io.EOF), errors.Is(err, syscall.EAGAIN):
				select {
				case <-time.After(pollEvery):
				case <-ctx.Done():
					return 0, ctx.Err()
				}
			default:
				return 0, err
			}
		}
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
