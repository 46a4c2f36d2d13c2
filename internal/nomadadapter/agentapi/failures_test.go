package agentapi

import (
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// Each kind of error is logged once until the API works again. The first ones after the start are not: the API does not listen yet.
func TestLogs(t *testing.T) {
	var log strings.Builder
	c := New(Options{Address: "http://127.0.0.1:1", Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.MessageKey || a.Key == "error" {
				return a
			}
			return slog.Attr{}
		},
	}))})
	refused := func(port int) error {
		return &net.OpError{Op: "read", Net: "tcp", Source: &net.TCPAddr{Port: port}, Err: syscall.ECONNRESET}
	}
	forbidden := &statusError{http.StatusForbidden, "403 Forbidden"}
	_, noToken := tokenIn("/nowhere/token", "")()
	for i, err := range []error{
		refused(1), refused(2), refused(3), nil, // Nomad starts
		refused(4), refused(5), forbidden, refused(6), forbidden, noToken, noToken, nil, nil,
		forbidden, nil,
	} {
		c.record(answer{record: holders.Record{Work: map[string]holders.Work{}}}, err, i%4+1)
	}
	const unavailable, available = `msg="owners of devices: Nomad agent's API unavailable" error=`, `msg="owners of devices: Nomad agent's API available"` + "\n"
	want := available +
		unavailable + `"read tcp :4: connection reset by peer"` + "\n" + unavailable + `"403 Forbidden"` + "\n" +
		unavailable + `"ACL token: open /nowhere/token: no such file or directory"` + "\n" + available +
		unavailable + `"403 Forbidden"` + "\n" + available
	if diff := cmp.Diff(want, log.String()); diff != "" {
		t.Error(diff)
	}
	never := New(Options{Address: "http://127.0.0.1:1", Log: slog.New(slog.NewTextHandler(&log, nil))})
	log.Reset()
	for failures := range startFailures + 3 {
		never.record(answer{}, forbidden, failures+1)
	}
	if n := strings.Count(log.String(), "403 Forbidden"); n != 1 {
		t.Errorf("never an answer: %d lines:\n%s", n, log.String())
	}
}

// The token is for the agent that nomad_address names, and for no server that an answer names.
func TestRedirection(t *testing.T) {
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { t.Error(r.URL, r.Header) }))
	defer other.Close()
	server := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer server.Close()
	_, err := New(Options{Address: server.URL, Token: "secret"}).Node(t.Context())
	if err == nil || !strings.Contains(err.Error(), "307") {
		t.Error(err)
	}
}
