package kubeapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"
)

const (
	tlsTimeout   = 10 * time.Second // of a handshake
	maxTokenFile = 64 << 10         // bytes
	maxCAFile    = 4 << 20          // bytes
)

// credentials are the token and the CA certificates. They are read at each use: the kubelet replaces the token at 80 % of its life, and
// the CA certificates when the cluster's CA is renewed.
type credentials struct {
	tokenFile, caFile string // "" = none
	serverName        string
	dial              func(ctx context.Context, network, address string) (net.Conn, error)
}

func (c *credentials) token() (string, error) {
	if c.tokenFile == "" {
		return "", nil
	}
	content, err := readFile(c.tokenFile, maxTokenFile)
	if err != nil {
		return "", fmt.Errorf("token: %w (a pod has it with automountServiceAccountToken; elsewhere set its file)", err)
	}
	token := strings.TrimSpace(string(content))
	if token == "" || strings.ContainsAny(token, "\r\n") {
		return "", fmt.Errorf("token: %s: expected one line", c.tokenFile)
	}
	return token, nil
}

// dialTLS opens a connection with the CA certificates as they are now.
func (c *credentials) dialTLS(ctx context.Context, network, address string) (net.Conn, error) {
	content, err := readFile(c.caFile, maxCAFile)
	if err != nil {
		return nil, fmt.Errorf("CA certificates: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(content) {
		return nil, fmt.Errorf("CA certificates: %s: no certificate in PEM format", c.caFile)
	}
	conn, err := c.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	secured := tls.Client(conn, &tls.Config{RootCAs: roots, ServerName: c.serverName, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}})
	ctx, cancel := context.WithTimeoutCause(ctx, tlsTimeout, fmt.Errorf("no TLS handshake within %s", tlsTimeout))
	defer cancel()
	if err := secured.HandshakeContext(ctx); err != nil {
		_ = conn.Close()                                                  // the handshake's error counts
		if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) { // a load balancer without a server
			err = &connectError{err}
		}
		return nil, fmt.Errorf("TLS handshake with the CA certificates of %s: %w", c.caFile, err)
	}
	return secured, nil
}

func readFile(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	return io.ReadAll(io.LimitReader(f, limit))
}
