package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	urfave "github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/agent/nomad"
	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/cli/importer/hashicorp"
	"github.com/tandem-gpu/tandem/internal/cli/shadow"
	"github.com/tandem-gpu/tandem/internal/cli/shadow/nomadshadow"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/clientconfig"
)

// importNomad reads the plugin block of nomad-device-nvidia. name is the name of this program's file.
func importNomad(name string) *cli.Import {
	return &cli.Import{
		Of: "nomad-device-nvidia (the configuration of a Nomad agent)", Formats: []string{hashicorp.FromHCL}, Extension: ".hcl",
		Read: func(path string, text []byte, _ string) (importer.Result, error) {
			return hashicorp.Import(hashicorp.Input{Path: path, Text: text, Plugin: name})
		},
	}
}

const (
	flagAddress   = "address"
	flagTokenFile = "token-file"
)

// shadowNomad compares this agent with the plugin whose devices the Nomad node has.
func shadowNomad(g *given) *cli.Shadow {
	return &cli.Shadow{
		Where: "the API of the Nomad agent",
		Flags: []urfave.Flag{
			&urfave.StringFlag{Name: flagAddress, Usage: "of the agent's HTTP API: http://, https:// or unix:// [$NOMAD_ADDR]; " + config.DefaultNomadAddress + " if not given"},
			&urfave.StringFlag{Name: flagTokenFile, Usage: "file with an ACL token that allows agent:read and node:read [$NOMAD_TOKEN is the token itself]"},
		},
		Open: func(get func(string) string) (agent.Options, func(context.Context, core.State) (shadow.Report, error), error) {
			address := cmp.Or(get(flagAddress), os.Getenv("NOMAD_ADDR"), config.DefaultNomadAddress)
			client := agentapi.New(agentapi.Options{
				Address: address, TokenFile: get(flagTokenFile), Token: os.Getenv("NOMAD_TOKEN"),
				Log: slog.New(slog.DiscardHandler), LookupEnv: os.LookupEnv,
			})
			s, err := g.settings()
			if _, ok := errors.AsType[*clientconfig.NoBlockError](err); ok {
				s, err = g.imported()
			}
			compare := func(ctx context.Context, state core.State) (shadow.Report, error) {
				r, err := nomadshadow.Compare(ctx, state, s.GroupBy, client)
				if err != nil {
					err = fmt.Errorf("the Nomad agent's API at %s (--%s or NOMAD_ADDR): %w", address, flagAddress, err)
				}
				return r, err
			}
			return nomad.AgentOptions(s), compare, err
		},
	}
}

// imported are the settings that import makes of the block of nomad-device-nvidia in the file, with the flags.
func (g *given) imported() (config.Nomad, error) {
	text, err := os.ReadFile(g.file)
	if err != nil {
		return config.Nomad{}, err
	}
	keys, err := hashicorp.Keys(hashicorp.Input{Path: g.file, Text: text, Plugin: g.plugin})
	if err != nil {
		return config.Nomad{}, err
	}
	s, _, err := config.BlockWithFlags(config.Keys{Values: keys}, g.flags).Read()
	return s, err
}
