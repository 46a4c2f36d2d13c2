package kubeapi

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"
)

const (
	requestTimeout = 15 * time.Second // of all but watches
	headerTimeout  = 30 * time.Second // until a watch is answered
	maxAnswer      = 8 << 20          // bytes of an object or a list: etcd stores 1.5 MiB of an object, 1,600 shares of a node are 1.2 MB, with 16 taints each 5 MB; a container may have 96 MiB
	maxStatus      = 64 << 10         // bytes of an answer with an error
)

// Options configure a Client.
type Options struct {
	Address   string       // https://host:port; "" = KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT. http is for tests
	TokenFile string       // "" = that of the pod's service account, with http none
	CAFile    string       // PEM; "" = that of the pod's service account
	Agent     string       // User-Agent
	Log       *slog.Logger // nil = no log

	// Dial opens connections; nil = TCP, through the proxy that HTTPS_PROXY and NO_PROXY name, as in other clients of Kubernetes.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// The files of a pod's service account (docs: concepts/security/service-accounts).
const (
	serviceAccountToken = "/var/run/secrets/kubernetes.io/serviceaccount/token"
	serviceAccountCA    = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
)

// AddressError is an address of an API server that can't be used.
type AddressError struct{ Address, Reason string }

// Error has the address, the reason and the remedy.
func (e *AddressError) Error() string {
	if e.Address == "" {
		return "address of the API server: " + e.Reason
	}
	return fmt.Sprintf("address of the API server %q: %s", e.Address, e.Reason)
}

// Client calls an API server. Make one with New; it is safe for concurrent use.
type Client struct {
	server            string // https://host:port
	agent             string
	tokenFile, caFile string // "" = none
	http              *http.Client
	log               *slog.Logger
}

// New returns a client. It fails with an *AddressError only: files are read and connections opened by the requests.
func New(o Options) (*Client, error) {
	server, err := serverAddress(o.Address)
	if err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	send := &transport{dial: o.Dial}
	if o.Dial == nil { // a peer that is gone is found within a minute
		keepAlive := net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 15 * time.Second, Count: 3}
		send.dial, send.proxy = (&net.Dialer{Timeout: 10 * time.Second, KeepAliveConfig: keepAlive}).DialContext, http.ProxyFromEnvironment
	}
	if server.Scheme == "https" {
		send.caFile, o.TokenFile = cmp.Or(o.CAFile, serviceAccountCA), cmp.Or(o.TokenFile, serviceAccountToken)
	}
	return &Client{
		server: server.String(), agent: o.Agent, tokenFile: o.TokenFile, caFile: send.caFile, log: o.Log,
		http: &http.Client{
			Transport: send, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

func serverAddress(address string) (*url.URL, error) {
	if address == "" {
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, &AddressError{"", "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, as they are in a pod; set the address"}
		}
		return &url.URL{Scheme: "https", Host: net.JoinHostPort(host, port)}, nil
	}
	u, err := url.Parse(address)
	switch {
	case err != nil:
		return nil, &AddressError{address, "not a URL; expected https://host:port"}
	case u.Scheme != "https" && u.Scheme != "http", u.Hostname() == "":
		return nil, &AddressError{address, "expected https://host:port"}
	case u.User != nil, u.RawQuery != "", u.Fragment != "", strings.Trim(u.Path, "/") != "":
		return nil, &AddressError{address, "has more than a host and a port; expected https://host:port"}
	}
	return &url.URL{Scheme: u.Scheme, Host: u.Host}, nil
}

// Server is the address of the API server: https://host:port.
func (c *Client) Server() string { return c.server }

// Credentials returns why the token or the CA certificates can't be read.
func (c *Client) Credentials() error {
	_, err := c.token()
	if c.caFile != "" {
		_, caErr := readFile(c.caFile, maxCAFile)
		err = errors.Join(err, caErr)
	}
	return err
}

// CloseIdleConnections closes the connections that no request uses.
func (c *Client) CloseIdleConnections() { c.http.CloseIdleConnections() }

// methods are those of HTTP by verb.
var methods = map[string]string{
	"get": http.MethodGet, "list": http.MethodGet, "watch": http.MethodGet, "create": http.MethodPost, "update": http.MethodPut, "patch": http.MethodPatch, "delete": http.MethodDelete,
}

// call is one request.
type call struct {
	verb        string // as in rules of RBAC: a key of methods
	object      object
	subresource string // "status"; "" = none
	query       url.Values
	body        any
	content     string // type of the body; "" = JSON of the object
	accept      string // what the answer is; "" = JSON of the object
}

// resource names the resource as rules of RBAC do: "nodes/status".
func (r call) resource() string { return strings.TrimSuffix(r.object.resource+"/"+r.subresource, "/") }

// about names what the call is about for messages: "nodes/status n1".
func (r call) about() string {
	o := r.object
	o.resource = r.resource()
	return o.String()
}

// object is what a request is about.
type object struct{ group, resource, namespace, name string }

// apiVersions are the versions of the API groups of which it is not v1.
var apiVersions = map[string]string{featureGroup: "v1alpha1"}

// version returns the group and the version of an object as it has them itself: "resource.k8s.io/v1".
func (o object) version() string {
	if o.group == "" {
		return "v1"
	}
	return o.group + "/" + cmp.Or(apiVersions[o.group], "v1")
}

// path returns the object's path; of the collection without a name.
func (o object) path() string {
	p := "/api/v1"
	if o.group != "" {
		p = "/apis/" + o.version()
	}
	if o.namespace != "" {
		p += "/namespaces/" + url.PathEscape(o.namespace)
	}
	p += "/" + o.resource
	if o.name != "" {
		p += "/" + url.PathEscape(o.name)
	}
	return p
}

// String returns the object for messages: `resourceclaims team-a/train`.
func (o object) String() string {
	switch {
	case o.name == "":
		return o.resource
	case o.namespace == "":
		return o.resource + " " + o.name
	}
	return o.resource + " " + o.namespace + "/" + o.name
}

// do sends a request and decodes its answer into out, which may be nil. An empty query parameter is left out.
func (c *Client) do(ctx context.Context, r call, out any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout, fmt.Errorf("no answer within %s", requestTimeout))
	defer cancel()
	answer, err := c.send(ctx, r)
	if err != nil {
		return err
	}
	defer answer.Body.Close() //nolint:errcheck // the answer is read
	content, err := readBounded(answer.Body, maxAnswer)
	if err != nil {
		return c.failed(ctx, r, err)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(content, out); err != nil {
		return c.failed(ctx, r, fmt.Errorf("the answer can't be decoded: %w", err))
	}
	return nil
}

// answerOf sends a request and returns the object of its answer.
func answerOf[T any](ctx context.Context, c *Client, r call) (T, error) {
	var out T
	err := c.do(ctx, r, &out)
	return out, err
}

// send returns an answer of status 2xx, whose body the caller closes. With 401 it sends once more: the file of the token may have been
// replaced between its reading and its use.
func (c *Client) send(ctx context.Context, r call) (*http.Response, error) {
	answer, err := c.sendOnce(ctx, r)
	if errors.Is(err, ErrUnauthorized) {
		c.log.Debug("token refused by the API server: it is read anew", "server", c.server)
		answer, err = c.sendOnce(ctx, r)
	}
	return answer, err
}

func (c *Client) sendOnce(ctx context.Context, r call) (*http.Response, error) {
	req, err := c.request(ctx, r)
	if err != nil {
		return nil, c.failed(ctx, r, err)
	}
	answer, err := c.http.Do(req)
	if err != nil {
		return nil, c.failed(ctx, r, err)
	}
	if answer.StatusCode >= 200 && answer.StatusCode < 300 {
		return answer, nil
	}
	defer answer.Body.Close()                                        //nolint:errcheck // the answer is read
	content, _ := io.ReadAll(io.LimitReader(answer.Body, maxStatus)) // as much of it as came
	return nil, newStatusError(c.server, r, answer, content)
}

func (c *Client) request(ctx context.Context, r call) (*http.Request, error) {
	var body io.Reader
	if r.body != nil {
		content, err := json.Marshal(r.body)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(content)
	}
	address := c.server + r.object.path()
	if r.subresource != "" {
		address += "/" + r.subresource
	}
	if len(r.query) > 0 {
		address += "?" + r.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, methods[r.verb], address, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", cmp.Or(r.accept, "application/json"))
	if c.agent != "" {
		req.Header.Set("User-Agent", c.agent)
	}
	if r.body != nil {
		req.Header.Set("Content-Type", cmp.Or(r.content, "application/json"))
	}
	token, err := c.token()
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	return req, nil
}

// failed is the error of a request without an answer.
func (c *Client) failed(ctx context.Context, r call, err error) error {
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, ctx.Err()) {
		err = cause // a deadline of this package
	}
	if outer := (*url.Error)(nil); errors.As(err, &outer) {
		err = outer.Err // without method and address, which the RequestError has
	}
	return &RequestError{Verb: r.verb, Object: r.about(), Server: c.server, Err: err}
}

// errTooLong is an answer or an event that is longer than any that is expected.
var errTooLong = errors.New("the answer is too long")

func readBounded(r io.Reader, limit int64) ([]byte, error) {
	content, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(content)) > limit {
		err = fmt.Errorf("%w: more than %d bytes", errTooLong, limit)
	}
	return content, err
}
