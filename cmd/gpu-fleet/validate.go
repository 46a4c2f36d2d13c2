package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/fleet/config"
	invalidsetting "github.com/tandem-gpu/tandem/internal/util/setting"
)

// validated is the output of validate --json: the form of that of the agents' commands.
type validated struct {
	Valid    bool      `json:"valid"`
	Problems []invalid `json:"problems,omitempty"`
	Warnings []string  `json:"warnings,omitempty"`
	Means    []string  `json:"means,omitempty"`
}

// invalid is a problem. Key is "" if it is of no single setting.
type invalid struct {
	Key    string `json:"key,omitempty"`
	Value  string `json:"value,omitempty"`
	Remedy string `json:"remedy,omitempty"`
	Text   string `json:"text"`
}

// validate asks no cluster, and needs none of the files that the configuration names, so that it can be checked where it is written.
func (p *program) validate(_ context.Context, c *cli.Command) error {
	path := p.file
	if file := c.Args().First(); file != "" {
		if c.IsSet("config-file") && p.getenv("GPU_FLEET_CONFIG_FILE") == "" {
			return command.Usagef("validate: want FILE or --config-file, not both")
		}
		path = file
	}
	read, err := config.Load(path)
	out := validated{Valid: err == nil}
	if err == nil {
		out.Means = read.Summary()
		unread, later := read.Unread()
		for _, problem := range append(unread, later...) {
			out.Warnings = append(out.Warnings, problem.Error())
		}
	}
	switch {
	case c.Bool("json"):
		return p.writeValidated(out, err)
	case err != nil:
		return &configError{err}
	}
	for _, line := range out.Warnings {
		fmt.Fprintln(p.stdout, "warning: "+line)
	}
	for _, line := range append(out.Means, "no problem") {
		fmt.Fprintln(p.stdout, line)
	}
	return nil
}

// errInvalid ends the process. Its text is empty, because the problems were printed.
var errInvalid = errors.New("")

func (p *program) writeValidated(out validated, err error) error {
	for _, e := range split(err) {
		one := invalid{Text: e.Error()}
		if s, ok := errors.AsType[*invalidsetting.Error](e); ok {
			one.Key, one.Value, one.Remedy = s.Key, s.Value, s.Remedy
		}
		out.Problems = append(out.Problems, one)
	}
	if err := p.writeJSON(out); err != nil || out.Valid {
		return err
	}
	return &configError{errInvalid}
}

func (p *program) writeJSON(v any) error {
	e := json.NewEncoder(p.stdout)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// split are the errors that errors.Join has joined; the error itself if it is another one.
func split(err error) []error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}
