package httpserver

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/check"
)

// listening is a limiter on addresses of the loopback, of which each client may choose one.
func listening(t *testing.T, most int) *limiter {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return newLimiter(l, most, minAges{})
}

// connect connects from an address and returns both ends.
func (l *limiter) connect(t *testing.T, from string) (client, server net.Conn) {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	client, err := dialer.Dial("tcp", l.Addr().String())
	check.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	return client, server
}

// isOpen reports whether the other side has not closed a connection on which nothing is sent.
func isOpen(c net.Conn) bool {
	_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	_, err := c.Read(make([]byte, 1))
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

func TestLimiterClosesTheOldestOfTheBusiestAddress(t *testing.T) {
	l := listening(t, 4)
	scraper, _ := l.connect(t, "127.0.0.2")
	var hogs []net.Conn
	for range 6 {
		hog, _ := l.connect(t, "127.0.0.3")
		hogs = append(hogs, hog)
	}
	probe, server := l.connect(t, "127.0.0.4")
	if !isOpen(scraper) || !isOpen(probe) {
		t.Error("a client with one connection was cut off")
	}
	for i, hog := range hogs {
		if want := i >= 4; isOpen(hog) != want {
			t.Errorf("connection %d of the hog: open %v, want %v", i, !want, want)
		}
	}
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	last, _ := l.connect(t, "127.0.0.3")
	if !isOpen(last) || !isOpen(hogs[4]) {
		t.Error("a connection that has ended is counted")
	}
}

// A flood of connections that send nothing does not delay a probe from the same address, and does not cut it off. With
// one age for all connections the probe waits in the kernel's queue, behind the flood.
func TestProbeDuringFlood(t *testing.T) {
	l := listening(t, 4)
	l.ages.used = time.Hour
	for range 4 {
		l.connect(t, "127.0.0.3")
	}
	probe, server := l.connect(t, "127.0.0.3")
	_, err := probe.Write([]byte("GET /healthz HTTP/1.1\r\n"))
	check.NoError(t, err)
	_, err = server.Read(make([]byte, 1))
	check.NoError(t, err)
	for range 100 {
		l.connect(t, "127.0.0.3")
	}
	if !isOpen(probe) {
		t.Error("the probe was cut off")
	}
}

// A flood of connections that have sent something does not cut off the probe that comes next from the same address, nor
// one that was accepted a moment ago and has not been read yet.
func TestProbeDuringFloodThatSends(t *testing.T) {
	l := listening(t, 4)
	l.ages.silent = time.Hour
	for range 4 {
		client, server := l.connect(t, "127.0.0.3")
		_, err := client.Write([]byte("G"))
		check.NoError(t, err)
		_, err = server.Read(make([]byte, 1))
		check.NoError(t, err)
	}
	probe, _ := l.connect(t, "127.0.0.3")
	l.connect(t, "127.0.0.3")
	if !isOpen(probe) {
		t.Error("the probe was cut off")
	}
}

// The port of an address may be a name.
func TestAddresses(t *testing.T) {
	for address, ok := range map[string]bool{":9410": true, "127.0.0.1:http": true, "[::1]:0": true, "9410": false, ":nothing": false, ":70000": false} {
		if err := CheckAddress(address); (err == nil) != ok {
			t.Errorf("%s: %v", address, err)
		}
	}
}
