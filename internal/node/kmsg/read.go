package kmsg

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// maxRead is the maximum number of lines that Read returns. Of more lines it returns the latest of each fault.
const maxRead = 4096

// Contents is the content of the log at one moment.
type Contents struct {
	Lines []Line // the requested XIDs in the order of the log
	Next  uint64 // the sequence number of the next record; 0 = there is none yet
	Older bool   // the log ends before the requested record, so the number is of another log

	// Complete means that Lines has every XID since the driver was loaded: all of the log was read, and it has the load.
	Complete bool
}

// Log is an open kernel log. Read it once, then follow it once.
type Log struct {
	file  *os.File // nil = the ring
	ring  *ring
	clock clock // of the log; nil = unknown: a file may be of any boot
}

// ErrUnavailable is returned if the kernel log can't be opened. An agent works without it, but detects fewer XIDs.
var ErrUnavailable = errors.New("kernel log is not readable")

// UnavailableError is ErrUnavailable with its causes.
type UnavailableError struct {
	Device error // of the device or file
	Ring   error // of syslog(2); nil = it was not tried
}

// Reason has the causes without the remedy.
func (e *UnavailableError) Reason() string {
	if e.Ring == nil {
		return e.Device.Error()
	}
	return fmt.Sprintf("%v; syslog(2): %v", e.Device, e.Ring)
}

// Error implements error. The capability is enough for syslog(2), and the device needs it, too, where sysctl kernel.dmesg_restrict is 1.
func (e *UnavailableError) Error() string {
	return fmt.Sprintf("%v: %s: give the agent the capability SYSLOG (CAP_SYSLOG), or name a log that it can read", ErrUnavailable, e.Reason())
}

// Unwrap allows errors.Is with ErrUnavailable and the causes.
func (e *UnavailableError) Unwrap() []error {
	if e.Ring == nil {
		return []error{ErrUnavailable, e.Device}
	}
	return []error{ErrUnavailable, e.Device, e.Ring}
}

// Open opens a kernel log: the device /dev/kmsg, or a file in its form. It fails with ErrUnavailable and a remedy.
func Open(path string) (Log, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // the runtime polls, so Close ends a read
	if err != nil {
		return Log{}, &UnavailableError{Device: err}
	}
	l := Log{file: f}
	if info, err := f.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
		l.clock = kernelClock
	}
	return l, nil
}

// OpenAny opens the kernel log by the device, if it can be opened, and else by syslog(2). It fails with ErrUnavailable and a remedy.
func OpenAny(device string) (Log, error) {
	l, err := Open(device)
	unavailable, ok := errors.AsType[*UnavailableError](err)
	if !ok {
		return l, err
	}
	if unavailable.Ring = newRing().fill(); unavailable.Ring != nil {
		return Log{}, unavailable
	}
	return Log{ring: newRing(), clock: kernelClock}, nil
}

// Close closes the log and ends Follow.
func (l Log) Close() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}

// Counts reports whether a sequence number, or 0 for none, can be one of this log: those of the device and of syslog(2) are not the same.
func (l Log) Counts(seq uint64) bool { return seq == 0 || (seq >= firstOfRing) == (l.ring != nil) }

// Read returns the present XIDs from the record with the sequence number first on, without waiting for more. Lines with the same
// fault within holdFor are one, as for Follow. Records that the kernel has overwritten are missing.
//
// If the log ends before that record, the number is of another boot or another file: Read returns all XIDs then, as for
// the number 0. XIDs from before the driver was last loaded are not among all XIDs: the load has initialised the GPUs
// again.
func (l Log) Read(ctx context.Context, first uint64) (c Contents, err error) {
	err = l.present(func(log io.Reader) error { c, err = present(ctx, log, first, l.clock); return err })
	return c, err
}

// Messages calls f with the message of each present record of the kernel, in the order of the log, until ctx ends: of one with several lines
// with the first, since the text of a process can be in it.
func (l Log) Messages(ctx context.Context, f func(string)) error {
	return l.present(func(log io.Reader) error {
		for records := newRecords(log); ctx.Err() == nil; {
			record, err := records.next()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("kernel log: %w", err)
			}
			if head, message, ok := parseRecord(record); ok && head.priority <= maxKernelPriority {
				first, _, _ := strings.Cut(message, escapedNewline)
				f(first)
			}
		}
		return ctx.Err()
	})
}

