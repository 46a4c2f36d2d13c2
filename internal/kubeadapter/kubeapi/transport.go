package kubeapi

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync"
	"syscall"
	"time"
)

const tlsTimeout = 10 * time.Second // of a handshake

// transport sends requests over HTTP/1.1: a connection for each request in progress, so that one that hangs delays no other; four stay
// open. Connections trust the CA certificates as they are in the file then: they are replaced when the cluster's CA is renewed.
type transport struct {
	caFile string // "" = no TLS
	dial   func(ctx context.Context, network, address string) (net.Conn, error)
	proxy  func(*http.Request) (*url.URL, error) // nil = none

	mu      sync.Mutex
	ca      []byte          // that current trusts
	current *http.Transport // nil = none so far
}

// RoundTrip sends a request. Without a connection the error wraps a *connectError.
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	through, err := t.latest()
	if err != nil {
		return nil, err
	}
	a := &attempt{}
	answer, err := through.RoundTrip(r.WithContext(httptrace.WithClientTrace(r.Context(), a.trace())))
	if err != nil {
		return nil, a.explain(err, t.caFile)
	}
	return answer, nil
}

// latest returns what trusts the CA certificates in the file. While the file can't be used, those before stay.
func (t *transport) latest() (*http.Transport, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ca, trust, err := t.trust()
	switch {
	case t.current != nil && (err != nil || bytes.Equal(ca, t.ca)):
		return t.current, nil
	case err != nil:
		return nil, err
	case t.current != nil:
		t.current.CloseIdleConnections() // a watch goes on until its end
	}
	t.ca, t.current = ca, &http.Transport{
		DialContext: t.dial, Proxy: t.proxy, TLSClientConfig: trust, TLSHandshakeTimeout: tlsTimeout,
		ResponseHeaderTimeout: headerTimeout, MaxIdleConnsPerHost: 4, IdleConnTimeout: 90 * time.Second, MaxResponseHeaderBytes: 64 << 10,
	}
	return t.current, nil
}

// trust reads the CA certificates.
func (t *transport) trust() (content []byte, c *tls.Config, err error) {
	if t.caFile == "" {
		return nil, nil, nil
	}
	content, err = readFile(t.caFile, maxCAFile)
	if err != nil {
		return nil, nil, fmt.Errorf("CA certificates: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(content) {
		return nil, nil, fmt.Errorf("CA certificates: %s: no certificate in PEM format", t.caFile)
	}
	return content, &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}, nil
}

// CloseIdleConnections closes the connections that no request uses. The next one reads the CA certificates.
func (t *transport) CloseIdleConnections() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.current != nil {
		t.current.CloseIdleConnections()
		t.current = nil
	}
}

// attempt is how far a request has come. Goroutines of http.Transport open its connection.
type attempt struct {
	mu        sync.Mutex
	connected bool
	handshake error // why TLS failed
}

// trace follows the latest connection: after one that was idle and is gone there is another.
func (a *attempt) trace() *httptrace.ClientTrace {
	set := func(change func()) {
		a.mu.Lock()
		defer a.mu.Unlock()
		change()
	}
	return &httptrace.ClientTrace{
		GetConn:          func(string) { set(func() { a.connected, a.handshake = false, nil }) },
		GotConn:          func(httptrace.GotConnInfo) { set(func() { a.connected = true }) },
		TLSHandshakeDone: func(_ tls.ConnectionState, err error) { set(func() { a.handshake = err }) },
	}
}

// explain returns the error of the request: without a connection a *connectError, unless the server was there and TLS failed.
func (a *attempt) explain(err error, caFile string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.connected {
		return err
	}
	cut := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) // by a load balancer without a server
	if a.handshake != nil {
		err = fmt.Errorf("TLS handshake with the CA certificates of %s: %w", caFile, err)
		if !cut {
			return err
		}
	}
	return &connectError{err}
}
