package main

import (
	"bytes"
	"io"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
)

const (
	queueLines  = 1024                   // a line is a few hundred bytes
	flushAtMost = 200 * time.Millisecond // at the end, if Nomad does not read
)

// queue is a writer that never blocks, on one that may: nobody who watches a GPU, answers Nomad or ends the
// process may wait until the agent reads its plugin's stderr. Lines that find no room are dropped and
// counted. Make one with newQueue; it is safe for concurrent use.
type queue struct {
	lines chan queued
	lost  atomic.Int64
}

// queued is a line, or a question whether all before it are written.
type queued struct {
	text    []byte
	written chan<- struct{}
}

// newQueue returns a queue that writes to out for as long as the process lives.
func newQueue(out io.Writer) *queue {
	q := &queue{lines: make(chan queued, queueLines)}
	go q.drain(out)
	return q
}

// Write takes one line. It never fails.
func (q *queue) Write(line []byte) (int, error) {
	select {
	case q.lines <- queued{text: bytes.Clone(line)}:
	default:
		q.lost.Add(1)
	}
	return len(line), nil
}

// flush waits until what was written before has reached out, but not for ever.
func (q *queue) flush() {
	enough := time.After(flushAtMost)
	written := make(chan struct{})
	select {
	case q.lines <- queued{written: written}:
	case <-enough:
		return
	}
	select {
	case <-written:
	case <-enough:
	}
}

// drain writes line after line. An error is nobody's to hear: it was the log.
func (q *queue) drain(out io.Writer) {
	direct := hclog.New(&hclog.LoggerOptions{Output: out, JSONFormat: true})
	for l := range q.lines {
		if n := q.lost.Swap(0); n > 0 {
			direct.Warn("lines of this log are lost: nobody read it", "lines", n)
		}
		if l.written != nil {
			close(l.written)
			continue
		}
		_, _ = out.Write(l.text)
	}
}
