package config

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/test/check"
)

// FuzzConfigFile: a file is understood, or every problem names it in one line. What is understood means the
// same when it is written plainly.
func FuzzConfigFile(f *testing.F) {
	for _, text := range []string{
		"version: v1\nflags:\n  migStrategy: mixed\n  plugin:\n    passDeviceSpecs: true\n    deviceListStrategy: [envvar]\n",
		"version: v1\nhealth:\n  xids: {63: ignore, 94: degraded}\n  recoveryDwell: 1m\n  stateDir: \"\"\n",
		"flags: &f\n  migStrategy: &m single\n  failOnInitError: *m\nsharing: {timeSlicing: {resources: []}}\n",
		"sharing: &s {a: *s}\n",
		"sharing: &a [&b [&c [1,1,1,1,1], *c, *c, *c, *c], *b, *b, *b, *b, *b]\n",
		"flags: !!map {migStrategy: !!str none}\n? [a, b]\n: c\n",
		"flags: {migStrategy: |\n  none\n", "%YAML 1.2\n---\nversion: v1\n...\n---\nversion: v2\n", "\xef\xbb\xbfversion: v1\n",
		"flags: {<<: {migStrategy: mixed}}\n", "version: v1\nversion: v1\n", "imex: {channelIDs: [[0]]}", "-", "~",
	} {
		f.Add([]byte(text))
	}
	keys := fileKinds(true)
	f.Fuzz(func(t *testing.T, text []byte) {
		file, err := parseFile("/c.yaml", text, policy.Kubernetes, keys)
		if err != nil {
			for line := range strings.SplitSeq(err.Error(), "\n") {
				if !strings.HasPrefix(line, "/c.yaml:") {
					t.Errorf("problem %q", line)
				}
			}
			return
		}
		again, err := parseFile("/d.yaml", written(t, file.values), policy.Kubernetes, keys)
		if err != nil || !maps.EqualFunc(file.values, again.values, func(a, b Value) bool { return a.Text == b.Text }) {
			t.Errorf("%v\n%v\n%v", err, file.values, again.values)
		}
	})
}

// written is a configuration file with the values.
func written(t *testing.T, values map[string]Value) []byte {
	t.Helper()
	root := map[string]any{}
	for key, v := range values {
		at, path := root, strings.Split(key, ".")
		for _, name := range path[:len(path)-1] {
			next, ok := at[name].(map[string]any)
			if !ok {
				next = map[string]any{}
				at[name] = next
			}
			at = next
		}
		at[path[len(path)-1]] = v.Text
	}
	text, err := yaml.Marshal(root)
	check.NoError(t, err)
	return text
}

// FuzzSetting: a setting means the same on the command line, in the environment and in the file, and is
// refused, with its place and its value, in all of them or in none. What is accepted is a valid configuration.
func FuzzSetting(f *testing.F) {
	for i, o := range KubernetesSpecs() {
		f.Add(uint(i), cmp.Or(o.Default, "x"))
	}
	f.Add(uint(0), "mixed")
	f.Add(uint(6), "envvar, cdi-cri,,")
	f.Add(uint(12), "GPU-a,GPU-b")
	table := KubernetesSpecs()
	f.Fuzz(func(t *testing.T, which uint, value string) {
		o := table[which%uint(len(table))]
		if value == "" || o.Kind == schema.Opaque || o.Flag == FlagConfigFile { // elsewhere "" may be "not set"
			return
		}
		var results []Kubernetes
		try := func(where string, values Flags, env, file map[string]string) {
			s, err := resolveOne(t, values, env, file)
			if err == nil && s.Core.Validate() != nil {
				t.Errorf("%s = %q is accepted: %v", where, value, s.Core.Validate())
			}
			var problem *setting.Error
			if err != nil && (!errors.As(err, &problem) || !strings.HasSuffix(problem.Key, where) || problem.Value != value || problem.Remedy == "") {
				t.Errorf("%s = %q: %v", where, value, err)
			}
			if err != nil {
				s = Kubernetes{}
			}
			results = append(results, s)
		}
		if o.Flag != "" {
			values := NewFlags(KubernetesSpecs())
			check.NoError(t, values[o.Flag].Set(value))
			try("--"+o.Flag, values, nil, nil)
		}
		for _, name := range o.Env {
			try(name, NewFlags(KubernetesSpecs()), map[string]string{name: value}, nil)
		}
		if o.Key != "" && utf8.ValidString(value) {
			try(o.Key, NewFlags(KubernetesSpecs()), nil, map[string]string{o.Key: value})
		}
		for _, s := range results[min(1, len(results)):] {
			if !s.Equal(results[0]) {
				t.Errorf("%s = %q has two meanings: %+v, %+v", o.Name(), value, results[0], s)
			}
		}
	})
}

// resolveOne resolves settings from a file that does not exist.
func resolveOne(t *testing.T, values Flags, env, file map[string]string) (Kubernetes, error) {
	t.Helper()
	var read File
	for key, value := range file {
		var err error
		read, err = parseFile("/c.yaml", written(t, map[string]Value{key: {Text: value}}), policy.Kubernetes, fileKinds(true))
		if err != nil {
			return Kubernetes{}, &setting.Error{Key: key, Value: value, Remedy: err.Error()}
		}
	}
	return resolve(values, environment(env), read)
}

// FuzzHealthCheckVariables: of the XIDs that the two variables of NVIDIA's plugin name, those that are to count do,
// the others do not, and there is no other effect.
func FuzzHealthCheckVariables(f *testing.F) {
	for _, v := range [][2]string{{"", ""}, {"all", "48, 79"}, {"13,31", "13"}, {"XIDS", "all"}, {"0", "4294967296"}, {",,1,", "-1"}} {
		f.Add(v[0], v[1])
	}
	f.Fuzz(func(t *testing.T, disable, enable string) {
		env := map[string]string{disableHealthChecks: disable, enableHealthChecks: enable}
		lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
		p := health.DefaultPolicy()
		if err := healthChecks(&p, lookup); err != nil {
			if !strings.Contains(err.Error(), "DP_") {
				t.Errorf("no variable is named: %v", err)
			}
			return
		}
		counted, _ := readXIDs(enableHealthChecks, lookup)
		ignored, _ := readXIDs(disableHealthChecks, lookup)
		for code, effect := range p.XIDs {
			want := xid.None
			if slices.Contains(counted.some, code) {
				want = xid.Withdraws
			}
			if effect != want || code == 0 || code >= 1<<32 {
				t.Errorf("XID %d: %v, want %v", code, effect, want)
			}
		}
		for _, code := range slices.Concat(counted.some, ignored.some) {
			if _, ok := p.XIDs[code]; !ok && !counted.all {
				t.Errorf("XID %d is forgotten", code)
			}
		}
		cfg := core.DefaultConfig()
		cfg.Health = p
		check.NoError(t, cfg.Validate())
	})
}
