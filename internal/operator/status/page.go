package status

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"maps"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/httpserver"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// minInterval is the least time between two responses that a page makes, whatever the number of clients.
const minInterval = 100 * time.Millisecond

// page makes one response for all clients that wait for one. No client gets a response older than its request. So many clients
// cost a connection each, not a response each.
type page struct {
	handler http.Handler
	sem     chan struct{} // of capacity 1; its holder reads and writes latest
	latest  *response
}

// response is a complete response. It is immutable.
type response struct {
	status  int
	header  http.Header
	body    []byte
	started time.Time // when the handler was called
}

func newPage(handler http.Handler) *page {
	return &page{handler: handler, sem: make(chan struct{}, 1)}
}

// ServeHTTP implements http.Handler.
func (p *page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a, err := p.get(r.Context())
	if err != nil {
		return // the client has disconnected
	}
	maps.Copy(w.Header(), a.header)
	w.Header().Set("Content-Length", strconv.Itoa(len(a.body)))
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body) // a client that does not read is disconnected after writeTimeout
}

// get returns the latest response if its making started after the call, else a new one.
func (p *page) get(ctx context.Context) (*response, error) {
	requested := time.Now()
	select {
	case p.sem <- struct{}{}:
		defer func() { <-p.sem }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if p.latest != nil {
		if p.latest.started.After(requested) {
			return p.latest, nil
		}
		if !watch.Sleep(ctx, minInterval-time.Since(p.latest.started)) {
			return nil, ctx.Err()
		}
	}
	// The response is also for other clients: it does not end with this one, and ignores the rest of its request.
	a, err := p.call(context.WithoutCancel(ctx))
	if err == nil {
		p.latest = a
	}
	return a, err
}

func (p *page) call(ctx context.Context) (*response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/", http.NoBody)
	if err != nil {
		return nil, err
	}
	w, started := &recorder{header: http.Header{}}, time.Now()
	if p.latest != nil {
		w.body.Grow(len(p.latest.body) + 1<<10) // one allocation of about the size needed
	}
	p.handler.ServeHTTP(w, r)
	return &response{max(w.status, http.StatusOK), w.header, w.body.Bytes(), started}, nil
}

// recorder is a ResponseWriter that keeps the response.
type recorder struct {
	status int // 0 = not set: 200
	header http.Header
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(b []byte) (int, error) { return r.body.Write(b) }

// negotiated is a page in two encodings.
func negotiated(handler http.Handler) http.Handler {
	plain, zipped := newPage(handler), newPage(compressed(handler))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Vary", "Accept-Encoding")
		if httpserver.AcceptsGzip(r.Header.Get("Accept-Encoding")) {
			zipped.ServeHTTP(w, r)
			return
		}
		plain.ServeHTTP(w, r)
	})
}

// compressed is a handler with its response compressed. BestSpeed makes a page of metrics a tenth larger than the default, in half of
// the time. A writer has 1.2 MB of tables, which are used again.
func compressed(handler http.Handler) http.Handler {
	type writer struct {
		plain bytes.Buffer
		zip   *gzip.Writer
	}
	writers := sync.Pool{New: func() any {
		z, _ := gzip.NewWriterLevel(io.Discard, gzip.BestSpeed) // the level is valid
		return &writer{zip: z}
	}}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		z := writers.Get().(*writer)
		defer writers.Put(z)
		z.plain.Reset()
		plain := recorder{header: w.Header(), body: z.plain}
		handler.ServeHTTP(&plain, r)
		z.plain = plain.body
		w.Header().Set("Content-Encoding", "gzip")
		if plain.status != 0 {
			w.WriteHeader(plain.status)
		}
		z.zip.Reset(w)
		_, _ = z.zip.Write(plain.body.Bytes()) // a client that does not read is disconnected
		_ = z.zip.Close()
	})
}
