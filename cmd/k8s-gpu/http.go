package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/internal/sources"
)

// status is what the agent says about itself.
type status struct {
	machine control.Agent
	adapter interface {
		Alive(context.Context) error
		Ready() error
		Stats() []kubeadapter.ResourceStats
		Warnings() []string
	}
	cfg    core.Config
	from   *sources.Sources
	config *configStatus
	socket *control.Socket
	port   *port
}

// notes are about the agent itself, in a line each.
func (s *status) notes() []string {
	return slices.Concat(s.config.notes(), s.from.Warnings(), s.socket.Warnings(), s.port.notes(), s.adapter.Warnings())
}

func (s *status) handler() http.Handler {
	mux := http.NewServeMux()
	for path, handle := range map[string]http.HandlerFunc{"/healthz": s.healthz, "/readyz": s.readyz, "/inventory": s.inventory} {
		mux.Handle("GET "+path, newSharedPage(handle, ""))
	}
	mux.Handle("GET /metrics", negotiated(promhttp.HandlerFor(s.registry(), promhttp.HandlerOpts{})))
	return mux
}

// endpoints are what the kubelet is served, for the debug view.
func (s *status) endpoints() []report.Endpoint {
	var endpoints []report.Endpoint
	for _, r := range s.adapter.Stats() {
		endpoints = append(endpoints, report.Endpoint{
			Resource: r.Resource, Status: cmp.Or(r.Reason, "connected"), Since: r.Since, Socket: r.Socket,
			Registrations: r.Registrations, Responses: r.Lists, LastError: r.LastError, LastErrorAt: r.LastErrorAt,
		})
	}
	return endpoints
}

// healthz fails when the agent's own sockets do not answer: then only a new process helps. A missing
// driver or kubelet is not such a case, and a part of the agent that ends, ends the process. One that is stuck is
// named; that which nothing works without ends the process by itself.
func (s *status) healthz(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), time.Second)
	defer cancel()
	var late []string
	for _, p := range s.machine.Watchdog().Late(time.Now()) {
		late = append(late, "stuck: "+p.Name+" since "+p.Last.UTC().Format(time.RFC3339))
	}
	answer(w, s.adapter.Alive(ctx), "ok", late...)
}

// readyz is green when the kubelet watches every resource, and when there is nothing to offer on this
// node: a rollout must not stop at a node without a driver. The text says which.
func (s *status) readyz(w http.ResponseWriter, _ *http.Request) {
	err := s.adapter.Ready()
	if idle := (*kubeadapter.IdleError)(nil); errors.As(err, &idle) {
		answer(w, nil, idle.Reason, s.config.notes()...)
		return
	}
	var names []string
	for _, r := range s.adapter.Stats() {
		names = append(names, r.Resource)
	}
	text := "offered to the kubelet: " + strings.Join(names, ", ")
	if away := s.machine.State().Maintenance; away.Active(time.Now()) {
		text = "maintenance (" + away.String() + "), nothing takes work; " + text
	}
	answer(w, err, text, s.config.notes()...)
}

// inventory is what the running agent offers, in the words of "k8s-gpu inspect --json": the kubelet's
// API has no place for a reason.
func (s *status) inventory(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	r := report.DescribeState(s.machine.State(), s.cfg, s.notes()...)
	r.Source = report.FromAgent
	_ = r.WriteJSON(w)
}

func answer(w http.ResponseWriter, err error, text string, notes ...string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		text = err.Error()
	}
	fmt.Fprintln(w, strings.Join(append([]string{text}, notes...), "\n"))
}
