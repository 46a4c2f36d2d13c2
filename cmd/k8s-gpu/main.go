// Command k8s-gpu offers this machine's NVIDIA GPUs to the kubelet, as its device plugin.
//
// It takes the place of NVIDIA's k8s-device-plugin: the same flags, environment, configuration file,
// resource names and responses, for what this version supports; what it does not is refused by name.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/asynclog"
)

// version is set by the linker; "go install ...@v2.0.0" has it from the module instead.
var version string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	context.AfterFunc(ctx, stop) // a second signal kills
	stderr := asynclog.New(os.Stderr, missing)
	err := inTime(ctx, func() error {
		return run(ctx, world{args: os.Args, lookupEnv: os.LookupEnv, stdout: os.Stdout, stderr: stderr})
	})
	if err != nil {
		for line := range strings.Lines(err.Error()) {
			fmt.Fprintln(stderr, "k8s-gpu:", strings.TrimSuffix(line, "\n"))
		}
	}
	stderr.Flush()
	if err != nil && !errors.Is(err, errLeft) {
		os.Exit(1)
	}
}

// stopAtMost is how long the end may take: a little more than what a hung driver call is given. A disk or a
// mount that hangs is given no more, as nothing here can end a wait for one.
const stopAtMost = 1800 * time.Millisecond

// errLeft says that something did not end in time. The process ends all the same, and as it was told to.
var errLeft = fmt.Errorf("not all has ended after %v: the rest is left to the kernel", stopAtMost)

// inTime does something until ctx ends, and then waits for it, but not for ever.
func inTime(ctx context.Context, do func() error) error {
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(stopAtMost):
		return errLeft
	}
}

// missing is a line of the log about those that are not in it.
func missing(lines int64) []byte {
	var line bytes.Buffer
	slog.New(slog.NewTextHandler(&line, nil)).Warn("lines of this log are lost: nobody read it", "lines", lines)
	return line.Bytes()
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
