package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Validation is what a valid configuration means.
type Validation struct {
	Warnings []string `json:"warnings,omitempty"`
	Means    []string `json:"means,omitempty"` // a line for each request
}

// validated is the output of validate --json.
type validated struct {
	Valid    bool      `json:"valid"`
	Problems []invalid `json:"problems,omitempty"`
	Validation
}

// invalid is a problem. Key is "" if it is of no single setting.
type invalid struct {
	Key    string `json:"key,omitempty"`
	Value  string `json:"value,omitempty"`
	Remedy string `json:"remedy,omitempty"`
	Text   string `json:"text"`
}

// errInvalid ends a process with ExitFailed. Its text is empty, because the problems were printed.
var errInvalid = errors.New("")

// validate needs no GPU and no running agent, so that a configuration can be checked where it is written.
func (p Program) validate(_ context.Context, c *cli.Command) error {
	if file := c.Args().First(); file != "" {
		flag, err := p.flagOf(c, file)
		if err != nil {
			return err
		}
		if c.IsSet(flag) {
			return command.Usagef("validate: want FILE or --%s, not both", flag)
		}
		if err := c.Set(flag, file); err != nil {
			return err
		}
	}
	v, err := p.Validate()
	if c.Bool("json") && !command.IsUsage(err) {
		return p.writeValidated(v, err)
	}
	if err != nil {
		return err
	}
	for _, line := range v.Warnings {
		fmt.Fprintln(p.Stdout, "warning: "+line)
	}
	for _, line := range v.Means {
		fmt.Fprintln(p.Stdout, line)
	}
	_, err = fmt.Fprintln(p.Stdout, "no problem")
	return err
}

func (p Program) writeValidated(v Validation, err error) error {
	out := validated{Valid: err == nil, Validation: v}
	for _, e := range importer.Split(err) {
		problem := invalid{Text: e.Error()}
		if s, ok := errors.AsType[*setting.Error](e); ok {
			problem.Key, problem.Value, problem.Remedy = s.Key, s.Value, s.Remedy
		}
		out.Problems = append(out.Problems, problem)
	}
	if err := report.WriteJSON(p.Stdout, out); err != nil || out.Valid {
		return err
	}
	return errInvalid
}

// flagOf is the flag for a file: that of the configuration file, or of the Nomad client's configuration.
func (p Program) flagOf(c *cli.Command, file string) (string, error) {
	switch {
	case !isClientConfig(file):
		return config.FlagConfigFile, nil
	case command.Find(c, "--"+FlagNomadConfig) == nil:
		return "", fmt.Errorf("validate: %s is the configuration of a Nomad client (HCL), which nomad-gpu reads: want a configuration file in YAML", file)
	}
	return FlagNomadConfig, nil
}

// clientBlock matches a block of a Nomad agent's configuration in HCL.
var clientBlock = regexp.MustCompile(`(?m)^\s*(plugin\s+"[^"]*"|client|server)\s*\{`)

// isClientConfig reports whether a file is the configuration of a Nomad agent, in HCL or JSON, by its name or, if it can be read, its content.
func isClientConfig(path string) bool {
	if filepath.Ext(path) == ".hcl" {
		return true
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	if strings.HasPrefix(strings.TrimSpace(string(text)), "{") {
		var keys map[string]json.RawMessage
		err := json.Unmarshal(text, &keys)
		return err == nil && (keys["plugin"] != nil || keys["client"] != nil)
	}
	return clientBlock.Match(text)
}
