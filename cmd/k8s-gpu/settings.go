package main

import (
	"context"
	"net"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/config"
)

// settings are those of the agent.
type settings = config.Kubernetes

// checkAddress checks the address of a TCP listener. The port may be a name of /etc/services.
func checkAddress(address string) error {
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = net.DefaultResolver.LookupPort(context.Background(), "tcp", port)
	}
	return err
}

// cliFlags declares the options to the command line. Hidden ones are accepted and not listed.
func cliFlags(values config.Flags) []cli.Flag {
	var flags []cli.Flag
	for _, s := range config.KubernetesSpecs() {
		if s.Flag != "" {
			flags = append(flags, &cli.GenericFlag{
				Name: s.Flag, Aliases: s.Aliases, Value: values[s.Flag], Hidden: s.Hidden,
				Usage: s.Usage + " [$" + strings.Join(s.Env, ", $") + "]",
			})
		}
	}
	return flags
}
