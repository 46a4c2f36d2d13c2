package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// Result is what the tests of one version gave.
type Result struct {
	Subject string   `json:"subject"`
	Version string   `json:"version"`
	Passed  int      `json:"passed"`
	Failed  []string `json:"failed"`
	Skipped []string `json:"skipped"`
	Seconds int      `json:"seconds"` // of the tests, without the build
	Date    string   `json:"date"`
	Agent   string   `json:"agent"` // the last commit that changed the agents
	Machine string   `json:"machine"`
	Error   string   `json:"error,omitempty"` // why the tests could not be built or did not end
}

// Tests is how many there are; subtests are parts of theirs.
func (r Result) Tests() int { return r.Passed + len(r.Failed) + len(r.Skipped) }

// test builds the conformance test with this version and runs it; log gets the output.
func (v version) test(ctx context.Context, log string) (Result, error) {
	r := Result{
		Subject: v.name, Version: v.number, Failed: []string{}, Skipped: []string{}, Date: time.Now().UTC().Format(time.DateOnly),
		Machine: runtime.GOOS + "/" + runtime.GOARCH + ", " + runtime.Version(),
	}
	r.Agent = commit(ctx)
	dir, err := os.MkdirTemp("", "matrix")
	if err != nil {
		return r, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file, err := os.Create(log)
	if err != nil {
		return r, err
	}
	defer func() { _ = file.Close() }()
	module, err := v.writeModule(ctx, dir)
	if err != nil {
		return r, err
	}
	folders := []string{v.folder}
	for _, p := range v.packages {
		folders = append(folders, filepath.Join(v.folder, p))
	}
	var programs []string
	for i, folder := range folders {
		programs = append(programs, filepath.Join(dir, fmt.Sprintf("conformance-%d.test", i)))
		if err := v.build(ctx, module, folder, programs[i], file); err != nil {
			return r, err
		}
	}
	began := time.Now()
	for i, folder := range folders {
		err = errors.Join(err, execute(ctx, folder, programs[i], file, &r))
	}
	r.Seconds = int(time.Since(began).Seconds())
	return r, err
}

// build compiles the tests of a folder; what the toolchain writes goes to log.
func (v version) build(ctx context.Context, module, folder, program string, log io.Writer) error {
	tags, err := v.tags()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-mod=mod", "-modfile="+module, "-tags="+tags, "-trimpath", "-vet=off", "-c", "-o", program, ".")
	cmd.Dir, cmd.Stdout, cmd.Stderr = folder, log, log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("the tests of %s can't be built with this version: %w", folder, err)
	}
	return nil
}

// execute runs the tests of a folder there and counts.
func execute(ctx context.Context, folder, program string, log io.Writer, r *Result) error {
	before, failed := r.Tests(), len(r.Failed)
	cmd := exec.CommandContext(ctx, program, "-test.v=test2json", "-test.count=1", "-test.timeout=30m")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	output := &bytes.Buffer{}
	cmd.Dir, cmd.Stdout, cmd.Stderr = folder, io.MultiWriter(log, output), log
	ended := cmd.Run()
	events, err := toJSON(ctx, output)
	if err != nil {
		return err
	}
	for {
		var e struct{ Action, Test string }
		if err := events.Decode(&e); err == io.EOF {
			break
		} else if err != nil {
			return err
		}
		if e.Test == "" || strings.Contains(e.Test, "/") {
			continue
		}
		switch e.Action {
		case "pass":
			r.Passed++
		case "fail":
			r.Failed = append(r.Failed, e.Test)
		case "skip":
			r.Skipped = append(r.Skipped, e.Test)
		}
	}
	if r.Tests() == before {
		return errors.Join(errors.New("no test ran"), ended)
	}
	if ended != nil && len(r.Failed) == failed {
		return fmt.Errorf("the tests ended early: %w", ended)
	}
	return nil
}

// toJSON converts the output of a test program as "go test -json" does.
func toJSON(ctx context.Context, output io.Reader) (*json.Decoder, error) {
	cmd := exec.CommandContext(ctx, "go", "tool", "test2json")
	cmd.Stdin = output
	converted, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go tool test2json: %w", err)
	}
	return json.NewDecoder(bytes.NewReader(converted)), nil
}

// commit is the last one that changed the agents, with a mark if the working tree has other changes of them.
func commit(ctx context.Context) string {
	agents := []string{"--", "cmd", "internal", "go.mod"}
	out, err := exec.CommandContext(ctx, "git", append([]string{"log", "-1", "--format=%h", "--abbrev=12"}, agents...)...).Output()
	if err != nil {
		return "unknown" // an archive has no repository
	}
	id := strings.TrimSpace(string(out))
	if err := exec.CommandContext(ctx, "git", append([]string{"diff", "--quiet", "HEAD"}, agents...)...).Run(); err != nil {
		id += "+"
	}
	return id
}
