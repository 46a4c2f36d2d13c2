package agentapi

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// hasGPU1 is what is known of a node with GPU-1.
func hasGPU1() map[gpu.DeviceID]gpu.Placement {
	return map[gpu.DeviceID]gpu.Placement{"GPU-1": gpu.WholeGPU("GPU-1")}
}

// nodeWith is an agent whose node has a device by the servers' record. What stands in fails is answered in place of it.
type nodeWith struct {
	*agent
	device atomic.Value // string
}

func (n *nodeWith) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/v1/node/f7476465-4d6e-c0de-26d0-e383c49be941" {
		fmt.Fprintf(w, `{"Name":"one","NodeResources":{"Devices":[{"Vendor":"nvidia","Type":"gpu","Instances":[{"ID":%q}]}]}}`, n.device.Load())
		return
	}
	n.agent.ServeHTTP(w, r)
}

// asks makes one query after a few that failed, and reads the record. What is logged is in the buffer.
func asks(t *testing.T, c *Client, f *follower) (holders.Record, error) {
	t.Helper()
	latest, err := f.next(t.Context())
	if err != nil {
		f.node, f.index = "", 0
	}
	c.record(latest, err, startFailures+1)
	return c.Read(t.Context(), nil)
}

func newGuess(address string) (c *Client, f *follower, log *bytes.Buffer) {
	log = &bytes.Buffer{}
	c = New(Options{Address: address, Devices: hasGPU1, Log: slog.New(slog.NewTextHandler(log, nil))})
	return c, &follower{Client: c}, log
}

// An agent at an address that is not configured counts when its node has a device of this host, and not before: it may be another node's. That is
// no failure, and from then on a failure is one.
func TestGuessedAddress(t *testing.T) {
	n := &nodeWith{agent: newAgent()}
	n.device.Store("GPU-7")
	n.set(alloc("a1", "train", "running", gpus))
	server := httptest.NewServer(n)
	defer server.Close()
	c, f, log := newGuess(server.URL)
	if r, err := c.Read(t.Context(), nil); err != nil || !r.Never || r.Remedy != "" {
		t.Errorf("at the start: %v, %+v", err, r)
	}
	for range 2 {
		r, err := asks(t, c, f)
		if err != nil || !r.Never || r.Complete || len(r.Holders) > 0 || r.Remedy != setAddress || !strings.Contains(r.Missing, "is not this node's: its node one has none of these GPUs") {
			t.Errorf("another node: %v, %+v", err, r)
		}
	}
	if is, err := c.present(t.Context()); err == nil || len(is.record.Holders) > 0 {
		t.Errorf("a confirmation of another node: %v, %+v", err, is)
	}
	n.device.Store("GPU-1::2") // a share
	if r, err := asks(t, c, f); err != nil || !r.Complete || r.Never || len(r.Holders) != 2 {
		t.Errorf("this node: %v, %+v", err, r)
	}
	n.device.Store("") // the node was found to be this one
	n.setFail(true)
	if r, err := asks(t, c, f); err == nil || r.Never {
		t.Errorf("failing after that: %v, %+v", err, r)
	}
	n.setFail(false)
	if r, err := asks(t, c, f); err != nil || len(r.Holders) != 2 {
		t.Errorf("in the end: %v, %+v", err, r)
	}
	if text := log.String(); strings.Count(text, "API not used") != 1 || strings.Count(text, "level=WARN") != 1 || strings.Count(text, "API available") != 2 {
		t.Errorf("log:\n%s", text)
	}
}

// Each reason why no agent counts names what to set, and is logged once, not as a warning.
func TestWhyAGuessIsNotUsed(t *testing.T) {
	status := func(code int, text string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, text, code) })
	}
	closed := httptest.NewServer(newAgent())
	closed.Close()
	plain, secret, server := httptest.NewServer(status(http.StatusBadRequest, "Client sent an HTTP request to an HTTPS server.")),
		httptest.NewServer(status(http.StatusForbidden, "Permission denied")),
		httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"stats":{}}`) }))
	secure := httptest.NewTLSServer(newAgent())
	for _, s := range []*httptest.Server{plain, secret, server, secure} {
		defer s.Close()
	}
	for name, tc := range map[string]struct{ address, missing, remedy string }{
		"nothing answers":           {closed.URL, "no Nomad agent answers at " + closed.URL + ": connect: connection refused", "set nomad_address"},
		"no address":                {"localhost", "no Nomad agent answers at localhost: unsupported protocol scheme", "set nomad_address"},
		"https":                     {plain.URL, "takes https only", `set nomad_address = "https` + strings.TrimPrefix(plain.URL, "http") + `"`},
		"ACLs":                      {secret.URL, "403 Forbidden (Permission denied): the ACL token must allow agent:read", "set nomad_token_file"},
		"an agent that is a server": {server.URL, "is no client", "set nomad_address"},
		"an unknown CA":             {secure.URL, "certificate", "set NOMAD_CACERT for the Nomad agent"},
	} {
		t.Run(name, func(t *testing.T) {
			c, f, log := newGuess(tc.address)
			r, err := asks(t, c, f)
			if err != nil || !r.Never || !strings.Contains(r.Missing, tc.missing) || r.Remedy != tc.remedy {
				t.Errorf("%v\n%q\n%q", err, r.Missing, r.Remedy)
			}
			_, _ = asks(t, c, f)
			if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "level=INFO") {
				t.Errorf("log:\n%s", text)
			}
		})
	}
}

// A node without a GPU has nothing to ask for, and nothing to set, for however long its driver takes.
func TestGuessOfANodeWithoutDevices(t *testing.T) {
	n := &nodeWith{agent: newAgent()}
	n.device.Store("GPU-1")
	n.set(alloc("a1", "train", "running", gpus))
	server := httptest.NewServer(n)
	defer server.Close()
	c, f, log := newGuess(server.URL)
	c.guess.devices = func() map[gpu.DeviceID]gpu.Placement { return nil }
	for range guessFailures + 1 {
		_, err := f.next(t.Context())
		if pause := f.pause(err); pause != devicesPause {
			t.Fatalf("the next look is after %v, error %v", pause, err)
		}
		c.record(answer{}, err, f.failures)
	}
	if r, err := c.Read(t.Context(), nil); err != nil || !r.Never || r.Remedy != "" || log.Len() > 0 {
		t.Errorf("%v, %+v, log:\n%s", err, r, log)
	}
	c.guess.devices = hasGPU1
	if r, err := asks(t, c, f); err != nil || !r.Complete || len(r.Holders) != 2 {
		t.Errorf("with its GPU: %v, %+v", err, r)
	}
}

// What is configured and can't be read is an error also with a guess.
func TestGuessWithAFileThatIsMissing(t *testing.T) {
	c, f, _ := newGuess("http://127.0.0.1:1")
	c.token = tokenIn("/nowhere/token", "")
	if r, err := asks(t, c, f); err == nil || r.Never || !strings.Contains(err.Error(), "/nowhere/token") {
		t.Errorf("%v, %+v", err, r)
	}
	c = New(Options{Address: "https://127.0.0.1:1", Devices: hasGPU1, LookupEnv: func(name string) (string, bool) { return "/nowhere/ca", name == "NOMAD_CACERT" }})
	if r, err := c.Read(t.Context(), nil); err == nil || fmt.Sprint(r) != fmt.Sprint(holders.Record{}) {
		t.Errorf("%v, %+v", err, r)
	}
}
