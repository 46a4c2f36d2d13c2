// Command matrix runs the conformance tests against other versions of Kubernetes and Nomad than the one that their go.mod
// names, prints a table and keeps the results in a file, from which docs/compatibility.md is made.
//
// Without arguments it runs every version of versions.go, otherwise those named: "kubelet@v1.34.4 nomad@v1.10.5".
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("matrix: ")
	out := flag.String("results", "test/matrix/results.json", "file of the results; those of versions that are not run stay")
	logs := flag.String("logs", "dist/matrix", "folder for the output of the tests, and of failed builds")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *out, *logs, flag.Args())
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, out, logs string, args []string) error {
	chosen, err := choose(args)
	if err != nil {
		return err
	}
	if os.Getuid() != 0 {
		return fmt.Errorf("needs root: the kubelet's tests mount a directory, and Nomad's run tasks of the driver exec")
	}
	if err := os.MkdirAll(logs, 0o755); err != nil {
		return err
	}
	results, err := load(out)
	if err != nil {
		return err
	}
	var ran []Result
	for _, c := range chosen {
		log.Printf("%s: builds and runs, the output is in %s", c, filepath.Join(logs, c.String()+".log"))
		r, err := c.test(ctx, filepath.Join(logs, c.String()+".log"))
		if ctx.Err() != nil {
			return fmt.Errorf("%s: %w", c, context.Cause(ctx))
		}
		if err != nil {
			r.Error = err.Error()
		}
		ran = append(ran, r)
		if errors.Is(err, errNoModule) {
			continue // nothing is known about the version
		}
		results = results.with(r) // after each: a run that is interrupted has the results until then
		if err := results.save(out); err != nil {
			return err
		}
	}
	table(ran)
	return failures(ran)
}

// choose returns the versions of the arguments, or all.
func choose(args []string) ([]version, error) {
	all := versions()
	if len(args) == 0 {
		return all, nil
	}
	var chosen []version
	for _, arg := range args {
		name, number, _ := strings.Cut(arg, "@")
		s, ok := subjects[name]
		if !ok || !strings.HasPrefix(number, "v1.") {
			return nil, fmt.Errorf("%q is no version: want for example %s or %s", arg, all[0], all[len(all)-1])
		}
		chosen = append(chosen, version{s, number})
	}
	return chosen, nil
}

func table(results []Result) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "VERSION\tTESTS\tPASSED\tFAILED\tSKIPPED\tTESTS TOOK\tDATE")
	for _, r := range results {
		_, _ = fmt.Fprintf(w, "%s %s\t%d\t%d\t%d\t%d\t%v\t%s\n", r.Subject, r.Version, r.Tests(), r.Passed, len(r.Failed), len(r.Skipped),
			time.Duration(r.Seconds)*time.Second, r.Date)
	}
	_ = w.Flush()
}

// failures is an error that names what failed, or nil.
func failures(results []Result) error {
	var failed []string
	for _, r := range results {
		switch {
		case r.Error != "":
			failed = append(failed, fmt.Sprintf("%s %s: %s", r.Subject, r.Version, r.Error))
		case len(r.Failed) > 0:
			failed = append(failed, fmt.Sprintf("%s %s: %s failed", r.Subject, r.Version, strings.Join(r.Failed, ", ")))
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return fmt.Errorf("%s", strings.Join(failed, "\nmatrix: "))
}

// command runs a program of the Go toolchain and returns its standard output.
func command(ctx context.Context, dir string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		var detail string
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			detail = strings.TrimSpace(string(exit.Stderr))
		}
		return nil, fmt.Errorf("go %s: %w: %s", strings.Join(args, " "), err, detail)
	}
	return out, nil
}
