package config

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/configtest"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/test/check"
)

// readBroken reads flags, variables and a file.
func readBroken(t *testing.T, flags, env []string, file string) error {
	t.Helper()
	values, variables := NewFlags(KubernetesSpecs()), map[string]string{}
	for _, flag := range flags {
		name, value, _ := strings.Cut(flag, "=")
		check.NoError(t, values[name].Set(value))
	}
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		variables[name] = value
	}
	e := environment(variables)
	if file != "" {
		check.NoError(t, values[FlagConfigFile].Set("/c.yaml"))
		e.ReadFile = func(string) ([]byte, error) { return []byte(file), nil }
	}
	s, err := ReadKubernetes(values, e)
	check.NoError(t, s.Core.Validate())
	return err
}

// Each mistake is one error, with place, value and remedy. The settings without it are valid.
func TestBrokenConfigurations(t *testing.T) {
	if len(configtest.Broken) < 50 {
		t.Errorf("%d configurations", len(configtest.Broken))
	}
	some := func(s string) []string { return slices.DeleteFunc([]string{s}, func(s string) bool { return s == "" }) }
	for _, c := range configtest.Broken {
		var err error
		if c.Block != nil {
			var s Nomad
			s, _, err = NewBlock(c.Block).Read()
			check.NoError(t, s.Core.Validate())
		} else {
			err = readBroken(t, some(c.Flag), some(c.Env), c.File)
		}
		sameProblems(t, err, c.Want)
		if c.Both {
			_, err := ParseFile("/c.yaml", []byte(c.File), policy.Nomad)
			sameProblems(t, err, c.Want)
		}
	}
}

// Several mistakes are all reported: those of all flags and variables above, and those of the block, at once.
func TestBrokenAtOnce(t *testing.T) {
	var flags, env, want, wantOfBlock []string
	block := map[string]any{}
	for _, c := range configtest.Broken {
		switch {
		case c.Flag != "":
			flags, want = append(flags, c.Flag), append(want, c.Want)
		case c.Env != "":
			env, want = append(env, c.Env), append(want, c.Want)
		case c.Block != nil && (c.Block["injection"] == nil || block["injection"] == nil): // it is there twice
			maps.Copy(block, c.Block)
			wantOfBlock = append(wantOfBlock, c.Want)
		}
	}
	sorted := func(lines []string) []string { return slices.Sorted(slices.Values(lines)) }
	_, _, err := NewBlock(block).Read()
	for of, got := range map[string][2][]string{
		"flags and variables": {want, strings.Split(errorText(readBroken(t, flags, env, "")), "\n")},
		"block":               {wantOfBlock, strings.Split(errorText(err), "\n")},
	} {
		if diff := cmp.Diff(sorted(got[0]), sorted(got[1])); diff != "" {
			t.Errorf("%s: %s", of, diff)
		}
	}
}
