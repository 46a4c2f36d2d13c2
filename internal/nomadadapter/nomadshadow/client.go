package nomadshadow

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"
)

// DefaultAddress is that of the HTTP API of a Nomad agent with the default configuration.
const DefaultAddress = "http://127.0.0.1:4646"

// Client reads the HTTP API of a Nomad agent.
type Client struct {
	address, token string
	http           *http.Client
}

// NewClient returns a client of an address, http://, https:// or unix://, with an ACL token or "". The certificates are those of the
// variables that Nomad's command reads: NOMAD_CACERT, NOMAD_CLIENT_CERT, NOMAD_CLIENT_KEY, NOMAD_TLS_SERVER_NAME, NOMAD_SKIP_VERIFY.
func NewClient(address, token string, getenv func(string) string) (*Client, error) {
	transport := &http.Transport{DisableKeepAlives: true}
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}
		address = "http://localhost"
	}
	if !strings.HasPrefix(address, "http://") && !strings.HasPrefix(address, "https://") {
		return nil, fmt.Errorf("address %q: want http://HOST:PORT, https://HOST:PORT or unix:///PATH", address)
	}
	if strings.HasPrefix(address, "https://") {
		c, err := tlsConfig(getenv)
		if err != nil {
			return nil, err
		}
		transport.TLSClientConfig = c
	}
	return &Client{strings.TrimSuffix(address, "/"), token, &http.Client{Transport: transport, Timeout: 10 * time.Second}}, nil
}

func tlsConfig(getenv func(string) string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: getenv("NOMAD_TLS_SERVER_NAME")}
	c.InsecureSkipVerify = getenv("NOMAD_SKIP_VERIFY") == "true" || getenv("NOMAD_SKIP_VERIFY") == "1"
	if path := getenv("NOMAD_CACERT"); path != "" {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("NOMAD_CACERT: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("NOMAD_CACERT: %s has no certificate", path)
		}
	}
	if path := getenv("NOMAD_CLIENT_CERT"); path != "" {
		pair, err := tls.LoadX509KeyPair(path, getenv("NOMAD_CLIENT_KEY"))
		if err != nil {
			return nil, fmt.Errorf("NOMAD_CLIENT_CERT and NOMAD_CLIENT_KEY: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// maxAnswer limits the size of an answer in bytes.
const maxAnswer = 16 << 20

// get reads one path of the API as JSON.
func (c *Client) get(ctx context.Context, path string, into any) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, c.address+path, http.NoBody)
	if err != nil {
		return err
	}
	if c.token != "" {
		r.Header.Set("X-Nomad-Token", c.token)
	}
	answer, err := c.http.Do(r)
	if err != nil {
		return fmt.Errorf("Nomad's API: %w", err)
	}
	defer func() { _ = answer.Body.Close() }()
	body := io.LimitReader(answer.Body, maxAnswer)
	switch answer.StatusCode {
	case http.StatusOK:
		if err := json.NewDecoder(body).Decode(into); err != nil {
			return fmt.Errorf("Nomad's API: %s: %w", path, err)
		}
		return nil
	case http.StatusForbidden:
		return fmt.Errorf("Nomad's API: %s: permission denied: give a token that allows agent:read and node:read (--token-file or NOMAD_TOKEN)", path)
	}
	text, _ := io.ReadAll(io.LimitReader(body, 200))
	return fmt.Errorf("Nomad's API: %s: %s: %s", path, answer.Status, strings.TrimSpace(string(text)))
}

// node is what is read of /v1/node/:id.
type node struct {
	Name          string
	NodeResources struct{ Devices []group }
}

// group is a device group of a node.
type group struct {
	Vendor, Type, Name string
	Instances          []instance
	Attributes         map[string]attribute
}

type instance struct {
	ID, HealthDescription string
	Healthy               bool
	Locality              *struct{ PciBusID string }
}

// attribute is a value of the API, which is of one type.
type attribute struct {
	Float  *float64
	Int    *int64
	String *string
	Bool   *bool
	Unit   string
}

// errNoClient means that the agent is a server only.
var errNoClient = errors.New("the Nomad agent is no client: give the address of the one on this node")

// node returns the node of the agent.
func (c *Client) node(ctx context.Context) (node, error) {
	var self struct{ Stats map[string]map[string]string }
	if err := c.get(ctx, "/v1/agent/self", &self); err != nil {
		return node{}, err
	}
	id := self.Stats["client"]["node_id"]
	if id == "" {
		return node{}, errNoClient
	}
	var n node
	return n, c.get(ctx, "/v1/node/"+id, &n)
}
