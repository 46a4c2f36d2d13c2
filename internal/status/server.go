// Package status is the HTTP server of the Kubernetes agent: health endpoints for the kubelet's probes, metrics for Prometheus,
// and the inventory with the reasons that the kubelet's API has no field for.
package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/report"
)

// Adapter is the state of the kubelet's endpoints; *kubeadapter.Adapter implements it. Its methods are safe for concurrent use.
type Adapter interface {
	Alive(context.Context) error // nil if every endpoint answers over its own socket
	Ready() error                // *kubeadapter.IdleError if there is nothing to register
	Stats() []kubeadapter.ResourceStats
}

// Reload is the outcome of the latest reads of the configuration; *agent.ReloadStatus implements it. Its methods are safe for
// concurrent use.
type Reload interface {
	Last() (ok bool, success time.Time) // whether the latest read succeeded, and when one last did
	Warnings() []string                 // about a configuration that was refused
}

// Options are what a Server reports on. Every field but Address is required.
type Options struct {
	Address  string // host:port to listen on; "" = no HTTP
	Version  string // of the agent
	Agent    control.Agent
	Adapter  Adapter
	Reload   Reload
	Config   core.Config            // what the agent runs with
	Sources  func() map[string]bool // whether each source of health events apart from the driver can be used, by name; a fresh map
	Warnings func() []string        // about the agent itself, one line each
	Log      *slog.Logger
}

// Server is the agent's HTTP server. Make one with New. Its methods are safe for concurrent use.
type Server struct {
	Options

	mu      sync.Mutex
	problem string // why nothing is served; "" = it is served, or was not tried yet
}

// New returns a server. Run makes it listen.
func New(o Options) *Server { return &Server{Options: o} }

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	for path, handle := range map[string]http.HandlerFunc{"/healthz": s.healthz, "/readyz": s.readyz, "/inventory": s.inventory} {
		mux.Handle("GET "+path, newPage(handle, ""))
	}
	mux.Handle("GET /metrics", negotiated(promhttp.HandlerFor(s.registry(), promhttp.HandlerOpts{})))
	return mux
}

// healthz fails only when the agent's own sockets do not answer, because then a restart of the process helps. A missing driver or
// kubelet is no failure. A task that is overdue is named in the text; the watchdog ends the process if a vital one is.
func (s *Server) healthz(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), time.Second)
	defer cancel()
	var late []string
	for _, task := range s.Agent.Watchdog().Late(time.Now()) {
		late = append(late, "stuck: "+task.Name+" since "+task.Last.UTC().Format(time.RFC3339))
	}
	writeText(w, s.Adapter.Alive(ctx), "ok", late...)
}

// readyz succeeds when the kubelet watches every resource, and also when this node has nothing to offer: a rollout must not stop
// at a node without a driver. The text distinguishes the two.
func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	err := s.Adapter.Ready()
	if idle := (*kubeadapter.IdleError)(nil); errors.As(err, &idle) {
		writeText(w, nil, idle.Reason, s.Reload.Warnings()...)
		return
	}
	var names []string
	for _, r := range s.Adapter.Stats() {
		names = append(names, r.Resource)
	}
	text := "offered to the kubelet: " + strings.Join(names, ", ")
	if m := s.Agent.State().Maintenance; m.Active(time.Now()) {
		text = "maintenance (" + m.String() + "), nothing takes work; " + text
	}
	writeText(w, err, text, s.Reload.Warnings()...)
}

// inventory is what "k8s-gpu inspect --json" prints for a running agent.
func (s *Server) inventory(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	r := report.DescribeState(s.Agent.State(), s.Config, s.Warnings()...).WithUse(s.Agent.Use())
	r.Source = report.FromAgent
	_ = r.WriteJSON(w)
}

func writeText(w http.ResponseWriter, err error, text string, notes ...string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		text = err.Error()
	}
	fmt.Fprintln(w, strings.Join(append([]string{text}, notes...), "\n"))
}

// Endpoints are the kubelet's endpoints, for the debug view.
func Endpoints(adapter *kubeadapter.Adapter) (all []report.Endpoint) {
	for _, r := range adapter.Stats() {
		all = append(all, report.Endpoint{
			Resource: r.Resource, Status: cmp.Or(r.Reason, "connected"), Since: r.Since, Socket: r.Socket,
			Registrations: r.Registrations, Responses: r.Lists, LastError: r.LastError, LastErrorAt: r.LastErrorAt,
		})
	}
	return all
}
