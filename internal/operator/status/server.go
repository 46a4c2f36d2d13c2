// Package status is the HTTP server of an agent: health endpoints for probes, metrics for Prometheus, the inventory with the reasons
// that an orchestrator's API has no field for, and further pages that the program adds.
package status

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

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/metrics"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/httpserver"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
)

// Adapter is the state of an orchestrator's adapter. Its methods are safe for concurrent use.
type Adapter interface {
	prometheus.Collector // of the adapter's own metrics

	Alive(context.Context) error // nil if a restart of the process would not help

	// Ready returns what is offered, or why the orchestrator does not have it yet (err). A node that has nothing to offer is idle, which
	// is no failure: text is the reason then.
	Ready() (text string, idle bool, err error)

	Resources() []string                // those that have metrics also without a unit
	ResourceOf(u inventory.Unit) string // the name by which the orchestrator knows a unit
}

// Reload is the outcome of the latest reads of the configuration; *agent.ReloadStatus implements it. Its methods are safe for
// concurrent use.
type Reload interface {
	Last() (ok bool, success time.Time) // whether the latest read succeeded, and when one last did
	Problems() []problem.Problem        // of a configuration that was refused
}

// Options are what a Server reports on. Every field but Address, Proofs, Resets and Handlers is required.
type Options struct {
	Address       string // host:port to listen on; "" = no HTTP
	Name, Version string // of the agent
	Agent         control.Agent
	Adapter       Adapter
	Reload        Reload
	Config        core.Config              // what the agent runs with
	Sources       func() map[string]bool   // whether each source of health events apart from the driver can be used, by name; a fresh map
	Problems      func() []problem.Problem // of the agent itself
	Proofs        func() *proof.Result     // the latest decision about proofs; nil, or a result of nil = no GPU is proved
	Resets        func() *reset.Result     // the latest decision about resets; nil, or a result of nil = none is made
	Limits        func() *limit.Table      // the latest table of limits of device memory; nil, or a result of nil = there are none
	DriverCalls   func() []gpu.CallCount   // since the process started
	Log           *slog.Logger

	// Handlers are further pages by pattern of http.ServeMux, such as "GET /{$}". They may be called concurrently. A response of
	// theirs is made for each request: they bound what that costs.
	Handlers map[string]http.Handler
}

// Server is the agent's HTTP server. Make one with New. Its methods are safe for concurrent use.
type Server struct {
	Options

	problems problemset.Set // why nothing is served
}

// New returns a server. Run makes it listen.
func New(o Options) *Server { return &Server{Options: o, problems: problemset.Set{Log: o.Log}} }

// Run serves until ctx ends. The agent works without HTTP: if it can't listen at the address, Run tries again.
func (s *Server) Run(ctx context.Context) {
	server := httpserver.Server{Address: s.Address, Handler: s.handler(), Problems: &s.problems, Log: s.Log}
	server.Run(ctx)
}

// ListenProblems has the reason if nothing is served.
func (s *Server) ListenProblems() []problem.Problem { return s.problems.List() }

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	for path, handle := range map[string]http.HandlerFunc{"/healthz": s.healthz, "/readyz": s.readyz, "/inventory": s.inventory} {
		mux.Handle("GET "+path, newPage(handle))
	}
	mux.Handle("GET /metrics", negotiated(s.metrics()))
	for pattern, handler := range s.Handlers {
		mux.Handle(pattern, handler)
	}
	return mux
}

// healthz fails only when a restart of the process helps. A missing driver or orchestrator is no failure. A task that is overdue is named in the text; the watchdog ends the process if a vital one is.
func (s *Server) healthz(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), time.Second)
	defer cancel()
	var late []string
	for _, task := range s.Agent.Watchdog().Late(time.Now()) {
		late = append(late, "stuck: "+task.Name+" since "+task.Last.UTC().Format(time.RFC3339))
	}
	writeText(w, s.Adapter.Alive(ctx), "ok", late...)
}

// readyz succeeds when the orchestrator has the devices, and also when this node has nothing to offer: a rollout must not stop at
// a node without a driver. The text distinguishes the two.
func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	text, idle, err := s.Adapter.Ready()
	if m := s.Agent.State().Maintenance; !idle && m.Active(time.Now()) {
		text = "maintenance (" + m.String() + "), nothing takes work; " + text
	}
	writeText(w, err, text, problem.Lines(s.Reload.Problems())...)
}

// inventory is what "inspect --json" prints for a running agent.
func (s *Server) inventory(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = report.WriteJSON(w, control.Describe(s.Agent, s.Config, s.Problems))
}

func writeText(w http.ResponseWriter, err error, text string, notes ...string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		text = err.Error()
	}
	fmt.Fprintln(w, strings.Join(append([]string{text}, notes...), "\n"))
}

// metrics is the page for Prometheus, in its text format. What it shows was read before: it makes no driver call and waits for none.
// What can't be collected is logged, and missing on the page.
func (s *Server) metrics() http.Handler {
	r := prometheus.NewRegistry()
	for _, c := range []prometheus.Collector{
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), metrics.Collector(s.source), s.Adapter,
	} {
		if err := r.Register(c); err != nil {
			s.Log.Error("metrics are missing", "error", err)
		}
	}
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelWarn), DisableCompression: true,
	})
}

// latest is what an optional function returns; nil without one.
func latest[T any](f func() *T) *T {
	if f == nil {
		return nil
	}
	return f()
}

// source is what the metrics that both agents have are computed from.
func (s *Server) source() metrics.Source {
	ok, success := s.Reload.Last()
	return metrics.Source{
		Agent: s.Name, Version: s.Version, Config: s.Config, State: s.Agent.State(), Stats: s.Agent.Stats(), Use: s.Agent.Use(),
		Proofs: latest(s.Proofs), Resets: latest(s.Resets), Limits: latest(s.Limits), Sources: s.Sources(), DriverCalls: s.DriverCalls(), ReloadOK: ok, ReloadedAt: success,
		Resources: s.Adapter.Resources(), ResourceOf: s.Adapter.ResourceOf,
	}
}
