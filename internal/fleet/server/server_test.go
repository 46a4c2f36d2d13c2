package server

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/report"
	"github.com/tandem-gpu/tandem/internal/fleet/viewtest"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/check"
)

// site is a server with what it was told to do.
type site struct {
	*testing.T
	*Server
	told []string
	err  error // of what it is told
	log  bytes.Buffer
}

// newSite returns a server of the small view with the token "secret".
func newSite(t *testing.T) *site {
	t.Helper()
	token := filepath.Join(t.TempDir(), "token")
	check.NoError(t, os.WriteFile(token, []byte("secret\n"), 0o600))
	s := &site{T: t}
	s.Server = New(Options{
		TokenFile: token, View: watch.NewValue(viewtest.Small()), Version: "2.0.0", Log: slog.New(slog.NewTextHandler(&s.log, nil)),
		Stop: func(_ context.Context, by, text string) error {
			s.told = append(s.told, "stop "+by+": "+text)
			return s.err
		},
		Resume: func(_ context.Context, by string) error { s.told = append(s.told, "resume "+by); return s.err },
	})
	return s
}

// send sends a request with headers, as "Name: value".
func (s *site) send(method, path, body string, headers ...string) *httptest.ResponseRecorder {
	s.Helper()
	r := httptest.NewRequestWithContext(s.Context(), method, path, strings.NewReader(body))
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		r.Header.Set(name, value)
	}
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, r)
	return w
}

// /fleet.json is the document of the latest view, whole or brief; a client that has it gets nothing, and one that takes gzip a third of the bytes.
func TestDocument(t *testing.T) {
	s := newSite(t)
	w := s.send("GET", "/fleet.json", "")
	want, err := json.Marshal(report.Of(viewtest.Small()))
	check.NoError(t, err)
	tag := w.Header().Get("ETag")
	if w.Code != http.StatusOK || w.Body.String() != string(want) || w.Header().Get("Content-Type") != "application/json" || tag == "" {
		t.Errorf("%d %v %.200s", w.Code, w.Header(), w.Body)
	}
	if w := s.send("GET", "/fleet.json", "", `If-None-Match: "x", `+tag); w.Code != http.StatusNotModified || w.Body.Len() > 0 {
		t.Errorf("%d %.100s", w.Code, w.Body)
	}
	zipped := s.send("GET", "/fleet.json", "", "Accept-Encoding: gzip")
	z, err := gzip.NewReader(zipped.Body)
	check.NoError(t, err)
	if text, err := io.ReadAll(z); err != nil || string(text) != string(want) || zipped.Header().Get("Vary") != "Accept-Encoding" {
		t.Errorf("%v, %v", err, zipped.Header())
	}
	if w := s.send("GET", "/fleet.json?nodes=some", ""); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), `nodes = "some": want all or brief`) {
		t.Errorf("%d %s", w.Code, w.Body)
	}

	s.View.Store(viewtest.Large(10, viewtest.At))
	if w := s.send("GET", "/fleet.json", "", "If-None-Match: "+tag); w.Code != http.StatusOK || w.Header().Get("ETag") == tag {
		t.Errorf("the view before is served: %d", w.Code)
	}
	var d report.Document
	check.NoError(t, json.Unmarshal(s.send("GET", "/fleet.json?nodes=brief", "").Body.Bytes(), &d))
	if d.More != 10 || len(d.Nodes) > 0 {
		t.Errorf("%d nodes, %d more", len(d.Nodes), d.More)
	}
}

// A document is made once for a view, and not for each client.
func TestDocumentsAreShared(t *testing.T) {
	s := newSite(t)
	first, err := s.pages.get(whole)
	check.NoError(t, err)
	if again, _ := s.pages.get(whole); again != first {
		t.Error("it was made twice")
	}
	s.View.Store(viewtest.Small())
	if again, _ := s.pages.get(whole); again == first || again.tag != first.tag {
		t.Error("equal views have two tags, or the document of the view before is served")
	}
}

