//go:build e2e

package e2e

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// recorder passes the requests of gpu-fleet on to the servers of an orchestrator, and records those that may change something. So a test knows
// what gpu-fleet did, whatever the program reports, and can act between its request and what the servers do.
type recorder struct {
	url string

	mu     sync.Mutex
	all    []*changeRequest
	meddle *meddling
}

// changeRequest is a request that may change something.
type changeRequest struct {
	at     time.Time
	what   string // method and path
	body   string
	status int // of the servers' answer; 0 = they did not get the request
}

// meddling is what a test does to the first request that matches.
type meddling struct {
	wanted *regexp.Regexp
	before func() bool // before the servers get it; false = they do not. nil = nothing
	after  func()      // before gpu-fleet gets the answer, likewise
	done   chan struct{}
}

// record starts a recorder before the servers at this address.
func record(t *testing.T, servers string) *recorder {
	t.Helper()
	to, err := url.Parse(servers)
	if err != nil {
		t.Fatal(err)
	}
	r := &recorder{}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(p *httputil.ProxyRequest) { p.SetURL(to) },
		Transport:     selfSigned,
		FlushInterval: -1,                                                                                             // streams of events
		ErrorHandler:  func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) }, // also if gpu-fleet has ended
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if request.Method == http.MethodGet {
			proxy.ServeHTTP(w, request)
			return
		}
		r.pass(w, request, proxy)
	}))
	if to.Scheme == "https" { // client-go sends its token by no other
		server.StartTLS()
	} else {
		server.Start()
	}
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	r.url = server.URL
	return r
}

func (r *recorder) pass(w http.ResponseWriter, request *http.Request, servers http.Handler) {
	body, err := io.ReadAll(request.Body)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	request.Body = io.NopCloser(bytes.NewReader(body))
	one, m := r.note(request.Method+" "+request.URL.RequestURI(), string(body))
	if m.before != nil && !m.before() {
		close(m.done)
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	answer := httptest.NewRecorder()
	servers.ServeHTTP(answer, request)
	r.mu.Lock()
	one.status = answer.Code
	r.mu.Unlock()
	if m.after != nil {
		m.after()
	}
	if m.done != nil {
		close(m.done)
	}
	maps.Copy(w.Header(), answer.Header())
	w.WriteHeader(answer.Code)
	_, _ = w.Write(answer.Body.Bytes()) // gpu-fleet may have ended
}

// note records a request, and returns what the test does to it.
func (r *recorder) note(what, body string) (*changeRequest, meddling) {
	r.mu.Lock()
	defer r.mu.Unlock()
	one := &changeRequest{at: time.Now(), what: what, body: body}
	r.all = append(r.all, one)
	if m := r.meddle; m != nil && m.wanted.MatchString(what) {
		r.meddle = nil
		return one, *m
	}
	return one, meddling{}
}

// meddleWith has the test do something before or after the servers get the next request that matches. What it returns is closed when that is done.
func (r *recorder) meddleWith(pattern string, before func() bool, after func()) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.meddle = &meddling{regexp.MustCompile(pattern), before, after, make(chan struct{})}
	return r.meddle.done
}

// matching returns the requests that match, since a time.
func (r *recorder) matching(pattern string, since time.Time) (all []changeRequest) {
	wanted := regexp.MustCompile(pattern)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.all {
		if wanted.MatchString(one.what) && !one.at.Before(since) {
			all = append(all, *one)
		}
	}
	return all
}

// kinds are the requests with how often they were made, without the names of objects that are another one in each run.
func (r *recorder) kinds() string {
	id := regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}`)
	counts := map[string]int{}
	for _, one := range r.matching("", time.Time{}) {
		what, _, _ := strings.Cut(one.what, "?")
		counts[fmt.Sprintf("%s: %d", id.ReplaceAllString(what, "ID"), one.status)]++
	}
	var lines []string
	for what, n := range counts {
		lines = append(lines, fmt.Sprintf("%4d %s", n, what))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
