package main

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/config"
)

// validate is the verb that reads flags, environment and configuration file, and says what is wrong with them.
// It needs no GPU and no agent, and changes nothing: a change can be checked where it is made.
func validate(w world, read func() (settings, error)) *cli.Command {
	return &cli.Command{
		Name: "validate", Usage: "read flags, environment and configuration file, and print every problem; exit code 1 if there is one",
		OnUsageError: usageError, HideHelpCommand: true,
		Action: func(_ context.Context, c *cli.Command) error {
			if c.Args().Present() {
				return fmt.Errorf("validate: unexpected argument %q: the file is named by --%s", c.Args().First(), config.FlagConfigFile)
			}
			s, err := read()
			if err != nil {
				return err
			}
			for _, line := range s.Summary() {
				fmt.Fprintln(w.stdout, line)
			}
			_, err = fmt.Fprintln(w.stdout, "no problem")
			return err
		},
	}
}
