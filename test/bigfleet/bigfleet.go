// Package bigfleet stands in for the API servers of a Kubernetes cluster and of a Nomad region with thousands of nodes, of which only the objects exist:
// no machine runs so many real ones. Objects have the size that they have in real clusters, and answers the form and the compression of the real
// servers. Each node has eight GPUs with one workload each, but for the last node, which is free.
package bigfleet

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"sync"
	"time"
)

// GPUs of each node.
const GPUs = 8

// server counts the requests to a handler by what they are for, and can let them wait.
type server struct {
	http *httptest.Server
	gate chan struct{}
	open sync.Once

	mu       sync.Mutex
	requests map[string]int
	sent     int64
	acts     []time.Time
}

func (s *server) start(name func(*http.Request) string, handler http.Handler) {
	s.gate, s.requests = make(chan struct{}), map[string]int{}
	s.http = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-s.gate:
		case <-r.Context().Done():
			return
		}
		s.mu.Lock()
		s.requests[name(r)]++
		s.mu.Unlock()
		handler.ServeHTTP(counted{w, s}, r)
	}))
}

// Open lets the requests through, which wait until then.
func (s *server) Open() { s.open.Do(func() { close(s.gate) }) }

// Close ends all connections.
func (s *server) Close() {
	s.Open()
	s.http.CloseClientConnections()
	s.http.Close()
}

// Requests are how often each was made so far.
func (s *server) Requests() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.requests)
}

// Sent is how many bytes of answers were sent so far.
func (s *server) Sent() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent
}

// Acts are when workloads were told to end.
func (s *server) Acts() []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]time.Time(nil), s.acts...)
}

func (s *server) acted() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.acts = append(s.acts, time.Now())
}

// counted counts the bytes of an answer.
type counted struct {
	http.ResponseWriter
	s *server
}

func (c counted) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.s.mu.Lock()
	c.s.sent += int64(n)
	c.s.mu.Unlock()
	return n, err
}

// Unwrap is for http.ResponseController.
func (c counted) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func nodeName(n int) string    { return fmt.Sprintf("node-%04d", n) }
func gpuID(n, g int) string    { return fmt.Sprintf("GPU-%08d-0000-4000-8000-%012d", n, g) }
func workID(n, g int) string   { return fmt.Sprintf("%08d-1111-4111-8111-%012d", n, g) }
func nodeUUID(n int) string    { return fmt.Sprintf("%08d-2222-4222-8222-000000000000", n) }
func jobName(n int) string     { return fmt.Sprintf("training-%04d", n) }
func workName(n, g int) string { return fmt.Sprintf("%s-%d", jobName(n), g) }

// endsAfter is how long a workload takes to end, and its replacement to run.
const endsAfter = 100 * time.Millisecond
