package cli_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// programs are both agents: what is tested here holds for each.
var programs = []string{"nomad-gpu", "k8s-gpu"}

// run runs a program with an environment of its own.
func run(t *testing.T, program string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binaries.Path(t, program), args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if exit := (*exec.ExitError)(nil); !errors.As(cmd.Run(), &exit) && cmd.ProcessState == nil {
		t.Fatalf("%s did not run", program)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// The command line: what test/golden does not have, which compares most texts for both agents.
func TestCommandLine(t *testing.T) {
	const absent = "--state-dir= --driver-root /nowhere"
	for name, tc := range map[string]struct {
		args           string
		code           int
		stdout, stderr string // a part of it, with $ for the program; "" = nothing
	}{
		"--version":             {"--version", 0, "$ ", ""},
		"-version":              {"-version", 0, "$ ", ""},
		"-help":                 {"-help", 0, "\n   quiesce ", ""},
		"help on a verb":        {"help simulate", 0, "$ simulate [options] xid|event CODE", ""},
		"help of a verb":        {"clear -h", 0, "--verified-at ", ""},
		"help on no verb":       {"help inspct", 2, "", "$: unknown command inspct: did you mean inspect?\n"},
		"no value":              {"--state-dir", 2, "", "$: flag needs an argument: --state-dir\n"},
		"too many faults":       {"simulate xid 79 80", 2, "", `$: simulate: unexpected argument "80": see $ simulate --help` + "\n"},
		"no driver":             {"inspect " + absent, 0, "driver absent: no NVIDIA driver", ""},
		"no driver, JSON":       {"inspect --json " + absent, 0, `"state": "absent"`, ""},
		"no file, by flag":      {"validate --config-file /nowhere/c.yaml", 1, "", "$: configuration file: open /nowhere/c.yaml: no such file or directory\n"},
		"two files to validate": {"validate c.yaml d.yaml", 2, "", `$: validate: unexpected argument "d.yaml": see $ validate --help` + "\n"},
		"a file twice":          {"validate c.yaml --config-file=c.yaml", 2, "", "$: validate: want FILE or --config-file, not both\n"},
	} {
		for _, program := range programs {
			t.Run(program+"/"+name, func(t *testing.T) {
				code, stdout, stderr := run(t, program, strings.Fields(tc.args)...)
				if code != tc.code {
					t.Errorf("exit code %d, want %d", code, tc.code)
				}
				for _, s := range []struct{ name, got, want string }{{"stdout", stdout, tc.stdout}, {"stderr", stderr, tc.stderr}} {
					want := strings.ReplaceAll(s.want, "$", program)
					if !strings.Contains(s.got, want) || want == "" && s.got != "" || strings.HasSuffix(want, "\n") && s.got != want {
						t.Errorf("%s is %q, want %q", s.name, s.got, want)
					}
				}
			})
		}
	}
}

// FILE and --config-file are the same to validate, for a valid file and for one with problems, each of which is a line; so it is for
// inspect without an agent.
func TestValidateFile(t *testing.T) {
	valid, invalid := filepath.Join(t.TempDir(), "c.yaml"), filepath.Join(t.TempDir(), "c.yaml")
	write(t, valid, "version: v1\npolicy:\n  rules:\n  - {select: {index: 0}, use: reserved}\n")
	write(t, invalid, "version: v1\npolicy:\n  rules:\n  - {select: {index: zero}, use: reserved}\n  - {select: {index: 1}, use: quartered}\n")
	for _, program := range programs {
		for _, args := range [][]string{{"validate", valid}, {"validate", "--config-file", valid}, {"--config-file", valid, "validate"}} {
			code, stdout, stderr := run(t, program, args...)
			if code != 0 || !strings.HasSuffix(stdout, "c.yaml:4: policy.rules[0].select: not offered: reserved by c.yaml:4\nno problem\n") || stderr != "" {
				t.Errorf("%s %v: exit code %d, %q, %q", program, args, code, stdout, stderr)
			}
		}
		for _, args := range [][]string{{"validate", invalid}, {"validate", "--config-file", invalid}, {"inspect", "--config-file", invalid, "--state-dir="}} {
			code, stdout, stderr := run(t, program, args...)
			if code != 1 || stdout != "" || strings.Count(stderr, program+": "+invalid+":") != 2 || strings.Count(stderr, "\n") != 2 {
				t.Errorf("%s %v: exit code %d, %q, %q", program, args, code, stdout, stderr)
			}
		}
	}
}

// Without a running agent, inspect reads the devices itself.
func TestInspect(t *testing.T) {
	m := simdriver.StartParallel(t, "h100x8")
	check.NoError(t, m.Fail(simdriver.GPU(3), "*", "UNKNOWN", simdriver.Always))
	for _, program := range programs {
		_, out, errs := run(t, program, "inspect", "--json", "--driver-root="+m.Root, "--sysfs-root="+m.Root+"/sys", "--procfs-root="+m.Root+"/proc", "--state-dir=")
		var got report.Report
		if err := json.Unmarshal([]byte(out), &got); err != nil {
			t.Fatalf("%s: %v\n%s%s", program, err, out, errs)
		}
		if got.Driver.State != "ready" || len(got.Devices) != 7 || len(got.Excluded) != 1 || got.Excluded[0].Index != 3 || got.Excluded[0].Reason == "" {
			t.Errorf("%s: %+v, want 7 devices and GPU 3 excluded", program, got)
		}
		for _, d := range got.Devices {
			if !d.Schedulable || d.MemoryBytes == 0 || d.Model == "" || d.NUMANode < 0 || string(d.ID) == m.UUID(3) {
				t.Errorf("%s: %+v", program, d)
			}
		}
	}
}

// cdi lists what runtimes read, and removes what is the agent's own, but not while it runs.
func TestCDI(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	for _, program := range programs {
		folder, stateDir := t.TempDir(), t.TempDir()
		vendor := map[string]string{"k8s-gpu": "k8s", "nomad-gpu": "nomad"}[program] + ".device-plugin.nvidia.com"
		own, other := filepath.Join(folder, vendor+"-gpu.json"), filepath.Join(folder, "nvidia.yaml")
		write(t, own, `{"cdiVersion": "0.3.0", "kind": "`+vendor+`/gpu", "devices": [{"name": "GPU-1", "containerEdits": {"env": ["A=B"]}}]}`)
		write(t, other, "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n")
		cdi := func(verb ...string) (int, string, string) {
			return run(t, program, append(append([]string{"cdi"}, verb...), "--cdi-dir", folder, "--state-dir", stateDir, "--driver-root", m.Root)...)
		}
		code, stdout, stderr := cdi("list")
		if code != 0 || stderr != "" || !strings.Contains(stdout, own) || !strings.Contains(stdout, "this agent") || !strings.Contains(stdout, "not valid: ") {
			t.Errorf("%s cdi list: %d, %s%s", program, code, stdout, stderr)
		}
		var files []struct {
			Path    string
			Own     bool
			Devices []string
			Problem string
		}
		if _, stdout, _ = cdi("list", "--json"); json.Unmarshal([]byte(stdout), &files) != nil || len(files) < 2 || !files[0].Own || files[0].Devices[0] != "GPU-1" || files[1].Own || files[1].Problem == "" {
			t.Errorf("%s cdi list --json: %s", program, stdout)
		}
		if program == "k8s-gpu" { // Nomad starts the other one
			var end func()
			stateDir, end = startAgent(t, m, "--cdi-dir="+folder)
			if code, _, stderr := cdi("remove"); code != 1 || !strings.Contains(stderr, "the agent runs") {
				t.Errorf("while the agent runs: %d, %s", code, stderr)
			}
			end()
		}
		if code, stdout, _ := cdi("remove"); code != 0 || stdout != "removed "+own+"\n" {
			t.Errorf("%s cdi remove: %d, %s", program, code, stdout)
		}
		if code, stdout, _ := cdi("remove"); code != 0 || stdout != "nothing to remove\n" {
			t.Errorf("%s cdi remove: %d, %s", program, code, stdout)
		}
		if _, err := os.Stat(other); err != nil {
			t.Error(err)
		}
		if code, _, stderr := cdi("delete"); code != 2 || stderr != program+": cdi: want list or remove\n" {
			t.Errorf("%s cdi delete: %d, %s", program, code, stderr)
		}
	}
}
