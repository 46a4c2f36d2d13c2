// Package statuspage is a read-only page for operators that an agent serves: what is wrong, where, since when and what to do; the
// devices with health and owners; the last hour of use as charts. The page is one document without outside resources. It reads
// /inventory of the same server and /history.json.
package statuspage

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed" // the parts of the page
	"encoding/base64"
	"encoding/json"
	"html"
	"iter"
	"maps"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// Options configure a Page. Every field but Now is required.
type Options struct {
	Agent   string               // program name
	Version string               // of the agent
	Node    string               // name of the node
	Report  func() report.Report // the present one. It is safe for concurrent use
	Now     func() time.Time     // the present time, with a monotonic clock; nil = time.Now
}

// NodeName is the name of this node for Options: that in the variable NODE_NAME, which a DaemonSet can set from spec.nodeName, else
// the host name, which in a pod is that of the pod.
func NodeName() string {
	name, _ := os.Hostname() // "" is a name, too
	return cmp.Or(os.Getenv("NODE_NAME"), name)
}

// Page is the status page of an agent. Make one with New. Its methods are safe for concurrent use.
type Page struct {
	opts  Options
	start time.Time

	mu      sync.Mutex
	history history
}

// New returns a page. Run gives it a history.
func New(o Options) *Page {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Page{opts: o, start: o.Now()}
}

// Run records the tables until there are no more.
func (p *Page) Run(tables iter.Seq[use.Table]) {
	for t := range tables {
		if !t.At.IsZero() {
			p.record(t)
		}
	}
}

// record adds a table to the history. A change of the wall clock moves no point: Sub reads the monotonic clock.
func (p *Page) record(t use.Table) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.history.add(int(p.opts.Now().Sub(p.start)/step), t)
}

// Handlers are the page and the history, by the pattern of http.ServeMux that each is for.
func (p *Page) Handlers() map[string]http.Handler {
	return map[string]http.Handler{
		"GET /{$}": &response{make: p.document, now: p.opts.Now, header: http.Header{
			"Content-Type": {"text/html; charset=utf-8"}, "Content-Security-Policy": {policy}, "Referrer-Policy": {"no-referrer"},
		}},
		"GET /history.json": &response{make: p.describe, now: p.opts.Now, header: http.Header{"Content-Type": {"application/json"}}},
	}
}

// maxAge is how old a response may be. A response is made once in this time, whatever the number of clients.
const maxAge = time.Second

// response serves what make returns.
type response struct {
	make   func() []byte
	now    func() time.Time
	header http.Header

	mu   sync.Mutex
	body []byte
	at   time.Time // when body was made
}

// ServeHTTP implements http.Handler.
func (r *response) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	body := r.latest()
	maps.Copy(w.Header(), r.header)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(body) // a client may disconnect
}

func (r *response) latest() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.body == nil || r.now().Sub(r.at) >= maxAge {
		r.body, r.at = r.make(), r.now()
	}
	return r.body
}

// describe returns /history.json.
func (p *Page) describe() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	text, _ := json.Marshal(historyDocument{ // strings, numbers and a time of this century can't fail
		Agent: p.opts.Agent, Version: p.opts.Version, Node: p.opts.Node, At: p.opts.Now().UTC(), StepSeconds: int(step.Seconds()),
		Devices: p.history.describe(),
	})
	return text
}

//go:embed page.html
var pageHTML string

//go:embed page.css
var pageCSS string

//go:embed chart.js
var chartJS string

//go:embed problems.js
var problemsJS string

//go:embed page.js
var pageJS string

// script is that of the page.
var script = "\"use strict\";\n" + chartJS + problemsJS + pageJS

// policy allows the document its own style and script, and requests to its own server. Nothing else is loaded, so that names which
// pods and drivers choose can't make a browser do anything.
var policy = strings.Join([]string{
	"default-src 'none'", "script-src " + hashSource(script), "style-src " + hashSource(pageCSS), "connect-src 'self'", "img-src data:",
	"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
}, "; ")

// hashSource is a hash source of the Content Security Policy (CSP Level 3, 2.3.1).
func hashSource(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// document returns the page. For browsers without scripts it has the table that the command inspect prints.
func (p *Page) document() []byte {
	var table, page bytes.Buffer
	_ = p.opts.Report().WriteTable(&table) // a bytes.Buffer does not fail
	_, _ = strings.NewReplacer(
		"{{agent}}", html.EscapeString(p.opts.Agent), "{{node}}", html.EscapeString(p.opts.Node), "{{table}}", html.EscapeString(table.String()),
		"{{style}}", pageCSS, "{{script}}", script,
	).WriteString(&page, pageHTML)
	return page.Bytes()
}
