// Package server is the HTTP server of gpu-fleet: one page for all clusters, the same as JSON, the plan, metrics, probes, and the two things that a person
// can do, stop and resume.
package server

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/metrics"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/httpserver"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Options are what a Server serves. Every field but Listen and TokenFile is required.
type Options struct {
	Listen    string // host:port; "" = no HTTP
	TokenFile string // of the token for stop and resume, read at each use; "" = they are refused
	View      *watch.Value[fleet.View]
	Stop      func(ctx context.Context, by, text string) error
	Resume    func(ctx context.Context, by string) error
	Log       *slog.Logger
	Version   string
}

// Server is the HTTP server of gpu-fleet. Make one with New. Its methods are safe for concurrent use.
type Server struct {
	Options

	pages    pages
	problems problemset.Set // why nothing is served: for the log, as no other way leads to a reader then
}

// New returns a server. Run makes it listen.
func New(o Options) *Server {
	return &Server{Options: o, pages: pages{view: o.View}, problems: problemset.Set{Log: o.Log}}
}

// writeTimeout is for how long a client may take to read a response: the document of 1,000 nodes has 2 MB, 0.3 MB compressed.
const writeTimeout = 30 * time.Second

// Run serves until ctx ends. gpu-fleet works without HTTP: if it can't listen at the address, Run tries again.
func (s *Server) Run(ctx context.Context) error {
	server := httpserver.Server{Address: s.Listen, Handler: s.Handler(), WriteTimeout: writeTimeout, Problems: &s.problems, Log: s.Log}
	server.Run(ctx)
	return nil
}

// Handler returns what is served.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", s.page)
	mux.HandleFunc("GET /fleet.json", s.document)
	mux.HandleFunc("GET /plan.json", s.plan)
	mux.Handle("GET /metrics", s.metrics())
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeText(w, http.StatusOK, "ok") })
	mux.HandleFunc("GET /readyz", s.readyz)
	mux.HandleFunc("POST /stop", s.stop)
	mux.HandleFunc("POST /resume", s.resume)
	return secured(mux)
}

// secured adds to all responses that browsers take no type but the named one, and send the address to no other server.
func secured(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Referrer-Policy", "no-referrer")
		handler.ServeHTTP(w, r)
	})
}

// document is the whole View, or, with nodes=brief, without nodes that are ready and have neither a fault nor a mark.
func (s *Server) document(w http.ResponseWriter, r *http.Request) {
	kind := whole
	switch nodes := r.URL.Query().Get("nodes"); nodes {
	case "", "all":
	case "brief":
		kind = brief
	default:
		writeText(w, http.StatusBadRequest, fmt.Sprintf("nodes = %q: want all or brief", nodes))
		return
	}
	s.pages.serve(w, r, kind)
}

// plan is what would be decided now in a mode.
func (s *Server) plan(w http.ResponseWriter, r *http.Request) {
	var mode rescue.Mode
	text := r.URL.Query().Get("mode")
	if err := mode.UnmarshalText([]byte(text)); err != nil || mode == rescue.ModeOff {
		writeText(w, http.StatusBadRequest, fmt.Sprintf("mode = %q: want act or report", text))
		return
	}
	s.pages.serve(w, r, planOf(mode))
}

// readyz succeeds if this process has decided, or follows another one that leads. The text has what needs a person, which is no reason to restart.
func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	d := s.pages.latest()
	status, lines := http.StatusOK, []string{"follows " + d.Leader}
	switch {
	case d.At.IsZero():
		status, lines[0] = http.StatusServiceUnavailable, "nothing was decided yet"
	case d.Leads:
		lines[0] = "leads"
	case d.Leader == "":
		status, lines[0] = http.StatusServiceUnavailable, "no process is known to lead"
	}
	for _, a := range d.Alerts {
		lines = append(lines, a.Code+": "+a.String())
	}
	writeText(w, status, lines...)
}

// metrics is the page for Prometheus.
func (s *Server) metrics() http.Handler {
	r := prometheus.NewRegistry()
	for _, c := range []prometheus.Collector{
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), metrics.New(s.pages.latest, s.Version),
	} {
		if err := r.Register(c); err != nil {
			s.Log.Error("metrics are missing", "error", err)
		}
	}
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelWarn), MaxRequestsInFlight: 8,
	})
}

func writeText(w http.ResponseWriter, status int, lines ...string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = fmt.Fprintln(w, strings.Join(lines, "\n")) // a client may disconnect
}
