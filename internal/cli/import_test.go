package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/check"
)

// import prints, or writes files; it replaces none without --force, and writes all of several or none.
func TestImport(t *testing.T) {
	values := "config:\n  map:\n    a: \"version: v1\\nflags: {migStrategy: single}\\n\"\n    b: \"version: v1\\n\"\n"
	block := `plugin "nvidia" { config { fingerprint_period = "1ms" } }`
	for _, tc := range []struct{ program, name, text, extension string }{
		{"k8s-gpu", "values.yaml", "migStrategy: mixed\nfoo: 1\n", ".yaml"}, {"nomad-gpu", "client.hcl", block, ".hcl"},
	} {
		dir := t.TempDir()
		in, out := filepath.Join(dir, tc.name), filepath.Join(dir, "out"+tc.extension)
		write(t, in, tc.text)
		code, stdout, stderr := run(t, tc.program, "import", in)
		if code != 0 || stderr != "" || !strings.HasPrefix(stdout, "# Imported from "+in) || strings.Count(stdout, "\n# - ") < 2 {
			t.Errorf("%s: %d, %s%s", tc.program, code, stdout, stderr)
		}
		printed := stdout
		code, stdout, stderr = run(t, tc.program, "import", in, "--output", out)
		if code != 0 || stdout != out+"\n" || !strings.Contains(stderr, in) || read(t, out) != printed {
			t.Errorf("%s --output: %d, %s%s", tc.program, code, stdout, stderr)
		}
		write(t, out, "mine")
		if code, _, stderr = run(t, tc.program, "import", in, "--output", out); code != 1 || !strings.Contains(stderr, "--force") || read(t, out) != "mine" {
			t.Errorf("%s over a file: %d, %s", tc.program, code, stderr)
		}
		if code, _, stderr = run(t, tc.program, "import", "--force", "--output", out, in); code != 0 || read(t, out) != printed {
			t.Errorf("%s --force: %d, %s", tc.program, code, stderr)
		}
		for _, args := range [][]string{{"import"}, {"import", in, in}, {"import", "--from", "nothing", in}} {
			if code, stdout, _ = run(t, tc.program, args...); code != 2 || stdout != "" {
				t.Errorf("%s %v: %d, %s", tc.program, args, code, stdout)
			}
		}
		if code, stdout, stderr = run(t, tc.program, "import", filepath.Join(dir, "none")); code != 1 || stdout != "" || !strings.Contains(stderr, "no such file") {
			t.Errorf("%s: %d, %s%s", tc.program, code, stdout, stderr)
		}
	}

	dir := t.TempDir()
	checkAccount(t, dir)
	in, out := filepath.Join(dir, "values.yaml"), filepath.Join(dir, "out")
	write(t, in, values)
	check.NoError(t, os.Mkdir(out, 0o755))
	write(t, filepath.Join(out, "b.yaml"), "mine")
	if code, _, _ := run(t, "k8s-gpu", "import", in, "--output", out); code != 1 || names(t, out) != "b.yaml" || read(t, filepath.Join(out, "b.yaml")) != "mine" {
		t.Errorf("over one of two: %d, %s", code, names(t, out))
	}
	if code, _, stderr := run(t, "k8s-gpu", "import", in, "--output", filepath.Join(dir, "x.yaml")); code != 1 || !strings.Contains(stderr, "2 configurations") {
		t.Errorf("two into one file: %d, %s", code, stderr)
	}
	if code, _, stderr := run(t, "k8s-gpu", "import", in, "--output", out, "--config", "c"); code != 1 || !strings.Contains(stderr, "the input has a, b") {
		t.Errorf("unknown name: %d, %s", code, stderr)
	}
	if code, _, stderr := run(t, "k8s-gpu", "import", in, "--output", out, "--force"); code != 0 || names(t, out) != "a.yaml b.yaml" {
		t.Errorf("both: %d, %s, %s", code, stderr, names(t, out))
	}
	write(t, in, strings.Replace(values, "    b:", "    a.yaml:", 1))
	if code, _, stderr := run(t, "k8s-gpu", "import", in, "--output", out, "--force"); code != 1 || !strings.Contains(stderr, "two configurations would be "+out+"/a.yaml") {
		t.Errorf("two of one name: %d, %s", code, stderr)
	}
	if code, stdout, stderr := run(t, "k8s-gpu", "validate", filepath.Join(out, "a.yaml")); code != 0 || !strings.Contains(stdout, "MIG strategy: single") {
		t.Errorf("validate: %d, %s%s", code, stdout, stderr)
	}
}

// checkAccount imports inputs of which nothing is known, and one as JSON.
func checkAccount(t *testing.T, dir string) {
	t.Helper()
	in := filepath.Join(dir, "in")
	for program, text := range map[string]string{"k8s-gpu": "replicaCount: 2\n", "nomad-gpu": `plugin "nvidia" { config { colour = "blue" } }`} {
		write(t, in, text)
		if code, stdout, stderr := run(t, program, "import", in); code != 1 || stdout != "" || !strings.Contains(stderr, program+": "+in+": nothing in it is known as") || strings.Count(stderr, "\n") != 2 {
			t.Errorf("%s: %d, %s%s", program, code, stdout, stderr)
		}
	}
	write(t, in, "plugin \"nvidia\" {\n  config {}\n}\n")
	if code, _, stderr := run(t, "k8s-gpu", "import", in); code != 1 || !strings.Contains(stderr, "the configuration of a Nomad client") {
		t.Errorf("HCL: %d, %s", code, stderr)
	}
	write(t, in, "migStrategy: mixed\nimage: {tag: x}\nfoo: 1\n")
	code, stdout, stderr := run(t, "k8s-gpu", "import", "--json", in)
	var got struct {
		Kind  string
		Files []struct{ Text string }
		Notes []struct{ Effect, Where string }
		Taken []string
	}
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != 0 || stderr != "" || len(got.Files) != 1 || !strings.Contains(got.Files[0].Text, "migStrategy: mixed") ||
		len(got.Notes) != 3 || got.Notes[0].Effect != "unknown" || got.Notes[0].Where != in+":3: foo" || len(got.Taken) != 1 || got.Taken[0] != in+":1: migStrategy" {
		t.Errorf("--json: %d, %v, %s%s", code, err, stdout, stderr)
	}
	if code, _, _ := run(t, "k8s-gpu", "import", "--json", "--output", dir, in); code != 2 {
		t.Errorf("--json --output: %d", code)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	check.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	check.NoError(t, err)
	return string(text)
}

// names are those of the files in a folder, hidden ones too.
func names(t *testing.T, folder string) string {
	t.Helper()
	entries, err := os.ReadDir(folder)
	check.NoError(t, err)
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return strings.Join(all, " ")
}
