package main

import (
	"bytes"
	"context"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// answerPause is the least time between two answers of a page: how often clients can have one made.
const answerPause = 100 * time.Millisecond

// sharedPage makes one answer for all clients that wait for one. None is older than the request. So what many clients
// cost is a connection each.
type sharedPage struct {
	handler  http.Handler
	encoding string        // that the handler is told to be accepted; "" = none
	turn     chan struct{} // holds a token while a client looks at the latest answer, or makes the next
	latest   *answered
}

// answered is an answer in full. It is never changed.
type answered struct {
	status int
	header http.Header
	body   []byte
	begun  time.Time // when the handler was called
}

func newSharedPage(handler http.Handler, encoding string) *sharedPage {
	return &sharedPage{handler: handler, encoding: encoding, turn: make(chan struct{}, 1)}
}

// ServeHTTP is http.Handler's.
func (p *sharedPage) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a, err := p.answer(r.Context())
	if err != nil {
		return // the client is gone
	}
	maps.Copy(w.Header(), a.header)
	w.Header().Set("Content-Length", strconv.Itoa(len(a.body)))
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body) // a client that does not read is cut off: see writeAtMost
}

// answer is the latest if it was begun after the call, else a new one.
func (p *sharedPage) answer(ctx context.Context) (*answered, error) {
	asked := time.Now()
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if p.latest != nil {
		if p.latest.begun.After(asked) {
			return p.latest, nil
		}
		select {
		case <-time.After(answerPause - time.Since(p.latest.begun)):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	// It is for others, too: the client may leave meanwhile, and what else it asks for does not count.
	a, err := p.ask(context.WithoutCancel(ctx))
	if err == nil {
		p.latest = a
	}
	return a, err
}

func (p *sharedPage) ask(ctx context.Context) (*answered, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/", http.NoBody)
	if err != nil {
		return nil, err
	}
	if p.encoding != "" {
		r.Header.Set("Accept-Encoding", p.encoding)
	}
	w, begun := &recorder{header: http.Header{}}, time.Now()
	if p.latest != nil {
		w.body.Grow(len(p.latest.body) + 1<<10) // all at once, and no more than it takes
	}
	p.handler.ServeHTTP(w, r)
	return &answered{max(w.status, http.StatusOK), w.header, w.body.Bytes(), begun}, nil
}

// recorder is a ResponseWriter that keeps the answer.
type recorder struct {
	status int // 0 = not said: OK
	header http.Header
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(b []byte) (int, error) { return r.body.Write(b) }

// negotiated is a page in two encodings.
func negotiated(handler http.Handler) http.Handler {
	plain, zipped := newSharedPage(handler, ""), newSharedPage(handler, "gzip")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Vary", "Accept-Encoding")
		if acceptsGzip(r.Header.Get("Accept-Encoding")) {
			zipped.ServeHTTP(w, r)
			return
		}
		plain.ServeHTTP(w, r)
	})
}

// acceptsGzip reads the header Accept-Encoding (RFC 9110, 12.5.3).
func acceptsGzip(header string) bool {
	for item := range strings.SplitSeq(header, ",") {
		name, weight, _ := strings.Cut(item, ";")
		refused := strings.Trim(strings.TrimPrefix(strings.TrimSpace(weight), "q="), "0.") == "" && weight != ""
		if strings.EqualFold(strings.TrimSpace(name), "gzip") && !refused {
			return true
		}
	}
	return false
}
