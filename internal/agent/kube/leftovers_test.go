package kube

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// Without the component dra an agent on whose node claims or GPUs of that API are left names them, what it lacks, and the remedy, as a
// warning and to doctor. With what it needs it serves them, and doctor has the checks of the API.
func TestLeftoversOfDRA(t *testing.T) {
	make := func(t *testing.T) config.Kubernetes {
		t.Helper()
		s := config.Kubernetes{}
		s.Core.API, s.Health.StateDir, s.DRA.KubeletDir = inventory.DevicePlugin, t.TempDir(), t.TempDir()
		s.DRA.API.Address, s.DRA.API.TokenFile, s.DRA.API.CAFile = "https://127.0.0.1:1", filepath.Join(t.TempDir(), "token"), filepath.Join(t.TempDir(), "ca.crt")
		return s
	}
	claim := func(s config.Kubernetes) {
		write(t, filepath.Join(s.Health.StateDir, "dra", "claims", "6d2e.json"))
	}
	owned := func(s config.Kubernetes, owner inventory.API) {
		e := ownership.Entry{Target: inventory.DRA, Owner: owner}
		check.NoError(t, ownership.Write(s.Health.StateDir, ownership.File{GPUs: map[gpu.DeviceID]ownership.Entry{"GPU-1": e}}))
	}
	moved := func(s config.Kubernetes) { owned(s, inventory.DRA) }
	target := func(s config.Kubernetes) { owned(s, inventory.DevicePlugin) }
	for name, tc := range map[string]struct {
		prepare func(config.Kubernetes)
		want    []string
	}{
		"nothing is left":          {func(config.Kubernetes) {}, nil},
		"a broken file of targets": {func(s config.Kubernetes) { write(t, filepath.Join(s.Health.StateDir, ownership.FileName)) }, nil},
		"a claim":                  {claim, []string{"prepared claims of the API dra are left", "NODE_NAME", "a token of the API server", "plugins_registry", "migrate apply --to device-plugin --all"}},
		"a GPU":                    {moved, []string{"GPUs of the API dra are left", "plugins_registry"}},
		"a target":                 {target, []string{"GPUs have the target dra, and the agent lacks", "NODE_NAME", "plugins_registry", "add the component dra", "migrate back"}},
		"a claim and a target":     {func(s config.Kubernetes) { claim(s); target(s) }, []string{"prepared claims of the API dra are left"}},
		"both":                     {func(s config.Kubernetes) { claim(s); moved(s) }, []string{"prepared claims and GPUs of the API dra are left"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := make(t)
			tc.prepare(s)
			warnings := strings.Join(problem.Lines(leftoversOf(s).problems()), "\n")
			checks := draChecks(s, "")
			if len(tc.want) == 0 {
				if warnings != "" || len(checks) > 0 {
					t.Errorf("%q, %d checks", warnings, len(checks))
				}
				return
			}
			if len(checks) != 2 {
				t.Fatalf("%d checks", len(checks))
			}
			found := checks[0].Look(context.Background(), nil)
			if len(found) != 1 || found[0].Severity != doctor.Problem {
				t.Fatalf("doctor: %+v", found)
			}
			for _, text := range []string{warnings, found[0].Found + found[0].Remedy} {
				for _, part := range tc.want {
					if !strings.Contains(text, part) {
						t.Errorf("%q lacks %q", text, part)
					}
				}
			}
		})
	}
	t.Run("with what it needs", func(t *testing.T) {
		s := make(t)
		claim(s)
		s.DRA.Node = "one"
		for _, path := range []string{s.DRA.API.TokenFile, s.DRA.API.CAFile, filepath.Join(s.DRA.KubeletDir, "plugins_registry", "x")} {
			write(t, path)
		}
		if w := problem.Lines(leftoversOf(s).problems()); len(w) > 0 || len(draChecks(s, "")) < 2 {
			t.Errorf("%q, %d checks", w, len(draChecks(s, "")))
		}
	})
}

func write(t *testing.T, path string) {
	t.Helper()
	check.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	check.NoError(t, os.WriteFile(path, []byte("{"), 0o600))
}

// A record of a prepared claim that can't be read is named by doctor with the file and the remedy, also without a running agent.
func TestRecordThatCanNotBeReadIsNamed(t *testing.T) {
	s := config.Kubernetes{}
	s.Core.API, s.Health.StateDir, s.DRA.KubeletDir = inventory.DevicePlugin, t.TempDir(), t.TempDir()
	path := filepath.Join(s.Health.StateDir, "dra", "claims", "6d2e.json")
	write(t, path)
	var found []doctor.Finding
	for _, c := range draChecks(s, "") {
		if c.Name == "prepared claims" {
			found = append(found, c.Look(t.Context(), nil)...)
		}
	}
	if len(found) != 1 || found[0].Place != path || found[0].Severity != doctor.Problem || !strings.Contains(found[0].Found, path+" can't be read as a prepared claim: ") {
		t.Fatalf("%+v", found)
	}
}
