package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/nodelabels"
	"github.com/tandem-gpu/tandem/internal/node/usage"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/operator/status"
	"github.com/tandem-gpu/tandem/internal/operator/statuspage"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// run is one run of the agent, with settings of which no more than the policy changes.
type run struct {
	*Agent
	settings config.Kubernetes
	policies <-chan config.Kubernetes // those that come
	dra      bool                     // see servesDRA
	api      *kubeapi.Client          // of the API dra; nil = it is not called for that
	labels   *nodelabels.Writer
	handOver handOver
	log      *slog.Logger
}

// run runs the agent with settings until ctx ends. It applies the policies that come.
func (a *Agent) run(ctx context.Context, s config.Kubernetes, policies <-chan config.Kubernetes, log *slog.Logger) error {
	r := &run{Agent: a, settings: s, policies: policies, dra: servesDRA(s), log: log}
	if err := r.openAPI(); err != nil {
		return err
	}
	var err error
	if r.labels, err = newLabelWriter(s, a.opts.Version, log); err != nil {
		return err
	}
	if r.handOver, err = r.newHandOver(); err != nil {
		return err
	}
	log.Info("starting", r.attributes()...)
	running := agent.New(r.options())
	a.running.Store(running)
	err = running.Run(ctx)
	if errors.Is(err, gpu.ErrDriverStale) {
		return fmt.Errorf("%w; a new process is needed, and the DaemonSet starts one", err)
	}
	log.Info("stopped")
	return err
}

// attributes are what the log has of the settings.
func (r *run) attributes() []any {
	s := r.settings
	all := []any{"version", r.opts.Version, "kubelet", s.KubeletSocket, "driver-root", s.Core.Roots.Driver,
		"mig-strategy", s.Core.MIG, "device-list-strategy", s.Strategies, "health-mode", s.Core.Health.Mode}
	if s.Core.API == inventory.DRA {
		all = append(all, "api", s.Core.API, "node", s.DRA.Node, "kubelet-dir", s.DRA.KubeletDir)
	}
	return all
}

func (r *run) options() agent.Options {
	s := r.settings
	o := AgentOptions(s)
	o.Handover, o.Reload, o.Signals, o.Ending, o.Log = &r.history, &r.reload, r.opts.Signals, r.ending, r.log
	o.Use = usage.Options{Orchestrator: holders.Kubernetes, MappingDir: s.Operations.MappingDir}
	o.Explain, o.Adapter = Explain(s), r.adapter
	return o
}

// adapter returns what an agent runs for the kubelet, with its pages and the labels of the node.
func (r *run) adapter(a *agent.Agent) agent.Adapter {
	s := r.settings
	left := leftoversOf(s).problems()
	for _, p := range left {
		r.log.Error(p.String())
	}
	made, shown := r.offer(a)
	page := statuspage.New(statuspage.Options{
		Agent: Name, Version: r.opts.Version, Node: statuspage.NodeName(),
		Report: func() report.Report { return control.Describe(a, s.Core, a.Problems) },
	})
	server := status.New(status.Options{
		Address: s.Operations.HTTPAddress, Name: Name, Version: r.opts.Version, Agent: a, Adapter: shown, Reload: &r.reload,
		Config: s.Core, Sources: a.SourcesUp, Problems: a.Problems, Proofs: a.Proofs, Resets: a.Resets, Limits: a.KnownLimits, DriverCalls: agent.DriverCalls,
		Handlers: page.Handlers(), Log: r.log,
	})
	following, nodeProblems := r.followNode(a)
	handing, handOverProblems := r.handOverTasks(a, made)
	labels := r.labels
	made.Tasks = append(slices.Concat(made.Tasks, following, handing),
		func(ctx context.Context) error { server.Run(ctx); return nil },
		func(ctx context.Context) error { page.Run(a.WatchUse(ctx)); return nil },
		func(ctx context.Context) error { labels.Run(ctx, a.Monitor); return nil },
		func(ctx context.Context) error { r.applyPolicies(ctx, a, labels); return nil },
	)
	problems := made.Problems
	made.Problems = func() []problem.Problem {
		return slices.Concat(server.ListenProblems(), left, problems(), labels.Problems(), nodeProblems(), handOverProblems())
	}
	return made
}

// applyPolicies applies the policy of each of the settings that come, until ctx ends.
func (r *run) applyPolicies(ctx context.Context, a *agent.Agent, labels *nodelabels.Writer) {
	for {
		select {
		case s := <-r.policies:
			_ = a.ApplyPolicy(ctx, s.Core) // it fails only when ctx ends
			labels.SetStrategy(s.Core.MIG)
		case <-ctx.Done():
			return
		}
	}
}

// newLabelWriter returns what writes the labels of the node.
func newLabelWriter(s config.Kubernetes, version string, log *slog.Logger) (*nodelabels.Writer, error) {
	o := nodelabels.Options{
		Path: s.Operations.FeaturesFile, NoTimestamp: s.Operations.NoTimestamp, Sys: s.Core.Roots.Sys, MIG: s.Core.MIG, Log: log,
	}
	if s.Operations.NodeFeatureAPI {
		a := kubeAPIOptions(s)
		a.Agent, a.Log = userAgent(version), log
		api, err := kubeapi.New(a)
		if err != nil {
			return nil, err
		}
		o.API, o.Node, o.Namespace, o.Pod = api, s.DRA.Node, s.Operations.Namespace, s.Operations.Pod
	}
	return nodelabels.New(o), nil
}
