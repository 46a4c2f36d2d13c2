// Package asynclog writes a log without blocking. A log is a pipe to a program that may have stopped reading: once it is full, a
// write blocks forever, and with it the goroutine that watches the GPUs, answers or ends the process.
package asynclog

import (
	"bytes"
	"io"
	"sync"
	"time"
)

const (
	capacity   = 1024                 // lines; one is a few hundred bytes
	flushPause = 2 * time.Millisecond // between tries to enqueue the marker of Flush
)

// Writer queues lines for a writer that may block, and never blocks itself. Lines that find the queue full are dropped and
// counted. Make one with New; it is safe for concurrent use.
type Writer struct {
	lines chan queued

	mu   sync.Mutex // never held during a write to out
	lost int64      // lines dropped since the last one that was queued
}

// queued is a line, or a marker of Flush.
type queued struct {
	missing int64 // lines dropped right before this one
	text    []byte
	written chan<- struct{} // marker: closed when all lines before it are written
}

// New returns a writer to out, which is used until the process ends. Where lines were dropped, it writes missing of their number.
func New(out io.Writer, missing func(lines int64) []byte) *Writer {
	w := &Writer{lines: make(chan queued, capacity)}
	go w.drain(out, missing)
	return w
}

// Write queues one line, or some. It never fails.
func (w *Writer) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.enqueue(queued{text: bytes.Clone(line)}) {
		w.lost++
	}
	return len(line), nil
}

// enqueue reports whether the queue had room. Call it with the lock held: the number of dropped lines must be queued where they
// are missing.
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

// Flush waits until the lines queued before are written to out, for at most this time.
func (w *Writer) Flush(atMost time.Duration) {
	timeout := time.NewTimer(atMost)
	defer timeout.Stop()
	retry := time.NewTicker(flushPause)
	defer retry.Stop()
	written := make(chan struct{})
	for !w.mark(written) {
		select {
		case <-retry.C:
		case <-timeout.C:
			return
		}
	}
	select {
	case <-written:
	case <-timeout.C:
	}
}

// mark queues a marker and reports whether the queue had room for it.
func (w *Writer) mark(written chan<- struct{}) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.enqueue(queued{written: written})
}

// drain writes the queued lines. An error of out is ignored, as out is the log.
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
			write(queued{missing: w.lostAtEnd()}) // the next line may follow much later
			write(<-w.lines)
		}
	}
}

// lostAtEnd returns and resets the number of lines that were dropped after the last queued one, if the queue is empty.
func (w *Writer) lostAtEnd() (lines int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.lines) == 0 {
		lines, w.lost = w.lost, 0
	}
	return lines
}
