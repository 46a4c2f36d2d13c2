package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/cli/processlog"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// asProgram has the binary of the test be gpu-fleet, for the tests that start one.
const asProgram = "GPU_FLEET_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	version = "2.0.0"
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// output is what a command line prints, as main has it.
func output(t *testing.T, env map[string]string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	log := &processlog.Log{Out: &errs, Terminal: true, Name: name, Ends: "gpu-fleet ends"}
	p := program{stdout: &out, stderr: &errs, log: log, getenv: func(key string) string { return cmp.Or(env[key], os.Getenv(key)) }}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // a command that runs is a mistake of the test
	defer cancel()
	err := p.run(ctx, append([]string{name}, args...))
	log.End(err, flushFor)
	return exitCode(err), out.String(), errs.String()
}

// Each page of help.
func TestHelp(t *testing.T) {
	var all strings.Builder
	_, page, _ := output(t, nil, "help")
	all.WriteString(page)
	verb := regexp.MustCompile(`(?m)^   ([a-z]+)  `)
	commands := verb.FindAllStringSubmatch(page[strings.Index(page, "COMMANDS:"):strings.Index(page, "FLAGS:")], -1)
	if len(commands) != 11 {
		t.Errorf("commands %q", commands)
	}
	for _, c := range commands {
		code, page, errs := output(t, nil, c[1], "--help")
		if code != 0 || errs != "" {
			t.Errorf("%s --help: %d, %s", c[1], code, errs)
		}
		fmt.Fprintf(&all, "\n======== %s\n%s", c[1], page)
	}
	for line := range strings.Lines(all.String()) {
		if len(line) > 101 {
			t.Errorf("more than 100 columns: %s", line)
		}
	}
	goldenfile.Compare(t, "testdata/help.golden", all.String())
}

// What is wrong in a command line is one line with key, value and remedy.
func TestCommandLines(t *testing.T) {
	valid := filepath.Join(t.TempDir(), "f.yaml")
	check.NoError(t, os.WriteFile(valid, []byte("clusters: [{name: dc1, kind: nomad, address: 'https://127.0.0.1:1', token_file: /nowhere/token, ca_file: /nowhere/ca}]\nledger: {file: ledger.json}\n"), 0o600))
	typo := filepath.Join(t.TempDir(), "typo.yaml")
	check.NoError(t, os.WriteFile(typo, []byte("clusters: [{name: dc1, kind: nomad, addrss: 'http://127.0.0.1:1'}]\npolicy: {max_gpu: 1}\n"), 0o600))
	var all strings.Builder
	for _, args := range [][]string{
		{"version"}, {"--version"}, {"validte"}, {"--config-fil=a"}, {"--log-level"}, {"--log-level=loud", "run"}, {"--log-format=xml"}, {"run", "a"}, {"init", "a"},
		{"--config", "/nowhere/f.yaml"}, {"validate", "/nowhere/f.yaml"}, {"validate", "--config-file=a", "b"},
		{"validate", valid}, {"validate", "--json", valid}, {"validate", typo}, {"validate", typo, "--json"}, {"--config", typo}, {"--config", valid}, {"--config", typo, "init"},
		{"stop"}, {"stop", ""}, {"stop", "--address=127.0.0.1:1", "driver", "rollout"}, {"status", "--address=http://127.0.0.1:1/"}, {"status", "--address=ftp://a"},
		{"plan", "--mode=of"}, {"plan", "--config", valid, "--address=127.0.0.1:1"}, {"resume", "--token-file=/nowhere/t"}, {"resume", "x"},
	} {
		code, out, errs := output(t, nil, args...)
		text := strings.NewReplacer(filepath.Dir(valid), "/etc", filepath.Dir(typo), "/etc").Replace(fmt.Sprintf("$ gpu-fleet %q\n%s%s=> %d\n", args, out, errs, code))
		all.WriteString(text)
	}
	goldenfile.Compare(t, "testdata/lines.golden", all.String())
}

// An environment variable sets a flag; the command line has precedence.
func TestEnvironment(t *testing.T) {
	dir := t.TempDir()
	check.NoError(t, os.WriteFile(dir+"/f.yaml", []byte("listen: 1"), 0o600))
	t.Setenv("GPU_FLEET_CONFIG_FILE", dir+"/f.yaml")
	t.Setenv("GPU_FLEET_LOG_LEVEL", "loud")
	if code, _, errs := output(t, nil, "run"); code != command.ExitUsage || errs != "gpu-fleet: --log-level = \"loud\": want debug, info, warn or error\n" {
		t.Errorf("%d, %s", code, errs)
	}
	if code, _, errs := output(t, nil, "run", "--log-level=info"); code != command.ExitUsage || !strings.Contains(errs, dir+"/f.yaml:1: listen") {
		t.Errorf("%d, %s", code, errs)
	}
	check.NoError(t, os.WriteFile(dir+"/g.yaml", []byte("clusters: 7"), 0o600))
	if code, _, errs := output(t, nil, "validate", dir+"/g.yaml"); code != command.ExitUsage || !strings.Contains(errs, dir+"/g.yaml:1: clusters") {
		t.Errorf("%d, %s", code, errs)
	}
}

// Shells are offered verbs, flags and values.
func TestCompletion(t *testing.T) {
	for line, want := range map[string]string{
		"":             "run init status plan stop resume validate schema version help completion",
		"plan --mode=": "--mode=act --mode=report",
		"--log-level=": "--log-level=debug --log-level=info --log-level=warn --log-level=error",
		"status --":    "--json --address --help --config-file --identity --log-level --log-format",
	} {
		args := strings.Fields(line)
		_, out, _ := output(t, nil, append(args, "--generate-shell-completion")...)
		var words []string
		for l := range strings.Lines(out) {
			word, _, _ := strings.Cut(strings.TrimSpace(l), ":")
			words = append(words, word)
		}
		if got := strings.Join(words, " "); got != want {
			t.Errorf("%q: %s, want %s", line, got, want)
		}
	}
}

func TestAddress(t *testing.T) {
	for listen, want := range map[string]string{
		":9410": "127.0.0.1:9410", "0.0.0.0:1": "127.0.0.1:1", "[::]:2": "127.0.0.1:2", "10.0.0.1:3": "10.0.0.1:3", "[::1]:4": "[::1]:4", "fleet:5": "fleet:5", "": "127.0.0.1:9410",
	} {
		if got := local(listen); got != want {
			t.Errorf("%s: %s, want %s", listen, got, want)
		}
	}
}
