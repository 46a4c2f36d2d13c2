package main

import (
	"net"
	"slices"
	"sync"
	"time"
)

// crowd is a listener that keeps a bounded number of connections open: in favour of a new one, it closes the longest
// open one of the address that has the most, once that has had a moment. So clients that hold connections keep no other
// client out, neither the kubelet's probes nor, from another address, a scrape that takes its time.
//
// netutil.LimitListener lets new connections wait until others end: 400 idle clients then starve the probes.
type crowd struct {
	net.Listener
	most   int
	moment time.Duration // that each connection has; with most, how many can be accepted in a second

	mu   sync.Mutex
	open []*member // in the order in which they were accepted
}

func newCrowd(l net.Listener, most int, moment time.Duration) *crowd {
	return &crowd{Listener: l, most: most, moment: moment}
}

// member is a connection of a crowd.
type member struct {
	net.Conn
	of    *crowd
	from  string // address of the client, without the port
	since time.Time
}

// Accept is net.Listener's.
func (c *crowd) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	from, _, err := net.SplitHostPort(conn.RemoteAddr().String())
	if err != nil {
		from = conn.RemoteAddr().String()
	}
	m := &member{conn, c, from, time.Now()}
	if out := c.admit(m); out != nil {
		<-time.After(c.moment - time.Since(out.since)) // others wait to be accepted meanwhile
		out.cut()
	}
	return m, nil
}

// admit takes a connection in. What it returns has to go in its favour, if anything.
func (c *crowd) admit(m *member) (out *member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open = append(c.open, m)
	if len(c.open) <= c.most {
		return nil
	}
	count := map[string]int{}
	for _, o := range c.open {
		count[o.from]++
	}
	out = c.open[0]
	for _, o := range c.open {
		if count[o.from] > count[out.from] {
			out = o
		}
	}
	c.open = slices.DeleteFunc(c.open, func(o *member) bool { return o == out })
	return out
}

// Write is net.Conn's. A client that does not read is cut off.
func (m *member) Write(b []byte) (int, error) {
	n, err := m.Conn.Write(b)
	if err != nil {
		m.dropUnsent()
	}
	return n, err
}

// Close is net.Conn's.
func (m *member) Close() error {
	m.of.mu.Lock()
	m.of.open = slices.DeleteFunc(m.of.open, func(o *member) bool { return o == m })
	m.of.mu.Unlock()
	return m.Conn.Close()
}

// cut closes a connection whose client has had its time.
func (m *member) cut() {
	m.dropUnsent()
	_ = m.Conn.Close()
}

// dropUnsent has the kernel forget what the client has not read, when the connection is closed.
func (m *member) dropUnsent() {
	if tcp, ok := m.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
}
