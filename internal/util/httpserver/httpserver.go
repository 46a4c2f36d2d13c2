// Package httpserver serves HTTP to clients that are not trusted: what they can use is bounded, and an address that is in use is tried again. A Socket
// serves it on a socket in the file system, to the own user only.
package httpserver

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Limits of what clients can use of a program, whose memory its orchestrator bounds. Any client that reaches the port may connect.
const (
	maxConnections = 512                    // 60 kB each, with the kernel's buffers
	minSilentAge   = 20 * time.Millisecond  // before a connection that has sent nothing may be closed for another
	minUsedAge     = 200 * time.Millisecond // the same of any other connection
	readTimeout    = 3 * time.Second        // for a request, from the accepted connection to its last byte
	writeTimeout   = 5 * time.Second        // for a response, from the end of the request's header to its last byte
	maxHeaderBytes = 8 << 10
	sendBuffer     = 16 << 10 // bytes that the kernel keeps for a client that does not read; the kernel doubles it
)

// The interval between attempts to listen on an address that is in use grows from the first to the second.
const (
	minListenRetry = time.Second
	maxListenRetry = 10 * time.Second
)

// Server is an HTTP server. Every field but WriteTimeout is required.
type Server struct {
	Address      string // host:port; "" = Run returns at once
	Handler      http.Handler
	WriteTimeout time.Duration   // for a response, from the end of the request's header to its last byte; 0 = 5 s
	Problems     *problemset.Set // has the reason while nothing is served
	Log          *slog.Logger
}

// Run serves until ctx ends. The program works without HTTP: if it can't listen at the address, Run tries again.
func (s *Server) Run(ctx context.Context) {
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = minListenRetry, maxListenRetry
	for s.Address != "" {
		err := s.serve(ctx)
		if ctx.Err() != nil {
			return
		}
		p := problem.Problem{Code: problem.HTTP, Object: s.Address, Text: "no HTTP at " + s.Address + ": " + strings.ReplaceAll(err.Error(), "\n", "; ")}
		s.Problems.Put(p, slog.LevelWarn, "HTTP server unavailable, retrying", "address", s.Address, "error", err)
		if !watch.Sleep(ctx, retry.NextBackOff()) {
			return
		}
	}
}

func (s *Server) serve(ctx context.Context) error {
	timeout := s.WriteTimeout
	if timeout == 0 {
		timeout = writeTimeout
	}
	config := net.ListenConfig{Control: limitBuffers(timeout)}
	tcp, err := config.Listen(ctx, "tcp", s.Address)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler: s.Handler, ReadTimeout: readTimeout, WriteTimeout: timeout, MaxHeaderBytes: maxHeaderBytes,
		ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
	}
	server.SetKeepAlivesEnabled(false) // a probe or a scrape every few seconds needs no connection in between
	s.Problems.End(problem.HTTP, s.Address, "")
	s.Log.Info("listening", "http", tcp.Addr().String())
	served := make(chan error, 1)
	go func() { served <- server.Serve(newLimiter(tcp, maxConnections, minAges{minSilentAge, minUsedAge})) }()
	select {
	case err := <-served:
		return errors.Join(err, server.Close())
	case <-ctx.Done():
		_ = server.Close() // probes and scrapes may be cut off
		return <-served
	}
}

// tcpUserTimeout is TCP_USER_TIMEOUT of tcp(7), which package syscall lacks.
const tcpUserTimeout = 0x12

// limitBuffers bounds what the kernel keeps for a client that does not read: its size, and how long it is kept, also after the
// connection was closed. Accepted connections inherit both options from the listening socket.
func limitBuffers(timeout time.Duration) func(_, _ string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) {
			failed = errors.Join(
				syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF, sendBuffer),
				syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(timeout.Milliseconds())))
		})
		return errors.Join(err, failed)
	}
}

// CheckAddress checks the address of a TCP listener, as Server.Address is one. The port may be a name of /etc/services.
func CheckAddress(address string) error {
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = net.DefaultResolver.LookupPort(context.Background(), "tcp", port)
	}
	return err
}

// AcceptsGzip reports whether the header Accept-Encoding allows gzip (RFC 9110, 12.5.3).
func AcceptsGzip(header string) bool {
	for item := range strings.SplitSeq(header, ",") {
		name, weight, _ := strings.Cut(item, ";")
		refused := strings.Trim(strings.TrimPrefix(strings.TrimSpace(weight), "q="), "0.") == "" && weight != ""
		if strings.EqualFold(strings.TrimSpace(name), "gzip") && !refused {
			return true
		}
	}
	return false
}
