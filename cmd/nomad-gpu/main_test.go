package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
)

// Nomad names a plugin by its file, which an operator may rename: the plugin block has that name, the version that of the program.
func TestRenamedFile(t *testing.T) {
	renamed := filepath.Join(t.TempDir(), "nomad-device-nvidia")
	check.NoError(t, os.Symlink(binaries.Path(t, "nomad-gpu"), renamed))
	client := filepath.Join(t.TempDir(), "client.hcl")
	if err := os.WriteFile(client, []byte("plugin \"nomad-device-nvidia\" {\n  config { degraded = \"no\" }\n}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args []string
		code int
		want string // a part of the output
	}{
		{[]string{"doctor", "--nomad-config=" + client}, cli.ExitFound, client + `:2: degraded = "no": want schedulable or unhealthy`},
		{nil, command.ExitUsage, `plugin "nomad-device-nvidia" {`}, {[]string{"version"}, command.ExitOK, "nomad-gpu " + binaries.Version + "\n"},
		{[]string{"--state-dir=/nowhere"}, command.ExitUsage, "nomad-device-nvidia: want a command: see nomad-device-nvidia help\n"},
	} {
		cmd := exec.CommandContext(t.Context(), renamed, tc.args...)
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != tc.code || !strings.Contains(string(out), tc.want) {
			t.Errorf("%v: %v, exit code %d, want %d and %q:\n%s", tc.args, err, code, tc.code, tc.want, out)
		}
	}
}

// What stands for lost lines is a line as Nomad reads them.
func TestLostLines(t *testing.T) {
	var line struct {
		Level   string `json:"@level"`
		Message string `json:"@message"`
		At      string `json:"@timestamp"`
		Lines   int    `json:"lines"`
	}
	check.NoError(t, json.Unmarshal(lostLines(7), &line))
	if line.Level != "warn" || line.Lines != 7 || line.At == "" || !strings.Contains(line.Message, "lines lost") {
		t.Errorf("%+v", line)
	}
}

// Of this module's packages that a plugin uses only node/proofcommand and node/gpureset start processes, which get none of the plugin's files (their tests
// show that): another child would inherit the files by whose end Nomad detects that of the plugin. The command mps-daemon has a package that does.
func TestStartsNoProcess(t *testing.T) {
	const module = "github.com/tandem-gpu/tandem/"
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", `{{.ImportPath}}:{{range .Imports}} {{.}} {{end}}`, ".")
	list.Stderr = os.Stderr
	out, err := list.Output()
	check.NoError(t, err)
	n := 0
	for line := range strings.Lines(string(out)) {
		name, imports, _ := strings.Cut(line, ":")
		if !strings.HasPrefix(name, module) {
			continue
		}
		n++
		const supervisor, cli = module + "internal/node/mps/supervisor", module + "internal/cli"
		const proof, reset = module + "internal/node/proofcommand", module + "internal/node/gpureset"
		if strings.Contains(imports, " os/exec ") && name != supervisor && name != proof && name != reset || strings.Contains(imports, " "+supervisor+" ") && name != cli {
			t.Errorf("%s imports os/exec or %s", name, supervisor)
		}
	}
	if n < 10 {
		t.Errorf("only %d packages of this module", n)
	}
}
