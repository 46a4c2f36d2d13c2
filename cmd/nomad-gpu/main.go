// Command nomad-gpu offers the NVIDIA GPUs of a node to Nomad. Nomad starts it as a device plugin; started from a shell it has
// the commands of the running plugin's operator.
package main

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/process"
)

// version is set by the linker. Nomad parses it, and prefers this plugin to nomad-device-nvidia if it is higher.
var version = "2.0.0"

// agentName names the plugin's files in the state directory.
const agentName = "nomad-gpu"

func main() {
	// Nothing may be written to stdout before go-plugin's handshake.
	if process.Launched(os.Getenv) {
		os.Exit(serve(os.Stderr))
	}
	name := strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe")
	os.Exit(command(name, os.Args[1:], os.Stdout, os.Stderr))
}
