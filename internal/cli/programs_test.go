package cli_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
		"help on a verb":        {"help simulate", 0, "$ simulate [flags] xid|event CODE", ""},
		"help of a verb":        {"clear -h", 0, "--verified-at ", ""},
		"help on no verb":       {"help inspct", 2, "", "$: unknown command inspct: did you mean inspect?\n"},
		"no value":              {"--state-dir", 2, "", "$: --state-dir: want a value: see $ --help\n"},
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

// A request that would be refused is explained, and the exit code is 1; top prints JSON once.
func TestRefusedRequestAndUse(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	roots := []string{"--driver-root=" + m.Root, "--sysfs-root=" + m.Root + "/sys", "--procfs-root=" + m.Root + "/proc", "--state-dir="}
	for _, program := range programs {
		for _, form := range [][]string{nil, {"--json"}} {
			code, stdout, stderr := run(t, program, slices.Concat([]string{"explain", "--count=9"}, form, roots)...)
			if code != 1 || !strings.Contains(stdout, "8 of 9 devices") || !strings.HasPrefix(stderr, program+": explain: a request for ") || strings.Count(stderr, "\n") != 1 {
				t.Errorf("%s %v: exit code %d, %s, %s", program, form, code, stdout, stderr)
			}
			if code, stdout, stderr := run(t, program, slices.Concat([]string{"explain", "--count=8"}, form, roots)...); code != 0 || stderr != "" {
				t.Errorf("%s %v: exit code %d, %s, %s", program, form, code, stdout, stderr)
			}
		}
		code, stdout, stderr := run(t, program, slices.Concat([]string{"top", "--json"}, roots)...)
		var got report.Report
		if err := json.Unmarshal([]byte(stdout), &got); code != 0 || err != nil || len(got.Devices) != 8 || got.Source != report.FromDriver {
			t.Errorf("%s top --json: exit code %d, %v, %s%s", program, code, err, stdout, stderr)
		}
	}
}

// validate takes the configuration of a Nomad client without a flag, in HCL and JSON; keys that Nomad ignores are problems, and paths that the
// node does not have are warnings.
func TestValidateClientConfiguration(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"client.hcl":  "plugin \"nomad-gpu\" {\n  degraded = \"no\"\n  config { driver_root = \"/nowhere\" }\n}\n",
		"client":      "plugin \"nomad-gpu\" {\n  degraded = \"no\"\n  config { driver_root = \"/nowhere\" }\n}\n",
		"client.json": `{"plugin": {"nomad-gpu": {"degraded": "no", "config": {"driver_root": "/nowhere"}}}}`,
	} {
		path := filepath.Join(dir, name)
		write(t, path, text)
		const outside = `degraded = "no": Nomad ignores keys of plugin "nomad-gpu" outside of config { }: move it there`
		if code, stdout, stderr := run(t, "nomad-gpu", "validate", path); code != 1 || stdout != "" || !strings.HasSuffix(stderr, outside+"\n") || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%s: exit code %d, %q, %q", name, code, stdout, stderr)
		}
		code, stdout, stderr := run(t, "nomad-gpu", "validate", "--json", path)
		var got struct {
			Valid    bool
			Problems []struct{ Key, Value, Remedy string }
			Warnings []string
		}
		if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != 1 || stderr != "" || got.Valid || len(got.Problems) != 1 || got.Problems[0].Value != "no" ||
			len(got.Warnings) != 1 || !strings.HasSuffix(got.Warnings[0], "driver_root: /nowhere is not on this node") {
			t.Errorf("%s --json: exit code %d, %v, %s%s", name, code, err, stdout, stderr)
		}
		if code, _, stderr := run(t, "k8s-gpu", "validate", path); code != 1 || !strings.Contains(stderr, "the configuration of a Nomad client") {
			t.Errorf("k8s-gpu %s: exit code %d, %q", name, code, stderr)
		}
	}
	if code, stdout, _ := run(t, "k8s-gpu", "validate", "--json", "--sysfs-root=/nowhere"); code != 0 || !strings.Contains(stdout, "--sysfs-root: /nowhere is not on this node") || !strings.Contains(stdout, `"valid": true`) {
		t.Errorf("k8s-gpu: exit code %d, %s", code, stdout)
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
