package nomad

import (
	"context"
	"encoding/json"
	"io"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	heartbeatLimit = 30 * time.Second // the servers send one every 10 s
	streamPause    = 5 * time.Second  // between two streams
)

// events are one line of the stream; a heartbeat has none.
type events struct {
	Index  uint64
	Events []event
}

type event struct {
	Topic, Type, Key string
	Payload          struct {
		Allocation *struct{ Namespace, JobID string }
	}
}

// stream has the region listed again after events that matter, and when a stream has ended: events may be missing then. Without rights the servers send
// nothing, and no error: the lists find that.
func (c *Cluster) stream(ctx context.Context) {
	select {
	case <-c.indexed:
	case <-ctx.Done():
		return
	}
	for {
		err := c.streamOnce(ctx)
		if !watch.Sleep(ctx, streamPause) {
			return
		}
		c.log.Debug("stream of events has ended", "error", err)
		watch.Notify(c.changed)
	}
}

// streamOnce follows one stream, until it ends or has no line for heartbeatLimit.
func (c *Cluster) streamOnce(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := time.AfterFunc(heartbeatLimit, func() { cancel(context.DeadlineExceeded) })
	defer silent.Stop()
	q, err := c.query(ctx, "index", strconv.FormatUint(c.streamFrom(), 10))
	if err != nil {
		return err
	}
	body, err := c.client.Raw().Response("/v1/event/stream?topic=Node&topic=Allocation&namespace=*", q)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	return c.follows(body, func() { silent.Reset(heartbeatLimit) })
}

func (c *Cluster) follows(body io.Reader, alive func()) error {
	for lines := json.NewDecoder(body); ; {
		var next events
		if err := lines.Decode(&next); err != nil {
			return err
		}
		alive()
		for i := range next.Events {
			if c.matters(&next.Events[i]) {
				watch.Notify(c.changed)
				break
			}
		}
	}
}

// streamFrom is the index of the latest list: what is before it is in the list.
func (c *Cluster) streamFrom() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.index
}

// matters reports whether the region has to be listed for an event: any of a node but that its allocations have changed, and those of allocations of jobs that
// are followed.
func (c *Cluster) matters(e *event) bool {
	if e.Topic == "Node" {
		return e.Type != "AllocationUpdated"
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.follow[e.Key] || e.Payload.Allocation != nil && c.jobs[jobName{e.Payload.Allocation.Namespace, e.Payload.Allocation.JobID}]
}
