package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
)

const (
	statementType = "https://in-toto.io/Statement/v1"
	predicateType = "https://slsa.dev/provenance/v1"
	// What these mean is in this document.
	buildType    = repository + "/blob/main/docs/releasing.md#provenance"
	localBuilder = repository + "/blob/main/docs/releasing.md#on-your-own-machine"
)

// pairs is a flag that may be repeated: NAME=VALUE.
type pairs [][2]string

func (p *pairs) String() string { return "" }

func (p *pairs) Set(s string) error {
	i := strings.LastIndex(s, "=") // names are URIs
	if i < 0 {
		return fmt.Errorf("%q: want NAME=VALUE", s)
	}
	*p = append(*p, [2]string{s[:i], s[i+1:]})
	return nil
}

// build is what is recorded of a build.
type build struct {
	version, commit, tag, base, arches string
	builder, invocation                string
	modified                           bool
	subjects, materials, tools         pairs
}

// provenanceCommand writes an in-toto statement with SLSA's predicate over the files named as arguments.
func provenanceCommand(_ context.Context, args []string) error {
	var b build
	flags := flag.NewFlagSet("provenance", flag.ContinueOnError)
	output := flags.String("output", "", "the `FILE` to write")
	flags.StringVar(&b.version, "version", "", "the `VERSION` of Tandem")
	flags.StringVar(&b.commit, "commit", "", "the `COMMIT` that was built")
	flags.StringVar(&b.tag, "tag", "", "its `TAG`, if it has one")
	flags.StringVar(&b.base, "base", "", "`BASE` of the image")
	flags.StringVar(&b.arches, "arches", "", "`ARCHES` that were built")
	flags.StringVar(&b.builder, "builder", localBuilder, "`URI` of what ran the build")
	flags.StringVar(&b.invocation, "invocation", "", "`URI` of the run")
	flags.BoolVar(&b.modified, "modified", false, "the working tree differed from the commit")
	flags.Var(&b.subjects, "subject", "`NAME=SHA256` of what is no file")
	flags.Var(&b.materials, "material", "`URI=SHA256` of what was built in")
	flags.Var(&b.tools, "tool", "`NAME=VERSION` of a program")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for _, path := range flags.Args() {
		digest, err := digestOf(path)
		if err != nil {
			return err
		}
		b.subjects = append(b.subjects, [2]string{filepath.Base(path), digest})
	}
	if len(b.commit) != 40 || len(b.subjects) == 0 {
		return errors.New("want -commit with 40 digits and at least one file")
	}
	return writeJSON(*output, b.statement())
}

func (b build) statement() object {
	var subjects []object
	for _, s := range b.subjects {
		subjects = append(subjects, object{"name": s[0], "digest": object{"sha256": s[1]}})
	}
	source := repository
	if b.tag != "" {
		source += "@refs/tags/" + b.tag
	}
	dependencies := []object{{"uri": "git+" + source, "digest": object{"gitCommit": b.commit}}}
	for _, m := range b.materials {
		dependencies = append(dependencies, object{"uri": m[0], "digest": object{"sha256": m[1]}})
	}
	tools := object{}
	for _, t := range b.tools {
		tools[t[0]] = t[1]
	}
	details := object{"builder": object{"id": b.builder, "version": tools}}
	if b.invocation != "" {
		details["metadata"] = object{"invocationId": b.invocation}
	}
	return object{
		"_type": statementType, "subject": subjects, "predicateType": predicateType,
		"predicate": object{
			"buildDefinition": object{
				"buildType": buildType,
				"externalParameters": object{
					"command": fmt.Sprintf("make release BASE=%s ARCHES=%q", b.base, b.arches), "version": b.version, "tag": b.tag,
					"base": b.base, "arches": strings.Fields(b.arches),
				},
				"internalParameters":   object{"modifiedWorkingTree": b.modified},
				"resolvedDependencies": dependencies,
			},
			"runDetails": details,
		},
	}
}
