package kubeapitest

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"
)

// Server is an API server. Its methods are safe for concurrent use.
type Server struct {
	URL string // http://127.0.0.1:port; in memory a name that only Dial can reach

	http  *http.Server
	conns *connections

	mu       sync.Mutex
	store    store
	changed  chan struct{} // closed and replaced after each change
	failures []*failure
	requests []Request
	tokens   []string // accepted; nil = all, and none
	denied   map[rule]bool
	delays   map[string]time.Duration // by verb
	hung     chan struct{}            // closed when requests go on; nil = they do
	watches  watchMode

	dropTaints, dropShares bool
	validate               func(Slice) error
	admit                  func(slice, old []byte) ([]byte, error)
	guard                  *nodeGuard // nil = none
}

type rule struct{ verb, resource string }

// Request is one request as the server saw it.
type Request struct {
	Verb, Resource, Namespace, Name string // "list", "resourceslices", "nodes/status"; Name also of a create
	DryRun                          bool
	Token                           string
	Bytes                           int // of the body
	At                              time.Time
	Code                            int // of the answer; 0 = none was sent so far, or the connection was cut
}

// Start serves on a TCP port of localhost until the test ends.
func Start(t testing.TB) *Server {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := serve(&connections{Listener: listener})
	s.URL = "http://" + listener.Addr().String()
	t.Cleanup(s.Close)
	return s
}

// NewInMemory serves without a network: clients connect with Dial. Call Close before the bubble of a test ends.
func NewInMemory() *Server {
	s := serve(&connections{Listener: &pipeListener{conns: make(chan net.Conn), closed: make(chan struct{})}})
	s.URL = "http://api.test:80"
	return s
}

func serve(c *connections) *Server {
	s := &Server{conns: c, store: newStore(), changed: make(chan struct{}), denied: map[rule]bool{}, delays: map[string]time.Duration{}}
	s.http = &http.Server{Handler: s, ReadHeaderTimeout: time.Minute, ConnState: c.track}
	go func() { _ = s.http.Serve(c) }() // until Close
	return s
}

// Close ends the server and all its connections.
func (s *Server) Close() {
	s.Resume()
	_ = s.http.Close() // what is open is closed
}

// Dial connects to a server of NewInMemory, whatever the address: kubeapi.Options.Dial.
func (s *Server) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if s.conns.isDown() {
		return nil, errors.New("connection refused")
	}
	listener, ok := s.conns.Listener.(*pipeListener)
	if !ok {
		return nil, errors.New("not a server in memory")
	}
	server, client := net.Pipe()
	select {
	case listener.conns <- server:
		return client, nil
	case <-listener.closed:
		return nil, errors.New("connection refused")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// SetDown cuts all connections and refuses new ones (true), or serves again (false).
func (s *Server) SetDown(down bool) { s.conns.setDown(down) }

// Hang leaves all requests that come now without an answer until Resume.
func (s *Server) Hang() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hung == nil {
		s.hung = make(chan struct{})
	}
}

// Resume ends Hang, SilenceWatches and all failures of Fail.
func (s *Server) Resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hung != nil {
		close(s.hung)
		s.hung = nil
	}
	s.failures = nil
	s.watches.silent = false
	s.notify()
}

// Requests are those since the start or ForgetRequests.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Writes are the requests that change slices, without dry runs.
func (s *Server) Writes() []Request {
	return slices.DeleteFunc(s.Requests(), func(r Request) bool {
		return r.DryRun || r.Resource != "resourceslices" || r.Verb == "get" || r.Verb == "list" || r.Verb == "watch"
	})
}

// ForgetRequests empties Requests.
func (s *Server) ForgetRequests() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = nil
}

// connections is a listener that can cut all connections and refuse new ones.
type connections struct {
	net.Listener

	mu   sync.Mutex
	down bool
	open map[net.Conn]bool
}

// Accept returns the next connection while the server is not down.
func (c *connections) Accept() (net.Conn, error) {
	for {
		conn, err := c.Listener.Accept()
		if err != nil || !c.isDown() {
			return conn, err
		}
		_ = conn.Close() // refused
	}
}

func (c *connections) isDown() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.down
}

func (c *connections) track(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case state == http.StateNew && c.down:
		_ = conn.Close() // refused
	case state == http.StateNew:
		if c.open == nil {
			c.open = map[net.Conn]bool{}
		}
		c.open[conn] = true
	case state == http.StateClosed || state == http.StateHijacked:
		delete(c.open, conn)
	}
}

func (c *connections) setDown(down bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = down
	if down {
		for conn := range c.open {
			_ = conn.Close() // cut
		}
	}
}

// pipeListener accepts connections in memory.
type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// Accept waits for a Dial.
func (p *pipeListener) Accept() (net.Conn, error) {
	select {
	case conn := <-p.conns:
		return conn, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (p *pipeListener) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

// Addr returns an address that means nothing.
func (p *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "memory", Net: "pipe"} }
