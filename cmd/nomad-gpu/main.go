// Command nomad-gpu offers the NVIDIA GPUs of a node to Nomad. Nomad starts it as a device plugin; started from a shell it has
// the commands of the running plugin's operator.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/agent/nomad"
	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/clientconfig"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/process"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	doctornomad "github.com/tandem-gpu/tandem/internal/operator/doctor/nomad"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
)

// version is set by the linker. Nomad parses it, and prefers this plugin to nomad-device-nvidia if it is higher.
var version = "2.0.0"

func main() {
	// Nothing may be written to stdout before go-plugin's handshake.
	if process.Launched(os.Getenv) {
		os.Exit(serve(os.Stderr))
	}
	name := strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe")
	os.Exit(runCommand(name, os.Args[1:], os.Stdout, os.Stderr))
}

// runCommand runs a command line and returns the exit code. A plugin block names the plugin by the name of its file. The flags are
// keys of the block: with them, the commands read the configuration that a plugin would have which started now.
func runCommand(name string, args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprintf(stderr, introduction, name, version)
		return command.ExitUsage
	}
	given := given{plugin: name, flags: config.NewFlags(config.NomadSpecs())}
	err := cli.Program{
		Name: name, Usage: "offer the NVIDIA GPUs of this node to Nomad", Version: nomad.Name + " " + version, Description: description(name),
		Flags: append(cli.Flags(config.NomadSpecs(), given.flags), cli.NomadConfig(&given.file)),
		Options: func() (agent.Options, error) {
			s, err := given.settings()
			return nomad.AgentOptions(s), err
		},
		Doctor: given.doctorOptions,
		Explain: func() explain.Adapter {
			s, _ := given.settings() // Options has the errors
			return nomad.Explain(s)
		},
		Validate: given.validate,
		Import:   importNomad(name), Shadow: shadowNomad(&given),
		Keys:   blockKeys(),
		Stdout: stdout, Stderr: stderr,
	}.Run(context.Background(), append([]string{name}, args...))
	command.WriteError(stderr, name, err)
	return cli.ExitCode(err)
}

// given is what a command line has of the configuration.
type given struct {
	plugin string // name of its file
	flags  config.Flags
	file   string // of the Nomad client's configuration; "" = none
}

// validate reads the block and the policy file with all of their problems.
func (g *given) validate() (cli.Validation, error) {
	b, unreadable := g.block()
	if b.PolicyFile == "" && g.file == "" {
		return cli.Validation{}, command.Usagef("validate: want a policy file, or one of the Nomad client that has the plugin block")
	}
	f, err := b.Check()
	return cli.Validation{Warnings: slices.Concat(f.Warnings, b.Missing()), Means: f.Summary()}, errors.Join(unreadable, err)
}

// block is the plugin's block in the file with the flags; the flags alone without a file, or with one that can't be read.
func (g *given) block() (config.Block, error) {
	if g.file == "" {
		return config.BlockOfFlags(g.flags), nil
	}
	keys, err := clientconfig.Read(g.file, g.plugin)
	return config.BlockWithFlags(keys, g.flags), err
}

// settings are those of block. With an error, they are valid.
func (g *given) settings() (config.Nomad, error) {
	b, unreadable := g.block()
	s, _, err := b.Read()
	return s, errors.Join(unreadable, err)
}

// doctorOptions are those of settings; without a file, of the plugin's block in the configuration of the Nomad agent of this node, if there
// is one, and of flags. The checks report the problems of that block.
func (g *given) doctorOptions(hostRoot string) (agent.Options, []doctor.Check, error) {
	s, err := g.settings()
	procRoot := s.Core.Roots.Proc
	if g.file == "" {
		s, _, _ = config.BlockWithFlags(config.Keys{Values: doctornomad.Block(hostRoot, procRoot)}, g.flags).Read()
	}
	return nomad.AgentOptions(s), doctornomad.Checks(doctornomad.Options{ProcRoot: procRoot}), err
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

 3. List the GPUs: nomad node status -self -verbose. Request one: device "nvidia/gpu" {}

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
