package nomad

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/hashicorp/nomad/api"
)

const connectLimit = 10 * time.Second

// newClient returns a client that follows no redirection, so that the token gets to no other server, and has no time limit of its own: each call has a
// context.
func newClient(o Options) (*api.Client, error) {
	at, err := url.Parse(o.Address)
	if err != nil || o.Address == "" || at.Scheme != "http" && at.Scheme != "https" && at.Scheme != "unix" {
		return nil, fmt.Errorf("address %q is not http://HOST:PORT, https://HOST:PORT or unix:///PATH", o.Address)
	}
	security, err := newTLS(o)
	if err != nil {
		return nil, err
	}
	dial := (&net.Dialer{Timeout: connectLimit, KeepAlive: 30 * time.Second}).DialContext
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: security, TLSHandshakeTimeout: connectLimit, MaxIdleConnsPerHost: readers, IdleConnTimeout: time.Minute, DialContext: dial,
	}
	if at.Scheme == "unix" {
		transport.Proxy = nil
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx, "unix", at.Path) }
	}
	client := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return api.NewClient(&api.Config{Address: o.Address, Region: o.Region, HttpClient: client})
}

// newTLS reads the certificate of the client for each connection, because it is renewed.
func newTLS(o Options) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if o.CAFile != "" {
		text, err := os.ReadFile(o.CAFile)
		if err != nil {
			return nil, fmt.Errorf("ca_file: %w", err)
		}
		if c.RootCAs = x509.NewCertPool(); !c.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("ca_file: %s has no certificate", o.CAFile)
		}
	}
	if (o.CertFile == "") != (o.KeyFile == "") {
		return nil, errors.New("cert_file and key_file: one is missing")
	}
	if o.CertFile == "" {
		return c, nil
	}
	read := func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(o.CertFile, o.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("cert_file, key_file: %w", err)
		}
		return &pair, nil
	}
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return read() }
	_, err := read()
	return c, err
}

// token reads the token: whoever renews it writes the file again.
func (c *Cluster) token() (string, error) {
	if c.o.TokenFile == "" {
		return "", nil
	}
	text, err := os.ReadFile(c.o.TokenFile)
	if err != nil {
		return "", fmt.Errorf("token_file: %w", err)
	}
	token := strings.TrimSpace(string(text))
	if token == "" {
		return "", fmt.Errorf("token_file: %s is empty", c.o.TokenFile)
	}
	return token, nil
}

// query returns the options of a read with these parameters.
func (c *Cluster) query(ctx context.Context, params ...string) (*api.QueryOptions, error) {
	token, err := c.token()
	if err != nil {
		return nil, err
	}
	q := &api.QueryOptions{AuthToken: token, Params: map[string]string{}}
	for i := 0; i < len(params); i += 2 {
		q.Params[params[i]] = params[i+1]
	}
	return q.WithContext(ctx), nil
}

// in returns the options of a read in a namespace.
func (c *Cluster) in(ctx context.Context, namespace string) (*api.QueryOptions, error) {
	q, err := c.query(ctx)
	if err == nil {
		q.Namespace = namespace
	}
	return q, err
}

func (c *Cluster) write(ctx context.Context, namespace string) (*api.WriteOptions, error) {
	token, err := c.token()
	if err != nil {
		return nil, err
	}
	return (&api.WriteOptions{AuthToken: token, Namespace: namespace}).WithContext(ctx), nil
}

// statusOf returns the answer of a server that was not OK; 0 = there was none.
func statusOf(err error) (status int, body string) {
	var answer api.UnexpectedResponseError
	if errors.As(err, &answer) {
		return answer.StatusCode(), answer.Body()
	}
	return 0, ""
}

// isDenied reports whether a right is missing. The servers answer 500 "Unknown allocation" for an allocation that the token may not read.
func isDenied(err error) bool {
	status, body := statusOf(err)
	return status == http.StatusForbidden || status == http.StatusInternalServerError && (strings.Contains(body, "Unknown allocation") || strings.Contains(body, api.PermissionDeniedErrorContent))
}

// RightsError is a right that the token lacks.
type RightsError struct {
	What string // what can't be done or seen
	Err  error
}

func (e *RightsError) Error() string {
	if e.Err == nil {
		return e.What
	}
	return e.What + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *RightsError) Unwrap() error { return e.Err }

// remedyOf is what to do about an error.
func remedyOf(err error) string {
	var rights *RightsError
	if errors.As(err, &rights) || isDenied(err) {
		return "see that the token is valid and has not expired; its policies need node:read, and in all namespaces read-job, and alloc-lifecycle for mode act"
	}
	return ""
}
