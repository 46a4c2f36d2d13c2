package config

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/test/check"
)

// resolveAll resolves flags, variables and the text of a configuration file.
func resolveAll(t *testing.T, args []string, env map[string]string, file string) (Kubernetes, error) {
	t.Helper()
	if file != "" {
		path := filepath.Join(t.TempDir(), "c.yaml")
		check.NoError(t, os.WriteFile(path, []byte(file), 0o600))
		args = append(args, "--config-file="+path)
	}
	values := NewFlags(KubernetesSpecs())
	for _, arg := range args {
		name, value, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		check.NoError(t, values[name].Set(value))
	}
	got, err := ReadKubernetes(values, environment(env))
	if err != nil && file != "" {
		return got, &pathless{err, filepath.Dir(args[len(args)-1][len("--config-file="):]) + "/"}
	}
	return got, err
}

// environment has these variables, and accepts addresses with a numeric port.
func environment(env map[string]string) Environment {
	return Environment{
		LookupEnv: func(name string) (string, bool) { v, ok := env[name]; return v, ok },
		CheckAddress: func(address string) error {
			_, err := netip.ParseAddrPort("0.0.0.0" + address)
			return err
		},
	}
}

// pathless is an error without the temporary folder in its text.
type pathless struct {
	error
	dir string
}

func (p *pathless) Error() string { return strings.ReplaceAll(p.error.Error(), p.dir, "") }

// withoutFolder returns lines without the temporary folder of resolveAll.
func withoutFolder(lines []string) []string {
	short := make([]string, len(lines))
	for i, line := range lines {
		short[i] = line[strings.LastIndex(line, "/c.yaml")+1:]
	}
	return short
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// sameProblems compares the lines of an error.
func sameProblems(t *testing.T, err error, want string) {
	t.Helper()
	if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(errorText(err), "\n")); diff != "" {
		t.Error(diff)
	}
}
