// Package kube composes the agent under Kubernetes: device plugins and a DRA driver over one monitor, and what each needs of the other.
package kube

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
)

// Name is that of the binary, and of the agent's files in the state directory.
const Name = "k8s-gpu"

// Options are what a process gives its agent.
type Options struct {
	Version string
	Read    func() (config.Kubernetes, error)    // the configuration, at the start and after each Hangup
	NewLog  func(config.Kubernetes) *slog.Logger // called at the start of each run
	Hangup  <-chan os.Signal                     // one that is pending stands for all
	Signals <-chan os.Signal                     // quiesce and resume; those between two runs wait for the next
}

// Agent runs the agent of this process: one run after another, as the configuration changes.
type Agent struct {
	opts    Options
	reload  agent.ReloadStatus
	history agent.Handover
	kubelet deviceplugin.Handover
}

// New returns an agent that is not running.
func New(o Options) *Agent { return &Agent{opts: o} }

// Run runs the agent until ctx ends, a run fails or a new process is needed. A configuration that is invalid at the start is an error.
func (a *Agent) Run(ctx context.Context) error { return a.reloader().Serve(ctx) }

func (a *Agent) reloader() *agent.Reloader[config.Kubernetes] {
	var warned string // text of the configuration file whose warnings were logged
	return &agent.Reloader[config.Kubernetes]{
		Run: a.run, Compare: compare, Hangup: a.opts.Hangup, Status: &a.reload,
		Read: func() (config.Kubernetes, error) {
			s, err := a.opts.Read()
			return s, errors.Join(err, checkDRA(s))
		},
		NewLog: func(s config.Kubernetes) *slog.Logger {
			log := a.opts.NewLog(s)
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
