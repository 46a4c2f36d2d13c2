// Package kube composes the agent under Kubernetes: device plugins and a DRA driver over one monitor, and what each needs of the other.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/containerruntime"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/nodelabels"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/node/usage"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/operator/status"
	"github.com/tandem-gpu/tandem/internal/operator/statuspage"
)

// Name is that of the binary, and of the agent's files in the state directory.
const Name = "k8s-gpu"

// settings are those of the agent.
type settings = config.Kubernetes

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
func (r *Agent) Run(ctx context.Context) error { return r.reloader().Serve(ctx) }

// AgentOptions are what the settings mean for an agent.
func AgentOptions(s settings) agent.Options {
	return agent.Options{
		Name: Name, Core: s.Core, Health: s.Health, MPSRoot: s.MPSMount, Open: agent.OpenDriver(s.Core, s.FallbackDriver),
		CDI: cdiOptions(s),
	}
}

// cdiOptions are those of the CDI specifications. The vendor and with it the file names are those of NVIDIA's plugin, so that the
// files that it left are replaced.
func cdiOptions(s settings) cdi.Options {
	return cdi.Options{
		Vendor: "k8s.device-plugin.nvidia.com", Folder: s.CDI.Folder, FolderIsMount: s.Core.Roots.Driver != s.DriverRoot,
		DriverRoot: s.DriverRoot, ContainerRoot: s.Core.Roots.Driver, DevRoot: s.DevRoot, ContainerDevRoot: s.Core.Roots.Dev, SysRoot: s.Core.Roots.Sys,
		HookPath: s.CDI.HookPath, Indices: s.Core.IndexIDs, DisabledHooks: s.CDI.DisabledHooks, FeatureFlags: s.CDI.FeatureFlags,
		GDS: s.CDI.GDS, MOFED: s.CDI.MOFED, GDRCopy: s.CDI.GDRCopy, IMEXChannels: s.CDI.IMEXChannels,
		Auto: s.Strategies.Auto, Runtime: askRuntime(s.CDI.CRISocket),
	}
}

// askRuntime returns a function that asks the container runtime; nil without a socket. What it can't learn is unknown.
func askRuntime(socket string) func(context.Context) cdi.Runtime {
	if socket == "" {
		return nil
	}
	return func(ctx context.Context) cdi.Runtime {
		info, _ := containerruntime.Read(ctx, socket)
		r := cdi.Runtime{Name: info.Name, Version: info.Version, Folders: info.Folders}
		switch {
		case info.CDI == nil:
		case *info.CDI:
			r.CDI = gpu.Enabled
		default:
			r.CDI = gpu.Disabled
		}
		return r
	}
}

// Answers are what the settings mean for the responses to Allocate: no other option has a part in them.
func Answers(s config.Kubernetes) deviceplugin.Options {
	return deviceplugin.Options{DevRoot: s.DevRoot, MPSRoot: s.MPSRoot, Lists: deviceLists(s)}
}

// deviceLists are what the settings mean for the responses to Allocate.
func deviceLists(s settings) deviceplugin.DeviceLists {
	return deviceplugin.DeviceLists{
		EnvVar: s.Strategies.Auto || s.Strategies.EnvVar, VolumeMounts: s.Strategies.VolumeMounts,
		CDIAnnotations: s.Strategies.CDIAnnotations, AnnotationPrefix: s.AnnotationPrefix, CDINames: s.Strategies.Auto || s.Strategies.CDICRI,
		GDS: s.CDI.GDS, MOFED: s.CDI.MOFED, GDRCopy: s.CDI.GDRCopy,
	}
}

