package kmsg

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// firstOfRing is the lowest sequence number of a ring: higher than any of /dev/kmsg, so that the numbers of the two can be told apart.
	firstOfRing = 1 << 62

	// linesPerMicrosecond is how many numbers there are between two times of the log, so that few lines have a number of a later time.
	linesPerMicrosecond = 1 << 8

	// ringWindow is how much of the end of the buffer is read to find out whether there is more, in bytes.
	ringWindow = 4 << 10

	// ringMax is the maximum size of the buffer as text, in bytes. The kernel's own is at most 32 MiB (CONFIG_LOG_BUF_SHIFT).
	ringMax = 64 << 20
)

// errNoTimes is returned if the lines of the buffer have no times, without which a line can't be found again.
var errNoTimes = errors.New("its lines have no times: write Y to /sys/module/printk/parameters/time, or set printk.time=1 on the kernel's command line")

// ring reads the kernel's ring buffer by syslog(2), which needs the capability SYSLOG and no device, and returns its lines as records of
// /dev/kmsg. It is an io.Reader that returns io.EOF where there is no more at present.
//
// The lines have no sequence numbers. Each is given one that follows from its time and from the lines before it, so that another process
// gives it the same. Its time alone is none: lines that CPUs log at the same moment can have the same time, or be in the other order.
type ring struct {
	readAll func(p []byte) (int, error) // as many whole lines of the end of the buffer as fit, without removing them (SYSLOG_ACTION_READ_ALL)
	text    []byte                      // what was read, reused
	last    string                      // the latest line that was read, as the kernel wrote it; "" = none
	seq     uint64                      // its number
	group   group                       // of the latest line
	pending bytes.Buffer                // records that Read has not returned yet
}

// newRing reads nothing.
func newRing() *ring {
	return &ring{readAll: func(p []byte) (int, error) { return unix.Klogctl(unix.SYSLOG_ACTION_READ_ALL, p) }}
}

// Read implements io.Reader.
func (r *ring) Read(p []byte) (int, error) {
	if r.pending.Len() == 0 {
		if err := r.fill(); err != nil {
			return 0, err
		}
	}
	return r.pending.Read(p) // io.EOF if empty
}

// fill reads the lines after the latest one: the end of the buffer, or all of it if that line is not there.
func (r *ring) fill() error {
	for size := ringWindow; ; size *= 4 {
		if len(r.text) < size {
			r.text = make([]byte, size)
		}
		n, err := r.readAll(r.text[:size])
		if err != nil {
			return err
		}
		added, found := r.after(string(r.text[:n]))
		// The kernel leaves out a line that does not fit, and a line is at most a record.
		if whole := n+recordSize < size || size >= ringMax; !found && !whole {
			continue
		}
		if len(r.text) > ringWindow { // all of it is read at the start, and after many lines at once
			r.text = nil
		}
		return r.add(added)
	}
}

// after returns the lines of text after the latest one that was read, or all if it is not there.
func (r *ring) after(text string) (added string, found bool) {
	if r.last == "" {
		return text, false
	}
	// Not within a line: a process could write one that ends like this.
	if i := strings.LastIndex(text, "\n"+r.last); i >= 0 {
		return text[i+1+len(r.last):], true
	}
	added, found = strings.CutPrefix(text, r.last)
	return added, found
}

// add appends the records of lines, of a record with several lines the first one. It escapes their bytes as the device
// does.
func (r *ring) add(lines string) error {
	read, withTime := 0, 0
	for line := range strings.Lines(lines) {
		read++
		priority, micros, message, ok := parseRingLine(line)
		if !ok {
			continue
		}
		withTime++
		r.last, r.seq = line, max(r.seq+1, firstOfRing+micros*linesPerMicrosecond)
		if r.group.begins(strings.TrimSuffix(line, message+"\n"), message) {
			fmt.Fprintf(&r.pending, "%d,%d,%d,-;%s\n", priority, r.seq, micros, escape(message, escapedByKernel))
		}
	}
	if read > 0 && withTime == 0 {
		return errNoTimes
	}
	return nil
}

// parseRingLine splits "<4>[12296.609702] message" or, from a kernel with CONFIG_PRINTK_CALLER, "<4>[12296.609702][ T1234] message"
// (kernel/printk/printk.c, info_print_prefix). The priority includes the facility.
func parseRingLine(line string) (priority, micros uint64, message string, ok bool) {
	head, rest, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ">[")
	if !ok {
		return 0, 0, "", false
	}
	at, rest, ok := strings.Cut(rest, "]")
	seconds, fraction, ok2 := strings.Cut(strings.TrimLeft(at, " "), ".")
	if !ok || !ok2 || len(fraction) != 6 || !strings.HasPrefix(head, "<") {
		return 0, 0, "", false
	}
	priority, err := strconv.ParseUint(head[1:], 10, 32)
	s, err1 := strconv.ParseUint(seconds, 10, 40)
	us, err2 := strconv.ParseUint(fraction, 10, 32)
	if err != nil || err1 != nil || err2 != nil || s >= firstOfRing/linesPerMicrosecond/1_000_000 {
		return 0, 0, "", false
	}
	if caller, after, ok := strings.Cut(rest, "] "); ok && strings.HasPrefix(caller, "[") {
		rest = " " + after
	}
	return priority, s*1e6 + us, strings.TrimPrefix(rest, " "), true
}
