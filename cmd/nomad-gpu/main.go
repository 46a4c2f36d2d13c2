// Command nomad-gpu offers the NVIDIA GPUs of a node to Nomad. Nomad starts it as a device plugin; started from a shell it has
// the commands of the running plugin's operator.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
)

// version is set by the linker. Nomad parses it, and prefers this plugin to nomad-device-nvidia if it is higher.
var version = "2.0.0"

func main() {
	// Nothing may be written to stdout before go-plugin's handshake.
	if nomadadapter.Launched(os.Getenv) {
		os.Exit(serve(os.Stderr))
	}
	name := strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe")
	os.Exit(command(name, os.Args[1:], os.Stdout, os.Stderr))
}

// command runs a command line and returns the exit code. A plugin block names the plugin by the name of its file.
func command(name string, args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprintf(stderr, introduction, name, version)
		return cli.ExitUsage
	}
	var f flags
	err := cli.Program{
		Name: name, Usage: "offer the NVIDIA GPUs of this node to Nomad", Version: agentName + " " + version, Description: description(name),
		Flags: f.declare(), Options: f.options, Validate: f.validate,
		Stdout: stdout, Stderr: stderr,
	}.Run(context.Background(), append([]string{name}, args...))
	cli.WriteError(stderr, name, err)
	return cli.ExitCode(err)
}
