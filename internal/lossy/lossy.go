// Package lossy is for a log that keeps nobody waiting. A log is a pipe to a program that may have stopped
// reading: once it is full a write blocks for ever, and with it who watches the GPUs, answers or ends the process.
package lossy

import (
	"bytes"
	"io"
	"sync/atomic"
	"time"
)

const (
	room        = 1024                   // lines; one is a few hundred bytes
	flushAtMost = 200 * time.Millisecond // if nobody reads
)

// Writer takes lines for a writer that may block, and never blocks itself. Lines that find no room are dropped and
// counted. Make one with New; it is safe for concurrent use.
type Writer struct {
	lines chan queued
	lost  atomic.Int64
}

// queued is a line, or a question whether all before it are written.
type queued struct {
	text    []byte
	written chan<- struct{}
}

// New returns a writer to out for as long as the process lives. Where lines are missing, it writes what missing says
// about their number.
func New(out io.Writer, missing func(lines int64) []byte) *Writer {
	w := &Writer{lines: make(chan queued, room)}
	go w.drain(out, missing)
	return w
}

// Write takes one line, or some. It never fails.
func (w *Writer) Write(line []byte) (int, error) {
	select {
	case w.lines <- queued{text: bytes.Clone(line)}:
	default:
		w.lost.Add(1)
	}
	return len(line), nil
}

// Flush waits until what was written before has reached out, but not for ever.
func (w *Writer) Flush() {
	enough := time.NewTimer(flushAtMost)
	defer enough.Stop()
	written := make(chan struct{})
	select {
	case w.lines <- queued{written: written}:
	case <-enough.C:
		return
	}
	select {
	case <-written:
	case <-enough.C:
	}
}

// drain writes line after line. An error is nobody's to hear: it was the log.
func (w *Writer) drain(out io.Writer, missing func(int64) []byte) {
	for l := range w.lines {
		if n := w.lost.Swap(0); n > 0 {
			_, _ = out.Write(missing(n))
		}
		if l.written != nil {
			close(l.written)
			continue
		}
		_, _ = out.Write(l.text)
	}
}