// The plan of each mode, and what is not one.
func TestPlan(t *testing.T) {
	s := newSite(t)
	for _, mode := range []string{"act", "report"} {
		var p report.Plan
		w := s.send("GET", "/plan.json?mode="+mode, "")
		check.NoError(t, json.Unmarshal(w.Body.Bytes(), &p))
		if p.Mode.String() != mode || p.Problem != "" || !p.At.Equal(viewtest.At) || len(p.Waits) == 0 {
			t.Errorf("%s: %s", mode, w.Body)
		}
	}
	for _, path := range []string{"/plan.json", "/plan.json?mode=off", "/plan.json?mode=x"} {
		if w := s.send("GET", path, ""); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "act or report") {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
}

// Ready is a process that has decided, or follows another; what needs a person is in the text.
func TestReady(t *testing.T) {
	follower, alone := viewtest.Small(), viewtest.Small()
	follower.Leads, follower.Leader = false, "gpu-fleet-1"
	alone.Leads, alone.Leader = false, ""
	for name, c := range map[string]struct {
		view fleet.View
		code int
		text string
	}{
		"leader":   {viewtest.Small(), 200, "leads\n"},
		"follower": {follower, 200, "follows gpu-fleet-1\n"},
		"alone":    {alone, 503, "no process is known to lead\n"},
		"start":    {fleet.View{Policy: rescue.Default()}, 503, "nothing was decided yet\n"},
	} {
		s := newSite(t)
		s.View.Store(c.view)
		w := s.send("GET", "/readyz", "")
		if w.Code != c.code || !strings.HasPrefix(w.Body.String(), c.text) || name != "start" && !strings.Contains(w.Body.String(), "STUCK: it was stopped") {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
		}
	}
	if w := newSite(t).send("GET", "/healthz", ""); w.Code != 200 || w.Body.String() != "ok\n" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// The metrics of the fleet, of Go and of the process.
func TestMetrics(t *testing.T) {
	text := newSite(t).send("GET", "/metrics", "").Body.String()
	for _, want := range []string{"tandem_fleet_leads 1\n", `tandem_fleet_build_info{go="`, "\ngo_goroutines ", "\nprocess_resident_memory_bytes "} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s", want)
		}
	}
}

