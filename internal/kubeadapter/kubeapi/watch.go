package kubeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"
)

const (
	watchFor    = 300 * time.Second // after which the server ends a watch, with 10 % of jitter
	watchSilent = 30 * time.Second  // after that, for the end to arrive; later the connection is dead
)

// EventType is the type of an event of a watch.
type EventType string

// The types of events (metav1.WatchEvent).
const (
	Added    EventType = "ADDED"
	Modified EventType = "MODIFIED"
	Deleted  EventType = "DELETED"  // the slice as it was, with the resource version of its deletion
	Bookmark EventType = "BOOKMARK" // only the resource version, from which a later watch can start

	Opened EventType = "" // no event of the server: it has answered, and the watch has begun
)

// Event is one event of a watch.
type Event struct {
	Type  EventType
	Slice ResourceSlice
}

// WatchSlices yields Opened, and the events after a resource version until the server ends the watch, after about five minutes, or ctx ends. Then
// the sequence ends, and a watch from the last event's resource version continues it. Before a failure ends the sequence it yields the
// error: ErrGone asks for a new list. It runs in the goroutine of the caller.
func (c *Client) WatchSlices(ctx context.Context, s SliceSelector, resourceVersion string) iter.Seq2[Event, error] {
	r := call{verb: "watch", object: sliceObject(""), query: s.query()}
	return watchFrom(ctx, c, r, resourceVersion, func(t EventType, slice ResourceSlice) Event { return Event{t, slice} })
}

// watchFrom yields an event for the answer to a watch, and for each object that it sends.
func watchFrom[O, E any](ctx context.Context, c *Client, r call, resourceVersion string, event func(EventType, O) E) iter.Seq2[E, error] {
	return func(yield func(E, error) bool) {
		var none E
		length := watchFor - watchFor/10 + rand.N(watchFor/5)
		r.query.Set("watch", "1")
		r.query.Set("allowWatchBookmarks", "true")
		r.query.Set("resourceVersion", resourceVersion)
		r.query.Set("timeoutSeconds", strconv.Itoa(int(length/time.Second)))

		dead := length + watchSilent
		watching, cancel := context.WithTimeoutCause(ctx, dead, fmt.Errorf("the watch did not end within %s", dead.Round(time.Second)))
		defer cancel()
		answer, err := c.send(watching, r)
		if err != nil {
			yield(none, err)
			return
		}
		defer answer.Body.Close() //nolint:errcheck // the watch is over
		var empty O
		if !yield(event(Opened, empty), nil) {
			return
		}
		err = events(c, r, answer.Body, func(t EventType, object O) bool { return yield(event(t, object), nil) })
		if err != nil && ctx.Err() == nil {
			if status := (*StatusError)(nil); !errors.As(err, &status) {
				err = c.failed(watching, r, err)
			}
			yield(none, err)
		}
	}
}

// events decodes a watch until it ends (nil) or use returns false (nil).
func events[O any](c *Client, r call, body io.Reader, use func(EventType, O) bool) error {
	bounded := &boundedReader{r: body}
	decoder := json.NewDecoder(bounded)
	for {
		bounded.left = maxAnswer
		var line struct {
			Type   EventType
			Object json.RawMessage
		}
		if err := decoder.Decode(&line); errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		} else if err != nil {
			return err
		}
		var decoded O
		switch line.Type {
		case Added, Modified, Deleted, Bookmark:
			if err := json.Unmarshal(line.Object, &decoded); err != nil {
				return fmt.Errorf("the event can't be decoded: %w", err)
			}
		default: // ERROR, and what later versions may have
			e := &StatusError{Verb: r.verb, Object: r.object.String(), Server: c.server, Code: http.StatusOK, rule: rule(r)}
			e.read(line.Object)
			return e
		}
		if !use(line.Type, decoded) {
			return nil
		}
	}
}

// boundedReader fails after left bytes.
type boundedReader struct {
	r    io.Reader
	left int
}

// Read reads at most what is left.
func (b *boundedReader) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errTooLong
	}
	n, err := b.r.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