// run runs an agent until ctx ends. It applies the policies that come.
func (r *Agent) run(ctx context.Context, s settings, policies <-chan settings, log *slog.Logger) error {
	o := AgentOptions(s)
	o.Handover, o.Reload, o.Signals, o.Log = &r.history, &r.reload, r.opts.Signals, log
	o.Explain = Explain(s)
	o.Use = usage.Options{Orchestrator: use.Kubernetes, MappingDir: s.Operations.MappingDir}
	var plugins *deviceplugin.Adapter // set before the agent runs
	if s.PodResourcesSocket != "" {
		o.Use.Holders = func(ctx context.Context, inv *inventory.Inventory) (use.Record, error) {
			return plugins.UseRecord(ctx, inv, podresources.PodLogs)
		}
	}
	api, err := newKubeAPI(s, r.opts.Version, log)
	if err != nil {
		return err
	}
	o.Adapter = func(a *agent.Agent) agent.Adapter {
		made := r.newAdapters(a, s, api, log)
		plugins = made.plugins
		page := statuspage.New(statuspage.Options{
			Agent: Name, Version: r.opts.Version, Node: statuspage.NodeName(),
			Report: func() report.Report { return control.Describe(a, s.Core, a.Warnings) },
		})
		server := status.New(status.Options{
			Address: s.Operations.HTTPAddress, Name: Name, Version: r.opts.Version, Agent: a, Adapter: made.view, Reload: &r.reload,
			Config: s.Core, Sources: a.SourcesUp, Warnings: a.Warnings, DriverCalls: agent.DriverCalls,
			Handlers: page.Handlers(), Log: log,
		})
		labels := nodelabels.New(nodelabels.Options{Path: s.Operations.FeaturesFile, Sys: s.Core.Roots.Sys, MIG: s.Core.MIG, Log: log})
		return agent.Adapter{
			Tasks: append(made.tasks,
				func(ctx context.Context) error { server.Run(ctx); return nil },
				func(ctx context.Context) error { page.Run(a.WatchUse(ctx)); return nil },
				func(ctx context.Context) error { labels.Run(ctx, a.Monitor); return nil },
				func(ctx context.Context) error { applyPolicies(ctx, a.Monitor, labels, policies); return nil },
			),
			View:      made.plugins.Withhold,
			Warnings:  func() []string { return slices.Concat(server.ListenWarnings(), made.warnings(), labels.Warnings()) },
			Endpoints: made.view.Endpoints,
			Extend:    made.extend,
			APIs:      made.apis,
			Readers:   made.readers,
		}
	}
	log.Info("starting", slices.Concat([]any{"version", r.opts.Version, "kubelet", s.KubeletSocket, "driver-root", s.Core.Roots.Driver,
		"mig-strategy", s.Core.MIG, "device-list-strategy", s.Strategies, "health-mode", s.Core.Health.Mode}, draAttributes(s))...)
	err = agent.New(o).Run(ctx)
	if errors.Is(err, gpu.ErrDriverStale) {
		return fmt.Errorf("%w; a new process is needed, and the DaemonSet starts one", err)
	}
	log.Info("stopped")
	return err
}

// allocationStore is the file of allocated device IDs; nil without a state directory.
func allocationStore(s settings, log *slog.Logger) deviceplugin.AllocationStore {
	if s.Health.StateDir == "" {
		return nil // not a nil *File: in an interface that is not nil
	}
	return deviceplugin.OpenAllocationFile(s.Health.StateDir, Name, log)
}

// applyPolicies applies the policy of each of the settings that come, until ctx ends.
func applyPolicies(ctx context.Context, m *monitor.Monitor, labels *nodelabels.Writer, policies <-chan settings) {
	for {
		select {
		case s := <-policies:
			_ = m.ApplyPolicy(ctx, s.Core) // it fails only when ctx ends
			labels.SetStrategy(s.Core.MIG)
		case <-ctx.Done():
			return
		}
	}
}

// reloader returns what runs agents with the settings that are read.
func (r *Agent) reloader() *agent.Reloader[settings] {
	var warned string // text of the configuration file whose warnings were logged
	return &agent.Reloader[settings]{
		Read: func() (settings, error) {
			s, err := r.opts.Read()
			return s, errors.Join(err, checkDRA(s))
		},
		Run: r.run, Compare: compare, Hangup: r.opts.Hangup, Status: &r.reload,
		NewLog: func(s settings) *slog.Logger {
			log := r.opts.NewLog(s)
			for _, note := range s.Notes {
				log.Info(note)
			}
			return log
		},
		Announce: func(s settings, log *slog.Logger) {
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
func compare(was, is settings) (agent.Change, []string) {
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
