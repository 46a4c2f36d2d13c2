package main

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	urfave "github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// flags are the flags of the commands: where the running plugin's socket is, and what a plugin that started now would be
// configured with.
type flags struct {
	stateDir, policyFile, migStrategy string
	roots                             core.Roots
}

func (f *flags) declare() []urfave.Flag {
	path := func(name, usage string, to *string) urfave.Flag {
		return &urfave.StringFlag{Name: name, Usage: usage, Destination: to, Validator: absolute, HideDefault: true}
	}
	f.stateDir = config.DefaultHealth().StateDir
	return []urfave.Flag{
		&urfave.StringFlag{Name: "state-dir", Value: f.stateDir, Usage: "folder of the plugin's socket and history, as in the config block",
			Destination: &f.stateDir, Validator: func(v string) error {
				if v == "" {
					return nil
				}
				return absolute(v)
			}},
		&urfave.StringFlag{Name: config.FlagConfigFile, Aliases: []string{"policy-file"}, Destination: &f.policyFile,
			Usage: "policy file: which GPUs, under which names, for how many (default: all, each for one)"},
		&urfave.StringFlag{Name: "mig-strategy", Destination: &f.migStrategy,
			Usage: "none, single or mixed (default: as the policy file, else mixed)"},
		path("driver-root", "where the driver is installed (default: /)", &f.roots.Driver),
		path("dev-root", "folder that holds dev/nvidia0 (default: the driver root)", &f.roots.Dev),
		path("sysfs-root", "where sysfs is mounted (default: /sys)", &f.roots.Sys),
		path("procfs-root", "where procfs is mounted (default: /proc)", &f.roots.Proc),
	}
}

func absolute(path string) error {
	if !filepath.IsAbs(path) {
		return errors.New("want an absolute path")
	}
	return nil
}

// options are those of a plugin that would start now.
func (f *flags) options() (agent.Options, error) {
	cfg := core.DefaultConfig()
	cfg.Roots = core.Roots{
		Driver: cmp.Or(f.roots.Driver, cfg.Roots.Driver), Dev: cmp.Or(f.roots.Dev, f.roots.Driver, cfg.Roots.Dev),
		Sys: cmp.Or(f.roots.Sys, cfg.Roots.Sys), Proc: cmp.Or(f.roots.Proc, cfg.Roots.Proc),
	}
	o := agent.Options{Name: agentName, Health: config.Health{StateDir: f.stateDir}, Open: agent.OpenDriver(cfg.Roots, false)}
	var file config.File
	var err error
	if f.policyFile != "" {
		if file, err = config.ReadFile(f.policyFile, policy.Nomad); err != nil {
			return o, err
		}
	}
	cfg.Policy, cfg.MIG = file.Policy, cmp.Or(inventory.MIGStrategy(f.migStrategy), file.MIG, inventory.MIGMixed)
	o.Core, o.MPSRoot = cfg, file.MPSRoot
	return o, cfg.Validate()
}

// validate reads the policy file, and returns what it means, or every problem as an error. It reads no devices: whether a rule
// applies to a device, inspect shows.
func (f *flags) validate() ([]string, error) {
	if f.policyFile == "" {
		return nil, cli.Usagef("validate: want a policy file")
	}
	file, err := config.ReadFile(f.policyFile, policy.Nomad)
	return file.Summary(), err
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

// blockKeys are the keys of the config block but for those of health.
const blockKeys = `
Keys of the config block, all optional:
  enabled             false: offer nothing and do not open the driver (true)
  ignored_gpu_ids     UUIDs of GPUs or MIG instances not to offer ([])
  fingerprint_period  between full reads of the node's devices ("1m")
  driver_root, dev_root, sysfs_root, procfs_root   as the flags
  policy_file         which GPUs, under which names, for how many: see docs/policy.md; read again at SIGHUP
  mig_strategy        none, single or mixed (as the policy file, else mixed)
  group_by            numa or nvlink: a group for each NUMA node or NVLink island, so that a job's GPUs are near (none)
  mps_root            holds nvidia.com/<pool>/pipe of MPS daemons (as the policy file, else "/run/nvidia/mps")
`

// description is the text of the help.
func description(name string) string {
	var b strings.Builder
	fmt.Fprintf(&b, introduction, name, version)
	b.WriteString(blockKeys)
	for _, k := range config.HealthSpecs() {
		usage := fmt.Sprintf("%s (%s)", k.Usage, k.Default)
		if k.HCL == config.XIDs {
			usage = `effects of single XIDs: xids = { "63" = "ignore", "94" = "degraded", "999" = "unhealthy" }`
		}
		fmt.Fprintf(&b, "  %-18s  %s\n", k.HCL, usage)
	}
	return strings.TrimSuffix(b.String(), "\n")
}
