package agentapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

// idleTimeout is longer than a pause between two queries.
const idleTimeout = 30 * time.Second

// newHTTP follows no redirection: the agent's API has none, and the token must not get to another server.
func newHTTP(t *http.Transport) *http.Client {
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func unixTransport(path string) *http.Transport {
	return &http.Transport{
		MaxIdleConns: 1, IdleConnTimeout: idleTimeout,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
	}
}

// newTransport verifies an agent by the system's CAs and that of NOMAD_CACERT, and has the certificate of NOMAD_CLIENT_CERT and
// NOMAD_CLIENT_KEY, which an agent with verify_https_client requires. It uses no proxy: the agent is on this node.
func newTransport(lookup func(string) (string, bool)) (*http.Transport, error) {
	t := &http.Transport{
		MaxIdleConns: 1, IdleConnTimeout: idleTimeout, TLSHandshakeTimeout: answerTime,
		DialContext: (&net.Dialer{Timeout: answerTime}).DialContext, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12},
	}
	if lookup == nil {
		return t, nil
	}
	if path, ok := lookup("NOMAD_CACERT"); ok && path != "" {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("NOMAD_CACERT: %w", err)
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("NOMAD_CACERT: %s has no certificate", path)
		}
		t.TLSClientConfig.RootCAs = pool
	}
	cert, _ := lookup("NOMAD_CLIENT_CERT")
	key, _ := lookup("NOMAD_CLIENT_KEY")
	if cert != "" && key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("NOMAD_CLIENT_CERT, NOMAD_CLIENT_KEY: %w", err)
		}
		t.TLSClientConfig.Certificates = []tls.Certificate{pair}
	}
	return t, nil
}
