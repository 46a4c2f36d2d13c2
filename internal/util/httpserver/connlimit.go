package httpserver

import (
	"net"
	"slices"
	"sync"
	"time"
)

// limiter is a listener that keeps at most max connections open. In favour of a new one it closes the oldest connection of the
// address that has the most, once that is minAge old. So clients that hold connections block no other client: neither the
// kubelet's probes nor, from another address, a slow scrape.
//
// netutil.LimitListener lets new connections wait until others end: with it, 400 idle clients block the probes.
type limiter struct {
	net.Listener
	max    int
	minAge time.Duration // with max, it bounds how many connections are accepted per second

	mu   sync.Mutex
	open []*limitedConn // in the order of acceptance
}

func newLimiter(l net.Listener, limit int, minAge time.Duration) *limiter {
	return &limiter{Listener: l, max: limit, minAge: minAge}
}

// limitedConn is a connection that counts in a limiter.
type limitedConn struct {
	net.Conn
	limiter  *limiter
	client   string // address without the port
	accepted time.Time
}

// Accept implements net.Listener.
func (l *limiter) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	client, _, err := net.SplitHostPort(conn.RemoteAddr().String())
	if err != nil {
		client = conn.RemoteAddr().String()
	}
	c := &limitedConn{conn, l, client, time.Now()}
	if excess := l.add(c); excess != nil {
		<-time.After(l.minAge - time.Since(excess.accepted)) // others wait in the kernel's backlog meanwhile
		excess.abort()
	}
	return c, nil
}

// add counts a connection, and returns the one to close in its favour; nil if none.
func (l *limiter) add(c *limitedConn) (excess *limitedConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = append(l.open, c)
	if len(l.open) <= l.max {
		return nil
	}
	count := map[string]int{}
	for _, o := range l.open {
		count[o.client]++
	}
	excess = l.open[0]
	for _, o := range l.open {
		if count[o.client] > count[excess.client] {
			excess = o
		}
	}
	l.open = slices.DeleteFunc(l.open, func(o *limitedConn) bool { return o == excess })
	return excess
}

// Write implements net.Conn. A client that does not read is disconnected.
func (c *limitedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err != nil {
		c.discardUnsent()
	}
	return n, err
}

// Close implements net.Conn.
func (c *limitedConn) Close() error {
	c.limiter.mu.Lock()
	c.limiter.open = slices.DeleteFunc(c.limiter.open, func(o *limitedConn) bool { return o == c })
	c.limiter.mu.Unlock()
	return c.Conn.Close()
}

func (c *limitedConn) abort() {
	c.discardUnsent()
	_ = c.Conn.Close()
}

// discardUnsent makes the kernel drop what the client has not read when the connection is closed (SO_LINGER of socket(7)).
func (c *limitedConn) discardUnsent() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
}