// Who has the token stops and resumes acts, with a name and a text.
func TestOrders(t *testing.T) {
	s := newSite(t)
	for path, body := range map[string]string{"/stop": `{"by": " ada ", "text": "driver rollout"}`, "/resume": `{"by": "ada"}`} {
		if w := s.send("POST", path, body, "Authorization: Bearer secret"); w.Code != http.StatusOK {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
	if all := strings.Join(s.told, "\n"); len(s.told) != 2 || !strings.Contains(all, "stop ada: driver rollout") || !strings.Contains(all, "resume ada") {
		t.Errorf("%q", s.told)
	}
	if !strings.Contains(s.log.String(), `request=stop by=ada text="driver rollout"`) || strings.Contains(s.log.String(), "secret") {
		t.Errorf("%s", &s.log)
	}
	s.err = errors.New("the ConfigMap can't be written")
	if w := s.send("POST", "/resume", `{"by": "ada"}`, "Authorization: bearer secret"); w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "resume failed: the ConfigMap can't be written") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	s.err = &setting.Error{Key: "text", Value: "xx", Remedy: "a text of 1 to 300 bytes"}
	if w := s.send("POST", "/stop", `{"by": "ada", "text": "xx"}`, "Authorization: Bearer secret"); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "1 to 300 bytes") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	// The token is read at each use.
	check.NoError(t, os.WriteFile(s.TokenFile, []byte("other"), 0o600))
	if w := s.send("POST", "/resume", `{"by": "ada"}`, "Authorization: Bearer secret"); w.Code != http.StatusUnauthorized {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// Without the token, or with a wrong order, each refusal names what to change, and nothing is stopped.
func TestOrdersAreRefused(t *testing.T) {
	stop := `{"by": "ada", "text": "x"}`
	for name, c := range map[string]struct {
		method, path, body, auth, file string
		code                           int
		text                           string
	}{
		"no file is set":    {"POST", "/stop", stop, "Bearer secret", "none", 403, "gpu-fleet stop --ledger"},
		"the file is away":  {"POST", "/stop", stop, "Bearer secret", "away", 403, "no such file"},
		"the file is empty": {"POST", "/stop", stop, "Bearer ", "empty", 403, "has no token"},
		"no token":          {"POST", "/stop", stop, "", "", 401, "Authorization: Bearer TOKEN"},
		"a wrong token":     {"POST", "/stop", stop, "Bearer secre", "", 401, "missing or wrong"},
		"another scheme":    {"POST", "/resume", stop, "Basic secret", "", 401, "missing or wrong"},
		"no name":           {"POST", "/stop", `{"text": "x"}`, "Bearer secret", "", 400, "by is missing"},
		"the quorum's name": {"POST", "/resume", `{"by": "quorum"}`, "Bearer secret", "", 400, "automatic stop"},
		"no text":           {"POST", "/stop", `{"by": "ada", "text": " "}`, "Bearer secret", "", 400, "text is missing"},
		"an unknown key":    {"POST", "/resume", `{"by": "ada", "force": true}`, "Bearer secret", "", 400, `unknown field "force"`},
		"no JSON":           {"POST", "/resume", `by=ada`, "Bearer secret", "", 400, "not JSON"},
		"a long body":       {"POST", "/stop", `{"by": "` + strings.Repeat("x", 5000) + `"}`, "Bearer secret", "", 413, "4096 bytes"},
		"a link":            {"GET", "/stop", "", "Bearer secret", "", 405, ""},
	} {
		s := newSite(t)
		switch c.file {
		case "none":
			s.TokenFile = ""
		case "away":
			check.NoError(t, os.Remove(s.TokenFile))
		case "empty":
			check.NoError(t, os.WriteFile(s.TokenFile, []byte(" \n"), 0o600))
		}
		w := s.send(c.method, c.path, c.body, "Authorization: "+c.auth)
		if w.Code != c.code || !strings.Contains(w.Body.String(), c.text) || len(s.told) > 0 || (w.Code == 401) != (w.Header().Get("WWW-Authenticate") == "Bearer") {
			t.Errorf("%s: %d %s %v, told %q", name, w.Code, w.Body, w.Header(), s.told)
		}
	}
}

// The page has its own script and style, allows nothing else, and shows the text of status to a browser without scripts.
func TestPage(t *testing.T) {
	s := newSite(t)
	v := viewtest.Small()
	v.Clusters[2].Problem = "<script>alert(1)</script>"
	s.View.Store(v)
	w := s.send("GET", "/", "")
	text := w.Body.String()
	if w.Code != 200 || strings.Count(text, "<script>") != 1 || !strings.Contains(text, "&lt;script&gt;alert(1)") || !strings.Contains(text, "NEEDS A PERSON") {
		t.Errorf("%d %.300s", w.Code, text)
	}
	csp := w.Header().Get("Content-Security-Policy")
	if !strings.HasPrefix(csp, "default-src 'none'; script-src 'sha256-") || strings.Contains(csp, "unsafe") || w.Header().Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("%v", w.Header())
	}
	if w := s.send("GET", "/other", ""); w.Code != http.StatusNotFound {
		t.Errorf("%d", w.Code)
	}
}

// The server listens, tells once why it does not while the address is in use, and ends with its context.
func TestRun(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	check.NoError(t, err)
	s := newSite(t)
	s.Listen = taken.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.Server.Run(ctx) }()
	await(t, func() bool { return len(s.problems.List()) == 1 })
	check.NoError(t, taken.Close())
	await(t, func() bool {
		r, err := http.Get("http://" + s.Listen + "/healthz")
		if err != nil {
			return false
		}
		return r.Body.Close() == nil && r.StatusCode == http.StatusOK
	})
	if p := s.problems.List(); len(p) > 0 {
		t.Errorf("%v", p)
	}
	cancel()
	check.NoError(t, <-ended)
}

func await(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it takes too long")
		}
	}
}
