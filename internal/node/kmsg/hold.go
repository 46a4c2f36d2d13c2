package kmsg

import (
	"context"
	"slices"
	"time"
)

const (
	// holdFor is how long a line waits. An XID that NVML also reports arrives twice, and NVML's event must be first: it
	// names the MIG instance, the log only the GPU.
	holdFor = 2 * time.Second

	// maxHeld is the maximum number of lines that wait: more than a node of 16 GPUs logs in holdFor.
	maxHeld = 256
)

// hold emits each line holdFor after it arrived, but drops a line that repeats one that is waiting: a fault that is
// logged ten thousand times a second is one line each holdFor. It returns when ctx ends, or when lines is closed and
// all were emitted.
func hold(ctx context.Context, lines <-chan arrival, emit func(arrival)) {
	q := queue{emit: emit}
	timer := time.NewTimer(holdFor) // for the first of the queue
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case line, ok := <-lines:
			if !ok {
				q.release(len(q.waiting))
				return
			}
			q.add(line)
		case now := <-timer.C:
			q.release(q.due(now))
		}
		if len(q.waiting) > 0 {
			timer.Reset(time.Until(q.waiting[0].due))
		}
	}
}

// queue holds at most maxHeld lines in the order of their arrival.
type queue struct {
	emit    func(arrival)
	waiting []held
	next    uint64 // the sequence number after the latest line, whether that waits or was dropped
}

type held struct {
	arrival
	due time.Time
}

// repeatedBy reports whether a line has the same fault at about the same time. All that has arrived while a line
// without a time waits is at about its time.
func (h held) repeatedBy(a arrival) bool {
	return h.line.fault() == a.line.fault() && (h.logged == 0 || a.logged == 0 || repeats(h.logged, a.logged))
}

func (q *queue) add(a arrival) {
	line := a.line
	if i := slices.IndexFunc(q.waiting, func(h held) bool { return h.repeatedBy(a) }); i >= 0 {
		q.waiting[i].line.Repeats++
		q.next = line.Seq + 1
		return
	}
	if len(q.waiting) == maxHeld { // the oldest is emitted early
		q.release(1)
	}
	q.next = line.Seq + 1
	q.waiting = append(q.waiting, held{a, time.Now().Add(holdFor)})
}

// due counts the lines that have waited for holdFor.
func (q *queue) due(now time.Time) int {
	n := slices.IndexFunc(q.waiting, func(h held) bool { return h.due.After(now) })
	if n < 0 {
		return len(q.waiting)
	}
	return n
}

// release emits the first n lines, each with the number to continue at: that of the next line that waits, if there is one.
func (q *queue) release(n int) {
	for i, h := range q.waiting[:n] {
		h.line.Next = q.next
		if i+1 < len(q.waiting) {
			h.line.Next = q.waiting[i+1].line.Seq
		}
		q.emit(h.arrival)
	}
	q.waiting = slices.Delete(q.waiting, 0, n)
}
