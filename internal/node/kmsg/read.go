package kmsg

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// maxRead is the maximum number of lines that Read returns: the latest ones.
const maxRead = 4096

// Contents is the content of the log at one moment.
type Contents struct {
	Lines []Line // the requested XIDs in the order of the log
	Next  uint64 // the sequence number of the next record; 0 = there is none yet
	Older bool   // the log ends before the requested record, so the number is of another log
}

// Log is an open kernel log. Read it once, then follow it once.
type Log struct{ file *os.File }

// Open opens a kernel log: the device /dev/kmsg, or a file in its form. It fails with ErrUnavailable and a remedy.
func Open(path string) (Log, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // the runtime polls, so Close ends a read
	if err != nil {
		return Log{}, fmt.Errorf("%w: %w: %s", ErrUnavailable, err, remedy)
	}
	return Log{f}, nil
}

// Close closes the log and ends Follow.
func (l Log) Close() error { return l.file.Close() }

// Read returns the present XIDs from the record with the sequence number first on, without waiting for more. Lines with the same
// XID and GPU within holdFor are one, as for Follow. Records that the kernel has overwritten are missing.
//
// If the log ends before that record, the number is of another boot or another file: Read returns all XIDs then.
func (l Log) Read(ctx context.Context, first uint64) (c Contents, err error) {
	conn, err := l.file.SyscallConn()
	if err != nil {
		return c, err
	}
	if controlErr := conn.Control(func(fd uintptr) { c, err = present(ctx, snapshot(fd), first) }); controlErr != nil {
		return c, controlErr
	}
	return c, err
}

func present(ctx context.Context, log io.Reader, first uint64) (Contents, error) {
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
			c.Lines = after.lines
			for i := range c.Lines {
				c.Lines[i].Next = c.Next
				if i+1 < len(c.Lines) {
					c.Lines[i].Next = c.Lines[i+1].Seq
				}
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
		if line, ok := parseLine(head, message); ok {
			if head.seq < first {
				before.add(line, head.at)
			} else {
				after.add(line, head.at)
			}
		}
	}
}

// burst collects lines, for the same XID and GPU one each holdFor by the timestamps of the log.
type burst struct {
	lines []Line
	last  map[fault]time.Duration
}

type fault struct {
	pci gpu.PCIAddress
	xid uint64
}

func (b *burst) add(line Line, at time.Duration) {
	of := fault{line.PCI, line.XID}
	if last, seen := b.last[of]; seen && at > 0 && at >= last && at-last < holdFor {
		return
	}
	if b.last == nil {
		b.last = map[fault]time.Duration{}
	}
	b.last[of] = at
	if len(b.lines) == maxRead {
		b.lines = b.lines[1:]
	}
	b.lines = append(b.lines, line)
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
