package httpserver

import (
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// limiter is a listener that keeps at most max connections open. In favour of a new one it closes the oldest connection of the
// address that has the most, once that is old enough: first one that has sent nothing. So clients that hold connections
// block no other client: neither the kubelet's probes, also from their own address, nor a slow scrape from another one.
//
// netutil.LimitListener lets new connections wait until others end: with it, 400 idle clients block the probes.
type limiter struct {
	net.Listener
	max  int
	ages minAges

	mu   sync.Mutex
	open []*limitedConn // in the order of acceptance
}

// minAges are the ages from which on a connection may be closed in favour of another. With the number of connections,
// they bound how many are accepted per second. The others wait in the kernel's queue, and a probe waits behind them.
type minAges struct {
	silent time.Duration // of a connection that has sent nothing
	used   time.Duration // of any other
}

func newLimiter(l net.Listener, limit int, ages minAges) *limiter {
	return &limiter{Listener: l, max: limit, ages: ages}
}

// limitedConn is a connection that counts in a limiter.
type limitedConn struct {
	net.Conn
	limiter  *limiter
	client   string // address without the port
	accepted time.Time
	used     atomic.Bool // it has sent something
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
	c := &limitedConn{Conn: conn, limiter: l, client: client, accepted: time.Now()}
	if excess := l.add(c); excess != nil {
		age := l.ages.silent
		if excess.used.Load() {
			age = l.ages.used
		}
		<-time.After(age - time.Since(excess.accepted)) // others wait in the kernel's backlog meanwhile
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
	for _, o := range l.open[:l.max] { // c is not among them: it may be a probe that has had no time to send
		more := count[o.client] - count[excess.client]
		if more > 0 || more == 0 && excess.used.Load() && l.isSilent(o) {
			excess = o
		}
	}
	l.open = slices.DeleteFunc(l.open, func(o *limitedConn) bool { return o == excess })
	return excess
}

// isSilent reports whether a connection has sent nothing although it had the time to.
func (l *limiter) isSilent(c *limitedConn) bool {
	return !c.used.Load() && time.Since(c.accepted) >= l.ages.silent
}

// Read implements net.Conn.
func (c *limitedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.used.Store(true)
	}
	return n, err
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
