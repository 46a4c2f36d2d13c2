package kmsg

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	// recordSize is the maximum size of a record that a read of the device returns, in bytes (CONSOLE_EXT_LOG_MAX in older
	// kernels; PRINTK_MESSAGE_MAX in newer ones is less). A longer line is skipped.
	recordSize = 8 << 10

	// pollEvery is the interval of reads from a regular file that was read to its end.
	pollEvery = 200 * time.Millisecond

	// pollRingEvery is the interval of reads by syslog(2): that of health checks.
	pollRingEvery = 10 * time.Second

	// pauseOfReads is how many times the CPU time of a read the pause after it is, at least. In syslog(2) the kernel goes through its whole buffer,
	// 17 ms for each MiB of it, which is 4 KiB for each CPU or more (CONFIG_LOG_CPU_MAX_BUF_SHIFT).
	pauseOfReads = 1000

	// maxPause bounds it on nodes with a buffer of more than 3 MiB.
	maxPause = time.Minute
)

// Follow calls emit with the XIDs after what was read, in the order of the log, from the record with the sequence number next on,
// until ctx ends or the log can't be read. It always returns an error: the context's, or that of a failed read. emit is called from
// the goroutine that called Follow.
//
// The sequence number must be of the present boot: the kernel counts from 0 after each boot. A line that Follow held (see
// holdFor) when it ended was not emitted, so the Next of the last emitted line is the number to continue with.
//
// If the log is a regular file, appended records are read within pollEvery. Their sequence numbers must increase as in the log: a
// record whose number is not higher than the last one is taken for a repetition and skipped.
func (l Log) Follow(ctx context.Context, next uint64, emit func(Line)) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()

	lines := make(chan arrival)
	var reader sync.WaitGroup
	var failure error
	reader.Go(func() {
		defer close(lines)
		failure = read(ctx, l.tail(ctx), next, lines)
	})
	hold(ctx, lines, func(a arrival) { emit(a.aged(l.clock)) })
	reader.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	return fmt.Errorf("kernel log: %w", failure)
}

// read sends the XIDs in log from a sequence number on until reading fails, at the latest when ctx ends.
func read(ctx context.Context, log *tailReader, next uint64, lines chan<- arrival) error {
	records := newRecords(log)
	for {
		record, err := records.next()
		if err != nil {
			return err
		}
		head, message, ok := parseRecord(record)
		if !ok || head.seq < next {
			continue
		}
		line, ok := parseLine(head, message)
		if !ok {
			continue
		}
		next = line.Seq + 1
		select {
		case lines <- arrivesAt(line, head.at, log.ended):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// records reads the lines of a log, without those that are too long for a record.
type records struct {
	from    *bufio.Reader
	tooLong bool // the latest piece belongs to such a line and is not its end
}

// newRecords reads from log. A read of the device returns one whole record, which ends with a newline, so the buffer is empty
// before each read and large enough for any record.
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

// tail returns a reader of the log that waits for more at its end.
func (l Log) tail(ctx context.Context) *tailReader {
	if l.ring != nil {
		return tail(ctx, l.ring, pollRingEvery)
	}
	return tail(ctx, l.file, pollEvery)
}

// tailReader is a reader that waits for more at the end of a log.
type tailReader struct {
	readerFunc

	// ended is when the latest read began that found the end of the log; zero = none did, or reads wait in the kernel.
	ended time.Time
}

// tail returns a reader that waits for more at the end of log, until ctx ends.
func tail(ctx context.Context, log io.Reader, every time.Duration) *tailReader {
	t := &tailReader{}
	t.readerFunc = func(p []byte) (int, error) {
		for {
			var n int
			var err error
			began := time.Now()
			pause := min(max(every, cpuTime(func() { n, err = log.Read(p) })*pauseOfReads), maxPause)
			switch {
			case n > 0:
				return n, nil
			case errors.Is(err, syscall.EPIPE):
				// Records were overwritten before they could be read. The next read returns the oldest present one.
			case err == nil, errors.Is(err, io.EOF), errors.Is(err, syscall.EAGAIN):
				t.ended = began
				if !watch.Sleep(ctx, pause) {
					return 0, ctx.Err()
				}
			default:
				return 0, err
			}
		}
	}
	return t
}

// cpuTime calls a function and returns the CPU time that it took in its thread, also in the kernel (CLOCK_THREAD_CPUTIME_ID). The wall time would
// have that of other processes, too, and on a busy node a fault would be read a minute late.
func cpuTime(f func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var began, ended unix.Timespec
	first := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &began)
	f()
	if errors.Join(first, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ended)) != nil {
		return 0 // not before Linux 2.6.12
	}
	return time.Duration(ended.Nano() - began.Nano())
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
