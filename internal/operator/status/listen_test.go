package status

import (
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

func TestManyClientsShareOneResponse(t *testing.T) {
	var made atomic.Int32
	begun, release := make(chan struct{}), make(chan struct{})
	p := newPage(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if made.Add(1) == 1 {
			close(begun)
			<-release
		}
		if r.Context().Err() != nil {
			w.WriteHeader(http.StatusInternalServerError)
		}
		_, _ = io.WriteString(w, "text")
	}))
	first, leave := context.WithCancel(t.Context())
	var all sync.WaitGroup
	ask := func(ctx context.Context, want string) {
		w := httptest.NewRecorder()
		p.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
		if w.Code != http.StatusOK || w.Body.String() != want {
			t.Errorf("%d %q", w.Code, w.Body)
		}
	}
	all.Go(func() { ask(first, "text") })
	<-begun
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	ask(gone, "") // it does not wait for the others
	for range 50 {
		all.Go(func() { ask(t.Context(), "text") })
	}
	leave() // while its response is made, which is also for the others
	close(release)
	all.Wait()
	if n := made.Load(); n > 10 { // two, unless it takes long until all 50 have asked
		t.Errorf("%d responses for 51 clients", n)
	}
	for before := made.Load(); made.Load() < before+2; {
		n := made.Load()
		if ask(t.Context(), "text"); made.Load() != n+1 {
			t.Fatal("the response is older than the request")
		}
	}
}

func TestMetricsAreCompressedOnRequest(t *testing.T) {
	handler := read(core.DefaultConfig(), coretest.GPUs(2)).handler()
	for header, zipped := range map[string]bool{"": false, "gzip": true, "deflate, GZIP;q=0.5": true, "gzip;q=0": false, "identity": false} {
		w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil)
		r.Header.Set("Accept-Encoding", header)
		handler.ServeHTTP(w, r)
		body := io.Reader(w.Body)
		if zipped {
			var err error
			if body, err = gzip.NewReader(w.Body); err != nil || w.Header().Get("Content-Encoding") != "gzip" {
				t.Fatalf("%q: %v, %v", header, w.Header(), err)
			}
		}
		text, err := io.ReadAll(body)
		if err != nil || !strings.Contains(string(text), "tandem_build_info") || !strings.HasPrefix(w.Header().Get("Content-Type"), "text/plain") {
			t.Errorf("%q: %v, %v", header, w.Header(), err)
		}
	}
}

// A page that the program adds is beside the server's own, and no other path is its.
func TestAddedPages(t *testing.T) {
	s := read(core.DefaultConfig(), coretest.GPUs(1)).server()
	s.Handlers = map[string]http.Handler{"GET /{$}": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "status page") })}
	handler := s.handler()
	for path, want := range map[string]string{"/": "status page", "/readyz": "offered to the kubelet: nvidia.com/gpu\n", "/nothing": "404 page not found\n"} {
		w := httptest.NewRecorder()
		if handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)); w.Body.String() != want {
			t.Errorf("%s: %d %q", path, w.Code, w.Body)
		}
	}
}

// /inventory has the problems of the agent, as inspect has them.
func TestProblemsOfTheAgentAreInTheInventory(t *testing.T) {
	s := read(core.DefaultConfig(), coretest.GPUs(1)).server()
	s.Problems = func() []problem.Problem {
		return []problem.Problem{{Code: problem.KernelLog, Text: "kernel log unavailable"}}
	}
	w := httptest.NewRecorder()
	s.handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/inventory", nil))
	if !strings.Contains(w.Body.String(), "kernel log unavailable") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
