// Command k8s-gpu offers this machine's NVIDIA GPUs to the kubelet, as its device plugin.
//
// It takes the place of NVIDIA's k8s-device-plugin: the same flags, environment, configuration file,
// resource names and responses, for what this version supports; what it does not is refused by name.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
)

// version is set by the linker; "go install ...@v2.0.0" has it from the module instead.
var version string

func main() {
	// HUP is what NVIDIA's config-manager sends after it has changed the configuration: a new process
	// reads it, and the DaemonSet starts one.
	ctx, stop := signal.NotifyContext(context.Background(),
		syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGHUP)
	context.AfterFunc(ctx, stop) // a second signal kills
	err := run(ctx, world{args: os.Args, lookupEnv: os.LookupEnv, stdout: os.Stdout, stderr: os.Stderr})
	if err != nil {
		for line := range strings.Lines(err.Error()) {
			fmt.Fprintln(os.Stderr, "k8s-gpu:", strings.TrimSuffix(line, "\n"))
		}
		os.Exit(1)
	}
}

// world is what a process is given.
type world struct {
	args           []string
	lookupEnv      func(string) (string, bool)
	stdout, stderr io.Writer
}

func run(ctx context.Context, w world) error {
	return newCommand(w).Run(ctx, w.args)
}

func versionText() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
