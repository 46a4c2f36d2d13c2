package kubeapi_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// proxy is an HTTP proxy as HTTPS_PROXY names it. It connects each tunnel to the same server, and counts them.
type proxy struct {
	net.Listener
	server  atomic.Value // string: host:port; "" = it refuses
	tunnels atomic.Int32
}

var testProxy = &proxy{}

// The environment is read once in a process, so the proxy is there for all tests. Requests to localhost never take it.
func TestMain(m *testing.M) {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	testProxy.Listener = l
	testProxy.server.Store("")
	go testProxy.serve()
	for name, value := range map[string]string{"HTTPS_PROXY": "http://" + l.Addr().String(), "NO_PROXY": "192.0.2.2"} {
		if err := os.Setenv(name, value); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	_ = l.Close()
	os.Exit(code)
}

func (p *proxy) serve() {
	for {
		conn, err := p.Accept()
		if err != nil {
			return
		}
		go p.tunnel(conn)
	}
}

func (p *proxy) tunnel(conn net.Conn) {
	defer conn.Close() //nolint:errcheck // the test ends
	request, err := http.ReadRequest(bufio.NewReader(conn))
	if err != nil || request.Method != http.MethodConnect {
		return
	}
	p.tunnels.Add(1)
	server, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", p.server.Load().(string))
	if err != nil {
		_, _ = io.WriteString(conn, "HTTP/1.1 502 Bad Gateway\r\n\r\n")
		return
	}
	defer server.Close() //nolint:errcheck // the test ends
	_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
	go func() { _, _ = io.Copy(server, conn); _ = server.Close() }()
	_, _ = io.Copy(conn, server)
}

// An API server that is reached through a proxy only: HTTPS_PROXY and NO_PROXY apply as to kubectl. A proxy that does not reach the server
// is no connection.
func TestProxyOfTheEnvironment(t *testing.T) {
	s := kubeapitest.StartTLS(t)
	s.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: "n1"}})
	testProxy.server.Store(strings.TrimPrefix(s.URL, "https://"))
	before := testProxy.tunnels.Load()
	defer testProxy.server.Store("")
	c := client(t, kubeapi.Options{Address: "https://192.0.2.1:6443", TokenFile: s.TokenFile, CAFile: s.CAFile})
	if _, err := c.Node(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	s.RotateCA(true)
	if _, err := c.Node(t.Context(), "n1"); err != nil {
		t.Errorf("with another CA: %v", err)
	}
	if n := testProxy.tunnels.Load() - before; n != 2 {
		t.Errorf("%d tunnels", n)
	}
	testProxy.server.Store("")
	c.CloseIdleConnections()
	s.SetDown(true)
	if _, err := c.Node(t.Context(), "n1"); !errors.Is(err, kubeapi.ErrUnreached) {
		t.Errorf("without the server: %v", err)
	}
	before = testProxy.tunnels.Load()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	direct := client(t, kubeapi.Options{Address: "https://192.0.2.2:6443", TokenFile: s.TokenFile, CAFile: s.CAFile})
	if _, err := direct.Node(ctx, "n1"); !errors.Is(err, kubeapi.ErrUnreached) || testProxy.tunnels.Load() != before {
		t.Errorf("an address in NO_PROXY: %v, %d tunnels, before %d", err, testProxy.tunnels.Load(), before)
	}
}

// A connection that breaks has another port of the client each time. The error has the same text, so that a log has it once.
func TestErrorOfABrokenConnectionHasNoPort(t *testing.T) {
	texts := map[string]bool{}
	for range 3 {
		broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			if err := conn.(*net.TCPConn).SetLinger(0); err != nil { // RST
				t.Error(err)
			}
			_ = conn.Close()
		}))
		_, err := client(t, kubeapi.Options{Address: broken.URL}).Node(t.Context(), "n1")
		if err == nil || !strings.Contains(err.Error(), "read tcp 127.0.0.1") {
			t.Fatal(err)
		}
		texts[strings.ReplaceAll(err.Error(), strings.TrimPrefix(broken.URL, "http://"), "SERVER")] = true
		broken.Close()
	}
	if len(texts) != 1 {
		t.Errorf("%v", texts)
	}
	lookup := &kubeapi.RequestError{Verb: "get", Object: "nodes n1", Server: "https://api.example", Err: &net.DNSError{
		Err: "read udp [fd00::5]:41234->[fd00::a]:53: i/o timeout", Name: "api.example", Server: "[fd00::a]:53"}}
	if want := "get nodes n1 at https://api.example: lookup api.example on [fd00::a]:53: read udp [fd00::a]:53: i/o timeout"; lookup.Error() != want {
		t.Errorf("%s\nwant %s", lookup, want)
	}
}

// A list that is longer than any that is expected is refused before it takes the memory of the container.
func TestLongListIsRefused(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"items":[`)
		for range 9 << 10 {
			_, _ = io.WriteString(w, `{"metadata":{"name":"`+strings.Repeat("x", 1<<10)+`"}},`)
		}
		_, _ = io.WriteString(w, `{}]}`)
	}))
	defer s.Close()
	if _, err := client(t, kubeapi.Options{Address: s.URL}).Slices(t.Context(), kubeapi.SliceSelector{}); err == nil || !strings.Contains(err.Error(), "too long: more than 8388608 bytes") {
		t.Error(err)
	}
}
