// Command k8s-gpu offers the NVIDIA GPUs of a node to the kubelet, as its device plugin.
//
// It replaces NVIDIA's k8s-device-plugin: the same flags, environment variables, configuration file, resource names and responses.
// A setting that this version does not support is an error that names it.
package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/agent/kube"
	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/cli/processlog"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
	"github.com/tandem-gpu/tandem/internal/util/httpserver"
	"github.com/tandem-gpu/tandem/internal/util/terminal"
)

// version is set by the linker; a build by "go install ...@v2.0.0" has it from the module instead.
var version string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	context.AfterFunc(ctx, stop) // a second signal ends the process
	log := &processlog.Log{Out: os.Stderr, Terminal: terminal.Is(os.Stderr), Name: kube.Name, Ends: kube.Name + " ends"}
	stopWithin := atomic.Int64{}
	stopWithin.Store(int64(agent.ShutdownTimeout))
	err := agent.RunUntil(ctx, func() time.Duration { return time.Duration(stopWithin.Load()) }, func() error {
		return run(ctx, environment{
			args: os.Args, lookupEnv: os.LookupEnv, stdout: os.Stdout, stderr: os.Stderr, log: log,
			stopWithin: func(d time.Duration) { stopWithin.Store(int64(d)) },
		})
	})
	flush := agent.ReaderTimeout
	if ctx.Err() != nil {
		flush = agent.FlushTimeout
	}
	log.End(err, flush)
	if err != nil && !errors.Is(err, agent.ErrShutdownTimeout) {
		os.Exit(cli.ExitCode(err))
	}
}

// settings are those of the agent.
type settings = config.Kubernetes

// environment is what the operating system gives a process.
type environment struct {
	args           []string
	lookupEnv      func(string) (string, bool)
	stdout, stderr io.Writer           // of a command
	log            *processlog.Log     // to stderr
	stopWithin     func(time.Duration) // sets how long the process may take to end after a signal
}

// run runs the command line of a process.
func run(ctx context.Context, env environment) error {
	values := config.NewFlags(config.KubernetesSpecs())
	host := config.Environment{LookupEnv: env.lookupEnv, CheckAddress: httpserver.CheckAddress}
	named := func(name string) (settings, error) {
		of := host
		of.Config = name
		return config.ReadKubernetes(values, of)
	}
	before := func() (settings, error) { return config.ReadBeforeFile(values, host) }
	read := func() (settings, error) { // of a command beside the agent
		s, _ := before() // ReadKubernetes has its problems
		name, err := kube.ConfigInForce(s)
		s, invalid := named(name)
		return s, errors.Join(err, invalid)
	}
	return cli.Program{
		Name: kube.Name, Usage: "offer the NVIDIA GPUs of this node to the kubelet", Version: kube.Name + " " + command.VersionText(version),
		Description: "A flag takes precedence over its environment variable, and that over the configuration file.\n" +
			"DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS have the meaning of NVIDIA's plugin for XIDs that --xids does not name.",
		Flags: cli.Flags(config.KubernetesSpecs(), values),
		Serve: func(ctx context.Context) error { return serve(ctx, named, before, env) },
		Options: func() (agent.Options, error) {
			s, err := read()
			return kube.AgentOptions(s), err
		},
		Doctor: func(string) (agent.Options, []doctor.Check, error) {
			s, err := read()
			return kube.AgentOptions(s), kube.Checks(s, command.VersionText(version)), errors.Join(err, s.CheckNode())
		},
		Explain: func() explain.Adapter {
			s, _ := read() // Options has the error
			return kube.Explain(s)
		},
		Validate: func() (cli.Validation, error) {
			s, err := read()
			return cli.Validation{Warnings: slices.Concat(s.File.Warnings, s.Missing(values, host)), Means: s.Summary()}, err
		},
		Import: importNVIDIA(), Shadow: shadowKubelet(read), Classes: classes(read), Components: true,
		Log: func() *slog.Logger {
			s, _ := read() // Options has the error
			env.log.Set(s.Operations.LogFormat)
			return env.log.Logger(s.LogLevel)
		},
		StopWithin: env.stopWithin,
		Stdout:     env.stdout, Stderr: env.stderr,
	}.Run(ctx, env.args)
}

// serve runs the agent until ctx ends.
func serve(ctx context.Context, read func(name string) (settings, error), before func() (settings, error), env environment) error {
	hangup, signals := notify()
	agent.LimitRuntime()
	first := func() (settings, error) { // also if it is invalid: its problems are logged
		s, err := before()
		env.log.Set(s.Operations.LogFormat)
		return s, err
	}
	newLog := func(s settings) *slog.Logger {
		env.log.Set(s.Operations.LogFormat)
		return env.log.Logger(s.LogLevel)
	}
	return kube.New(kube.Options{Version: command.VersionText(version), Read: read, Before: first, NewLog: newLog, Hangup: hangup, Signals: signals}).Run(ctx)
}

// notify subscribes to the signals that do not end the agent: SIGHUP, and those for quiesce and resume. The subscription lasts
// until the process ends, so that none of them ends it. One SIGHUP that is pending stands for all, as each makes the whole
// configuration be read.
func notify() (hangup, signals <-chan os.Signal) {
	h, s := make(chan os.Signal, 1), make(chan os.Signal, 4)
	signal.Ignore(syscall.SIGPIPE) // the reader of the log has ended; the agent goes on
	signal.Notify(h, syscall.SIGHUP)
	signal.Notify(s, control.QuiesceSignal, control.ResumeSignal)
	return h, s
}
