package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// What a client can take of the agent, whose memory is bounded by the DaemonSet. Whoever reaches the port may connect.
const (
	connectionsAtMost = 512                    // 60 kB each, with the kernel's buffers
	connectionAtLeast = 200 * time.Millisecond // before it may be closed for another
	readAtMost        = 3 * time.Second        // for a request, from the accepted connection to its last byte
	writeAtMost       = 5 * time.Second        // for an answer, from the end of the request's header to its last byte
	headerAtMost      = 8 << 10                // bytes
	sendBuffer        = 16 << 10               // bytes that the kernel holds for a client that does not read; it doubles them
)

// The pace at which an address that can't be had is tried for.
const (
	portRetryFirst = time.Second
	portRetryMax   = 10 * time.Second
)

// port is the agent's HTTP server. The agent works without: a port that is taken is tried for again.
type port struct {
	address string // "" = none

	mu      sync.Mutex
	problem string // why nothing is served; "" = it is, or not yet tried
}

// serve answers until ctx ends.
func (p *port) serve(ctx context.Context, handler http.Handler, log *slog.Logger) {
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = portRetryFirst, portRetryMax
	for p.address != "" {
		err := p.serveOnce(ctx, handler, log)
		if ctx.Err() != nil {
			return
		}
		if text := err.Error(); p.note(text) {
			log.Warn("no HTTP: health, readiness and metrics can't be asked for, trying again", "error", text)
		}
		select {
		case <-time.After(retry.NextBackOff()):
		case <-ctx.Done():
			return
		}
	}
}

func (p *port) serveOnce(ctx context.Context, handler http.Handler, log *slog.Logger) error {
	config := net.ListenConfig{Control: boundBuffers}
	tcp, err := config.Listen(ctx, "tcp", p.address)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler: handler, ReadTimeout: readAtMost, WriteTimeout: writeAtMost, MaxHeaderBytes: headerAtMost,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	server.SetKeepAlivesEnabled(false) // a probe or a scrape every few seconds needs no connection in between
	p.note("")
	log.Info("listening", "http", tcp.Addr().String())
	served := make(chan error, 1)
	go func() { served <- server.Serve(newCrowd(tcp, connectionsAtMost, connectionAtLeast)) }()
	select {
	case err := <-served:
		return errors.Join(err, server.Close())
	case <-ctx.Done():
		_ = server.Close() // probes and scrapes can be cut off
		return <-served
	}
}

// note takes a problem down and reports whether it is another one than before.
func (p *port) note(problem string) (changed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	changed, p.problem = p.problem != problem, problem
	return changed
}

// notes say in a line why nothing is served.
func (p *port) notes() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.problem == "" {
		return nil
	}
	return []string{"no HTTP at " + p.address + ": " + strings.ReplaceAll(p.problem, "\n", "; ")}
}

// tcpUserTimeout is TCP_USER_TIMEOUT of tcp(7), which package syscall lacks.
const tcpUserTimeout = 0x12

// boundBuffers bounds what the kernel keeps for a client that does not read, in size and, also after the connection
// was closed, in time. Accepted connections inherit it from the socket that listens.
func boundBuffers(_, _ string, c syscall.RawConn) error {
	var failed error
	err := c.Control(func(fd uintptr) {
		failed = errors.Join(
			syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF, sendBuffer),
			syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(writeAtMost.Milliseconds())))
	})
	return errors.Join(err, failed)
}
