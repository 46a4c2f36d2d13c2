package status

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
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Limits of what clients can use of the agent, whose memory the DaemonSet bounds. Any client that reaches the port may connect.
const (
	maxConnections   = 512                    // 60 kB each, with the kernel's buffers
	minConnectionAge = 200 * time.Millisecond // before a connection may be closed in favour of another
	readTimeout      = 3 * time.Second        // for a request, from the accepted connection to its last byte
	writeTimeout     = 5 * time.Second        // for a response, from the end of the request's header to its last byte
	maxHeaderBytes   = 8 << 10
	sendBuffer       = 16 << 10 // bytes that the kernel keeps for a client that does not read; the kernel doubles it
)

// The interval between attempts to listen on an address that is in use grows from the first to the second.
const (
	minListenRetry = time.Second
	maxListenRetry = 10 * time.Second
)

// Run serves until ctx ends. The agent works without HTTP: if it can't listen at the address, Run tries again.
func (s *Server) Run(ctx context.Context) {
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = minListenRetry, maxListenRetry
	for s.Address != "" {
		err := s.serve(ctx)
		if ctx.Err() != nil {
			return
		}
		p := problem.Problem{Code: problem.HTTP, Object: s.Address, Text: "no HTTP at " + s.Address + ": " + strings.ReplaceAll(err.Error(), "\n", "; ")}
		s.problems.Put(p, slog.LevelWarn, "HTTP server unavailable, retrying", "address", s.Address, "error", err)
		if !watch.Sleep(ctx, retry.NextBackOff()) {
			return
		}
	}
}

func (s *Server) serve(ctx context.Context) error {
	config := net.ListenConfig{Control: limitBuffers}
	tcp, err := config.Listen(ctx, "tcp", s.Address)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler: s.handler(), ReadTimeout: readTimeout, WriteTimeout: writeTimeout, MaxHeaderBytes: maxHeaderBytes,
		ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
	}
	server.SetKeepAlivesEnabled(false) // a probe or a scrape every few seconds needs no connection in between
	s.problems.End(problem.HTTP, s.Address, "")
	s.Log.Info("listening", "http", tcp.Addr().String())
	served := make(chan error, 1)
	go func() { served <- server.Serve(newLimiter(tcp, maxConnections, minConnectionAge)) }()
	select {
	case err := <-served:
		return errors.Join(err, server.Close())
	case <-ctx.Done():
		_ = server.Close() // probes and scrapes may be cut off
		return <-served
	}
}

// ListenProblems has the reason if nothing is served.
func (s *Server) ListenProblems() []problem.Problem { return s.problems.List() }

// tcpUserTimeout is TCP_USER_TIMEOUT of tcp(7), which package syscall lacks.
const tcpUserTimeout = 0x12

// limitBuffers bounds what the kernel keeps for a client that does not read: its size, and how long it is kept, also after the
// connection was closed. Accepted connections inherit both options from the listening socket.
func limitBuffers(_, _ string, c syscall.RawConn) error {
	var failed error
	err := c.Control(func(fd uintptr) {
		failed = errors.Join(
			syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF, sendBuffer),
			syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(writeTimeout.Milliseconds())))
	})
	return errors.Join(err, failed)
}

// CheckAddress checks the address of a TCP listener, as Options.Address is one. The port may be a name of /etc/services.
func CheckAddress(address string) error {
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = net.DefaultResolver.LookupPort(context.Background(), "tcp", port)
	}
	return err
}
