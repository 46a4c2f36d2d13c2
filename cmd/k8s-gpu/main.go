// Command k8s-gpu offers the NVIDIA GPUs of a node to the kubelet, as its device plugin.
//
// It replaces NVIDIA's k8s-device-plugin: the same flags, environment variables, configuration file, resource names and responses.
// A setting that this version does not support is an error that names it.
package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/asynclog"
	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/status"
)

// version is set by the linker; a build by "go install ...@v2.0.0" has it from the module instead.
var version string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	context.AfterFunc(ctx, stop) // a second signal ends the process
	stderr := asynclog.New(os.Stderr, lostLines)
	err := agent.RunUntil(ctx, func() error {
		return run(ctx, environment{args: os.Args, lookupEnv: os.LookupEnv, stdout: os.Stdout, stderr: stderr})
	})
	cli.WriteError(stderr, agentName, err)
	stderr.Flush()
	if err != nil && !errors.Is(err, agent.ErrShutdownTimeout) {
		os.Exit(cli.ExitCode(err))
	}
}

// lostLines is a line of the log about the lines that are missing from it.
func lostLines(lines int64) []byte {
	var line bytes.Buffer
	slog.New(slog.NewTextHandler(&line, nil)).Warn("log lines lost: the reader is too slow", "lines", lines)
	return line.Bytes()
}

// settings are those of the agent.
type settings = config.Kubernetes

// environment is what the operating system gives a process.
type environment struct {
	args           []string
	lookupEnv      func(string) (string, bool)
	stdout, stderr io.Writer
}

// run runs the command line of a process.
func run(ctx context.Context, env environment) error {
	values := config.NewFlags(config.KubernetesSpecs())
	read := func() (settings, error) {
		return config.ReadKubernetes(values, config.Environment{LookupEnv: env.lookupEnv, CheckAddress: status.CheckAddress})
	}
	return cli.Program{
		Name: agentName, Usage: "offer the NVIDIA GPUs of this node to the kubelet", Version: agentName + " " + versionText(),
		Description: "A flag takes precedence over its environment variable, and that over the configuration file.\n" +
			"DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS have the meaning of NVIDIA's plugin for XIDs that --xids does not name.",
		Flags: cli.Flags(config.KubernetesSpecs(), values),
		Serve: func(ctx context.Context) error { return serve(ctx, read, env.stderr) },
		Options: func() (agent.Options, error) {
			s, err := read()
			return agentOptions(s), err
		},
		Validate: func() ([]string, error) {
			s, err := read()
			return s.Summary(), err
		},
		Stdout: env.stdout, Stderr: env.stderr,
	}.Run(ctx, env.args)
}

// serve runs the agent until ctx ends.
func serve(ctx context.Context, read func() (settings, error), stderr io.Writer) error {
	hangup, signals := notify()
	agent.LimitRuntime()
	newLog := func(s settings) *slog.Logger {
		return slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: s.LogLevel}))
	}
	return newReloader(&runner{signals: signals}, read, hangup, newLog).Serve(ctx)
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

// versionText is the version of this build.
func versionText() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
