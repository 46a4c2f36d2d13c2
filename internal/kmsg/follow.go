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

// Follow calls emit with the XIDs in the kernel log, in its order, from the record with the sequence number next on:
// with those that are there (see Read) and with those to come, until ctx ends or the log can't be read. It always
// returns an error: the context's, one that is ErrUnavailable and says what the agent needs, or that of a failed read.
// emit is called from the goroutine that called Follow.
//
// The sequence number must be of the present boot: the kernel counts anew at each. A line that Follow held (see
// holdFor) when it ended has not been emitted, so the Next of the last emitted line is the right number to go on with.
//
// If path is a regular file, what is appended is read within pollEvery. Records must have increasing sequence
// numbers there as in the log: one that was seen, or a lower one, is the same record again.
func Follow(ctx context.Context, path string, next uint64, emit func(Line)) error {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // so that the runtime waits for records and Close ends the wait
	if err != nil {
		return unavailable(err)
	}
	defer func() { _ = f.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = f.Close() }) // ends a read that waits
	defer stop()

	lines := make(chan Line)
	var reader sync.WaitGroup
	var failure error
	reader.Go(func() {
		defer close(lines)
		failure = read(ctx, f, next, lines)
	})
	hold(ctx, lines, emit)
	reader.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	return fmt.Errorf("kernel log: %w", failure)
}

func unavailable(err error) error {
	return fmt.Errorf("%w: %w: %s", ErrUnavailable, err, remedy)
}

// read sends the XIDs in log from a sequence number on until reading fails, which it does at the latest after ctx has
// ended.
func read(ctx context.Context, log io.Reader, next uint64, lines chan<- Line) error {
	records := newRecords(tail(ctx, log))
	for {
		record, err := records.next()
		if err != nil {
			return err
		}
		line, ok := Parse(record)
		if !ok || line.Seq < next {
			continue
		}
		next = line.Seq + 1
		select {
		case lines <- line:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// records are the lines of a log, without those that are too long for a record.
type records struct {
	from    *bufio.Reader
	tooLong bool // the latest piece was part of such a line, and not its end
}

// newRecords reads from log. A read of the device gives one whole record, which ends with a newline, so the buffer is
// empty before each and has room for any.
func newRecords(log io.Reader) *records { return &records{from: bufio.NewReaderSize(log, recordSize)} }

func (r *records) next() (string, error) {
	for {
		record, more, err := r.from.ReadLine()
		if err != nil {
			return "", err
		}
		whole := !more && !r.tooLong
		if r.tooLong = more; whole {
			return string(record), nil
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