// present calls f with a reader that returns io.EOF where there is no more at present.
func (l Log) present(f func(io.Reader) error) error {
	if l.ring != nil {
		return f(l.ring)
	}
	conn, err := l.file.SyscallConn()
	if err != nil {
		return err
	}
	if controlErr := conn.Control(func(fd uintptr) { err = f(snapshot(fd)) }); controlErr != nil {
		return controlErr
	}
	return err
}

func present(ctx context.Context, log io.Reader, first uint64, now clock) (Contents, error) {
	// Lines before first are collected until it is known that the log reaches first.
	var before, after burst
	var c Contents
	for records := newRecords(log); ; {
		record, err := records.next()
		switch {
		case errors.Is(err, io.EOF):
			if c.Older = c.Next < first; c.Older {
				after = before
			}
			c.Complete = after.loaded && !after.dropped
			for i, a := range after.lines {
				a.line.Age = byClock(health.UnknownAge, a.logged, now)
				a.line.Next = c.Next
				if i+1 < len(after.lines) {
					a.line.Next = after.lines[i+1].line.Seq
				}
				c.Lines = append(c.Lines, a.line)
			}
			return c, nil
		case err != nil:
			return Contents{}, fmt.Errorf("kernel log: %w", err)
		case ctx.Err() != nil:
			return Contents{}, ctx.Err()
		}
		head, message, ok := parseRecord(record)
		if !ok || head.seq < c.Next {
			continue
		}
		c.Next = head.seq + 1
		if isLoad(head, message) {
			before, after = burst{loaded: true}, after.atLoad(first)
		}
		if line, ok := parseLine(head, message); ok {
			if head.seq < first {
				before.add(arrival{line: line, logged: head.at})
			} else {
				after.add(arrival{line: line, logged: head.at})
			}
		}
	}
}

// burst collects lines, for the same fault one each holdFor by the timestamps of the log.
type burst struct {
	lines   []arrival
	last    map[fault]time.Duration
	loaded  bool // the lines are those since the driver was loaded
	dropped bool // a fault was dropped: there were more than maxRead
}

// atLoad returns what is left of the lines when the driver is loaded: nothing, unless the agent has read the log up to
// the record first before. Then it has watched the GPUs, and what clears an XID is its decision.
func (b burst) atLoad(first uint64) burst {
	if first == 0 {
		return burst{loaded: true}
	}
	b.last = nil // the same XID after the load is another one
	return b
}

func (b *burst) add(a arrival) {
	of := a.line.fault()
	if last, seen := b.last[of]; seen && repeats(last, a.logged) {
		return
	}
	if b.last == nil {
		b.last = map[fault]time.Duration{}
	}
	b.last[of] = a.logged
	if len(b.lines) == maxRead {
		b.makeRoom()
	}
	b.lines = append(b.lines, a)
}

// makeRoom drops all lines but the latest of each fault: a program that fails a thousand times hides no fault of a GPU.
// If there are too many faults, it drops the oldest.
func (b *burst) makeRoom() {
	latest := make(map[fault]int, len(b.last))
	for i, a := range b.lines {
		latest[a.line.fault()] = i
	}
	kept := make([]arrival, 0, maxRead)
	for i, a := range b.lines {
		if latest[a.line.fault()] == i {
			kept = append(kept, a)
		}
	}
	if b.lines = kept; len(kept) == maxRead {
		b.lines, b.dropped = kept[1:], true
	}
}

// snapshot reads from a descriptor and returns io.EOF where no more is available at present. An os.File would wait for more.
type snapshot int

// Read implements io.Reader.
func (fd snapshot) Read(p []byte) (int, error) {
	for {
		n, err := syscall.Read(int(fd), p)
		switch {
		case errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.EINTR):
			// EPIPE: records were overwritten before they could be read. The next read returns the oldest present one.
		case errors.Is(err, syscall.EAGAIN), err == nil && n == 0:
			return 0, io.EOF
		case err != nil:
			return 0, err
		default:
			return n, nil
		}
	}
}
