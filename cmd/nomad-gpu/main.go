// Command nomad-gpu offers the NVIDIA GPUs of a machine to Nomad. Nomad starts it as a device plugin;
// started by a person it says so, and answers a few questions about the machine.
package main

import (
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
		fmt.Fprintf(stdout, introduction+usage, name, version)
	case "inspect":
		return inspectMachine(name, args, stdout, stderr)
	default:
		fmt.Fprintf(stderr, "%s: unknown command %q; try: %[1]s help\n", name, verb)
		return exitUsage
	}
	return exitOK
}
