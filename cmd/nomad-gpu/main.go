// Command nomad-gpu offers the NVIDIA GPUs of a machine to Nomad. Nomad starts it as a device plugin;
// started by a person it says so, and answers for the plugin that runs and for the machine.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/internal/nomadadapter"
)

// version is set by the linker. Nomad parses it, and prefers it to nomad-device-nvidia's if it is higher.
var version = "2.0.0"

// Exit codes of a command that a person gave.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	// Nothing may be written to stdout before go-plugin's handshake.
	if nomadadapter.Launched(os.Getenv) {
		os.Exit(serve(os.Stderr))
	}
	name := strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe")
	os.Exit(command(name, os.Args[1:], os.Stdout, os.Stderr))
}

// command does what a person asks for. The name of the file is what a plugin block has to name.
func command(name string, args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprintf(stderr, introduction, name, version)
		return exitUsage
	}
	switch verb, args := args[0], args[1:]; verb {
	case "version", "-version", "--version":
		fmt.Fprintln(stdout, "nomad-gpu", version)
	case "help", "-h", "-help", "--help":
		writeHelp(stdout, name)
	default:
		do, ok := verbs[verb]
		if !ok {
			fmt.Fprintf(stderr, "%s: unknown command %q; try: %[1]s help\n", name, verb)
			return exitUsage
		}
		err := do(context.Background(), args, stdout)
		if errors.Is(err, flag.ErrHelp) {
			writeHelp(stdout, name)
			return exitOK
		}
		return outcome(err, name, verb, stderr)
	}
	return exitOK
}

// outcome says what went wrong, a line for each thing.
func outcome(err error, name, verb string, stderr io.Writer) int {
	if err == nil {
		return exitOK
	}
	if misread, ok := errors.AsType[usageError](err); ok {
		fmt.Fprintf(stderr, "%s %s: %v; try: %[1]s help\n", name, verb, misread)
		return exitUsage
	}
	for line := range strings.Lines(err.Error()) {
		fmt.Fprintf(stderr, "%s %s: %s\n", name, verb, strings.TrimSuffix(line, "\n"))
	}
	return exitFailed
}
