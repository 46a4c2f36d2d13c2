// Package kube composes the agent under Kubernetes: device plugins and a DRA driver over one monitor, and what each needs of the other.
package kube

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Name is that of the binary, and of the agent's files in the state directory.
const Name = "k8s-gpu"

// Options are what a process gives its agent.
type Options struct {
	Version string
	Read    func(name string) (config.Kubernetes, error) // the configuration, at the start and after each Hangup; with a choice by label the one of this name
	Before  func() (config.Kubernetes, error)            // flags and environment alone; nil = there is no choice by label
	NewLog  func(config.Kubernetes) *slog.Logger         // called at the start of each run
	Hangup  <-chan os.Signal                             // one that is pending stands for all
	Signals <-chan os.Signal                             // quiesce and resume; those between two runs wait for the next
}

// Agent runs the agent of this process: one run after another, as the configuration changes.
type Agent struct {
	opts    Options
	reload  agent.ReloadStatus
	history agent.Handover
	kubelet deviceplugin.Handover

	node    *nodeWatch    // nil = no label of the Node is a setting
	choice  *configChoice // nil = the configuration file is the same on all nodes
	changed chan struct{} // capacity 1: the label that chooses has another value

	ending  <-chan struct{}             // closed when the process ends; set by Run
	running atomic.Pointer[agent.Agent] // nil before the first run
}

// New returns an agent that is not running.
func New(o Options) *Agent { return &Agent{opts: o, changed: make(chan struct{}, 1)} }

// Run runs the agent until ctx ends, a run fails or a new process is needed. A configuration that is invalid at the start is an error.
func (a *Agent) Run(ctx context.Context) error {
	a.ending = ctx.Done()
	var before config.Kubernetes
	var err error
	if a.opts.Before != nil {
		before, err = a.opts.Before()
	}
	if before.ReadsNode() {
		if err = errors.Join(err, checkAPI(before)); err == nil {
			err = a.openNode(ctx, before)
		}
		if err != nil {
			return err
		}
	}
	if before.Operations.Oneshot {
		return a.labelOnce(ctx)
	}
	return a.reloader().Serve(ctx)
}

// openNode prepares what follows the labels of the Node, and reads the one that selects the configuration.
func (a *Agent) openNode(ctx context.Context, before config.Kubernetes) (err error) {
	if a.node, err = newNodeWatch(before, a.opts.Version); err != nil || before.ByLabel.Dir == "" {
		return err
	}
	a.choice = newConfigChoice(before, a.node)
	return a.choice.readLabel(ctx)
}

// read reads the configuration of this node.
func (a *Agent) read() (config.Kubernetes, error) {
	file := func(name string) (config.Kubernetes, error) {
		s, err := a.opts.Read(name)
		return s, errors.Join(err, checkAPI(s))
	}
	if a.choice == nil {
		return file("")
	}
	return a.choice.read(file)
}

// labelOnce writes the labels of the node and returns.
func (a *Agent) labelOnce(ctx context.Context) error {
	s, err := a.read()
	if err != nil {
		return err
	}
	log := a.opts.NewLog(s)
	writer, err := newLabelWriter(s, a.opts.Version, log)
	if err != nil {
		return err
	}
	o := AgentOptions(s)
	o.Log = log
	return writer.WriteOnce(ctx, agent.ReadStateOnce(ctx, o))
}

// followNode are the tasks of a run that follow the labels of the Node.
func (r *run) followNode(a *agent.Agent) (tasks []func(context.Context) error, problems func() []problem.Problem) {
	if r.node == nil {
		return nil, func() []problem.Problem { return nil }
	}
	list := []func() []problem.Problem{r.node.problems.List}
	tasks = append(tasks, r.node.run)
	if r.choice != nil {
		tasks, list = append(tasks, func(ctx context.Context) error { return r.choice.run(ctx, r.changed) }), append(list, r.choice.problems.List)
	}
	if r.settings.PauseLabel != "" {
		p := r.newPause(a)
		tasks, list = append(tasks, p.run), append(list, p.problems.List)
	}
	return tasks, func() (all []problem.Problem) {
		for _, of := range list {
			all = append(all, of()...)
		}
		return all
	}
}

// logNode has the problems of before the first run in its log, and later ones.
func (a *Agent) logNode(log *slog.Logger) {
	if a.node != nil && a.node.problems.Log == nil {
		a.node.problems.Log = log
	}
	if a.choice != nil && a.choice.problems.Log == nil {
		a.choice.problems.Log = log
		for _, p := range a.choice.problems.List() {
			log.Error(p.String())
		}
	}
}

func (a *Agent) reloader() *agent.Reloader[config.Kubernetes] {
	var warned string // text of the configuration file whose warnings were logged
	return &agent.Reloader[config.Kubernetes]{
		Run: a.run, Compare: compare, Busy: a.resetting, Hangup: a.opts.Hangup, Changed: a.changed, Status: &a.reload, Read: a.read,
		NewLog: func(s config.Kubernetes) *slog.Logger {
			log := a.opts.NewLog(s)
			a.logNode(log)
			for _, note := range s.Notes {
				log.Info(note)
			}
			return log
		},
		Announce: func(s config.Kubernetes, log *slog.Logger) {
			if s.File.Text == warned {
				return
			}
			warned = s.File.Text
			for _, w := range s.File.Warnings {
				log.Warn("configuration differs in effect from NVIDIA's k8s-device-plugin", "warning", w)
			}
		},
	}
}

// resetting reports whether the latest run resets a GPU.
func (a *Agent) resetting() bool {
	running := a.running.Load()
	return running != nil && running.Resetting()
}

// compare returns what a change of the settings requires, and the settings that changed.
func compare(was, is config.Kubernetes) (agent.Change, []string) {
	switch {
	case is.Equal(was):
		return agent.Unchanged, nil
	case is.DiffersInPolicyOnly(was):
		return agent.PolicyChanged, is.Changes(was)
	case is.Core.Roots.Driver != was.Core.Roots.Driver || is.FallbackDriver != was.FallbackDriver: // see nvidia.Open
		return agent.LibraryChanged, is.Changes(was)
	}
	return agent.RunChanged, is.Changes(was)
}
