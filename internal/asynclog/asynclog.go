// Package asynclog is for a log that keeps nobody waiting. A log is a pipe to a program that may have stopped
// reading: once it is full a write blocks for ever, and with it who watches the GPUs, answers or ends the process.
package asynclog

import (
	"bytes"
	"io"
	"sync"
	"time"
)

const (
	room        = 1024                   // lines; one is a few hundred bytes
	flushAtMost = 200 * time.Millisecond // if nobody reads
	flushAgain  = 2 * time.Millisecond   // between looks for room
)

// Writer takes lines for a writer that may block, and never blocks itself. Lines that find no room are dropped and
// counted. Make one with New; it is safe for concurrent use.
type Writer struct {
	lines chan queued

	mu   sync.Mutex // held for moments only: never while out is written to
	lost int64      // lines dropped since the last one that found room
}

// queued is a line, or a question whether all before it are written.
type queued struct {
	missing int64 // lines dropped right before this one
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
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.enqueue(queued{text: bytes.Clone(line)}) {
		w.lost++
	}
	return len(line), nil
}

// enqueue reports whether there was room. Call it with the lock held: the number of dropped lines must go into the
// queue where they are missing.
func (w *Writer) enqueue(q queued) bool {
	q.missing = w.lost
	select {
	case w.lines <- q:
		w.lost = 0
		return true
	default:
		return false
	}
}

// Flush waits until what was written before has reached out, but not for ever.
func (w *Writer) Flush() {
	enough := time.NewTimer(flushAtMost)
	defer enough.Stop()
	again := time.NewTicker(flushAgain)
	defer again.Stop()
	written := make(chan struct{})
	for !w.ask(written) {
		select {
		case <-again.C:
		case <-enough.C:
			return
		}
	}
	select {
	case <-written:
	case <-enough.C:
	}
}

// ask has written closed when all before it is written, if there is room for the question.
func (w *Writer) ask(written chan<- struct{}) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.enqueue(queued{written: written})
}

// drain writes line after line. An error of out has no reader: out was the log.
func (w *Writer) drain(out io.Writer, missing func(int64) []byte) {
	write := func(q queued) {
		if q.missing > 0 {
			_, _ = out.Write(missing(q.missing))
		}
		if len(q.text) > 0 {
			_, _ = out.Write(q.text)
		}
		if q.written != nil {
			close(q.written)
		}
	}
	for {
		select {
		case q := <-w.lines:
			write(q)
		default:
			write(queued{missing: w.lostAtEnd()}) // the next line may be long in coming
			write(<-w.lines)
		}
	}
}

// lostAtEnd takes the number of lines that were dropped after the last one in the queue, if all in it are written.
func (w *Writer) lostAtEnd() (lines int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.lines) == 0 {
		lines, w.lost = w.lost, 0
	}
	return lines
}
