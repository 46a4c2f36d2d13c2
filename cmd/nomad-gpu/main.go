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

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/doctor"
	"github.com/tandem-gpu/tandem/internal/doctor/nomad"
	"github.com/tandem-gpu/tandem/internal/explain"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/clientconfig"
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

// agentOptions are what the settings mean for an agent.
func agentOptions(s config.Nomad) agent.Options {
	return agent.Options{
		Name: agentName, Core: s.Core, Health: s.Health, MPSRoot: s.MPSRoot, Open: agent.OpenDriver(s.Core, false), CDI: cdiOptions(s),
	}
}

// cdiOptions are those of the CDI specifications. The vendor differs from that of k8s-gpu, which may run on the same host.
func cdiOptions(s config.Nomad) cdi.Options {
	roots := s.Core.Roots // of the host: Nomad starts the plugin there
	return cdi.Options{
		Vendor: "nomad.device-plugin.nvidia.com", Folder: s.CDIDir, HookPath: s.CDIHookPath,
		DriverRoot: roots.Driver, ContainerRoot: roots.Driver, DevRoot: roots.Dev, ContainerDevRoot: roots.Dev, SysRoot: roots.Sys,
	}
}

// command runs a command line and returns the exit code. A plugin block names the plugin by the name of its file. The flags are
// keys of the block: with them, the commands read the configuration that a plugin would have which started now.
func command(name string, args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprintf(stderr, introduction, name, version)
		return cli.ExitUsage
	}
	values := config.NewFlags(config.NomadSpecs())
	file := "" // of the Nomad client's configuration
	block := func() (config.Block, error) {
		var keys config.Keys
		if file != "" {
			var err error
			if keys, err = clientconfig.Read(file, name); err != nil {
				return config.Block{}, err
			}
		}
		return config.BlockWithFlags(keys, values), nil
	}
	err := cli.Program{
		Name: name, Usage: "offer the NVIDIA GPUs of this node to Nomad", Version: agentName + " " + version, Description: description(name),
		Flags: append(cli.Flags(config.NomadSpecs(), values), cli.NomadConfig(&file)),
		Options: func() (agent.Options, error) {
			b, err := block()
			if err != nil {
				return agent.Options{Name: agentName}, err
			}
			s, _, err := b.Read()
			return agentOptions(s), err
		},
		Doctor: func(hostRoot string) (agent.Options, []doctor.Check, error) { return doctorOptions(values, hostRoot) },
		Explain: func() explain.Adapter {
			b, _ := block() // Options has the errors
			s, _, _ := b.Read()
			return explainAdapter(s, newGroups(s))
		},
		Validate: func() ([]string, error) {
			b, err := block()
			switch {
			case err != nil:
				return nil, err
			case b.PolicyFile == "" && file == "":
				return nil, cli.Usagef("validate: want a policy file, or --nomad-config with the file that has the plugin block")
			}
			f, err := b.Check()
			return f.Summary(), err
		},
		Import: importNomad(name), Shadow: shadowNomad(name, values, block),
		Keys:   blockKeys(),
		Stdout: stdout, Stderr: stderr,
	}.Run(context.Background(), append([]string{name}, args...))
	cli.WriteError(stderr, name, err)
	return cli.ExitCode(err)
}

// doctorOptions are those of the plugin's block in the configuration of the Nomad agent of this host, if there is one, and of flags.
// The checks report the problems of the block.
func doctorOptions(values config.Flags, hostRoot string) (agent.Options, []doctor.Check, error) {
	flags, _, err := config.BlockOfFlags(values).Read()
	procRoot := flags.Core.Roots.Proc
	s, _, _ := config.BlockWithFlags(config.Keys{Values: nomad.Block(hostRoot, procRoot)}, values).Read()
	return agentOptions(s), nomad.Checks(nomad.Options{ProcRoot: procRoot}), err
}

// blockKeys are the keys of the plugin block that are no flags of the commands.
func blockKeys() (keys []string) {
	for _, s := range config.NomadSpecs() {
		if s.Flag == "" {
			keys = append(keys, s.HCL)
		}
	}
	return keys
}

// introduction is printed to a person who starts the plugin: %[1]s is the name of the file, %[2]s the version.
const introduction = `%[1]s (nomad-gpu %[2]s) is a Nomad device plugin, which Nomad starts.

 1. Put this file into the plugin_dir of the Nomad client (by default <data_dir>/plugins).
 2. Name the file in the client's configuration, and restart the client:

        plugin "%[1]s" {
          config {}
        }

 3. List the GPUs with "nomad node status -self -verbose", request one with: device "nvidia/gpu" {}

To print what it offers, or would offer: %[1]s inspect. All commands: %[1]s help
`

// description is the text of the help.
func description(name string) string {
	var b strings.Builder
	fmt.Fprintf(&b, introduction, name, version)
	fmt.Fprint(&b, "\nKeys of the config block, all optional:\n")
	for _, s := range config.NomadSpecs() {
		usage := s.Usage
		switch {
		case s.HCL == config.XIDs:
			usage = `effects of single XIDs: xids = { "63" = "ignore", "94" = "degraded", "999" = "unhealthy" }`
		case s.Default != "":
			usage += " (" + s.Default + ")"
		}
		fmt.Fprintf(&b, "  %-18s  %s\n", s.HCL, usage)
	}
	return strings.TrimSuffix(b.String(), "\n")
}
