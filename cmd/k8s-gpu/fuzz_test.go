package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/configfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
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
	keys := known(options())
	f.Fuzz(func(t *testing.T, text []byte) {
		file, errs := configfile.Parse("/c.yaml", text, keys)
		for _, err := range errs {
			if line := err.Error(); !strings.HasPrefix(line, "/c.yaml:") || strings.Contains(line, "\n") {
				t.Errorf("problem %q", line)
			}
		}
		if len(errs) > 0 {
			return
		}
		again, errs := configfile.Parse("/d.yaml", written(t, file.Values), keys)
		if len(errs) > 0 || !maps.EqualFunc(file.Values, again.Values, func(a, b given) bool { return a.Text == b.Text }) {
			t.Errorf("%v\n%v\n%v", errs, file.Values, again.Values)
		}
	})
}

// written is a configuration file with the values.
func written(t *testing.T, values map[string]given) []byte {
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
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// FuzzSetting: a setting means the same on the command line, in the environment and in the file, and is
// refused, with its place and its value, in all of them or in none. What is accepted is a valid configuration.
func FuzzSetting(f *testing.F) {
	for i, o := range options() {
		f.Add(uint(i), cmp.Or(o.value, "x"))
	}
	f.Add(uint(0), "mixed")
	f.Add(uint(6), "envvar, cdi-cri,,")
	f.Add(uint(12), "GPU-a,GPU-b")
	table := options()
	f.Fuzz(func(t *testing.T, which uint, value string) {
		o := table[which%uint(len(table))]
		if value == "" || o.kind == page || o.flag == configFlag { // elsewhere "" may be "not set"
			return
		}
		var said []settings
		try := func(where string, values flagValues, env, file map[string]string) {
			s, err := resolveOne(t, values, env, file)
			if err == nil && s.core.Validate() != nil {
				t.Errorf("%s = %q is accepted: %v", where, value, s.core.Validate())
			}
			var problem *core.ConfigError
			if err != nil && (!errors.As(err, &problem) || !strings.HasSuffix(problem.Key, where) || problem.Value != value || problem.Remedy == "") {
				t.Errorf("%s = %q: %v", where, value, err)
			}
			if err != nil {
				s = settings{}
			}
			said = append(said, s)
		}
		if o.flag != "" {
			values := newFlagValues()
			if err := values[o.flag].Set(value); err != nil {
				t.Fatal(err)
			}
			try("--"+o.flag, values, nil, nil)
		}
		for _, name := range o.env {
			try(name, newFlagValues(), map[string]string{name: value}, nil)
		}
		if o.key != "" && utf8.ValidString(value) {
			try(o.key, newFlagValues(), nil, map[string]string{o.key: value})
		}
		for _, s := range said[min(1, len(said)):] {
			if !s.equal(said[0]) {
				t.Errorf("%s = %q has two meanings: %+v, %+v", o.name(), value, said[0], s)
			}
		}
	})
}

// resolveOne resolves settings from a file that does not exist.
func resolveOne(t *testing.T, values flagValues, env, file map[string]string) (settings, error) {
	t.Helper()
	table, read := options(), configfile.File{}
	for key, value := range file {
		var errs []error
		if read, errs = configfile.Parse("/c.yaml", written(t, map[string]given{key: {Text: value}}), known(table)); len(errs) > 0 {
			return settings{}, &core.ConfigError{Key: key, Value: value, Remedy: errors.Join(errs...).Error()}
		}
	}
	return resolveWith(values, func(name string) (string, bool) { v, ok := env[name]; return v, ok }, read.Values, table)
}

// FuzzHealthCheckVariables: of the XIDs that the two variables of NVIDIA's plugin name, those that are to count do,
// the others do not, and no more is said than that.
func FuzzHealthCheckVariables(f *testing.F) {
	for _, v := range [][2]string{{"", ""}, {"all", "48, 79"}, {"13,31", "13"}, {"XIDS", "all"}, {"0", "4294967296"}, {",,1,", "-1"}} {
		f.Add(v[0], v[1])
	}
	f.Fuzz(func(t *testing.T, disable, enable string) {
		env := map[string]string{disableHealthChecks: disable, enableHealthChecks: enable}
		lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
		p := core.DefaultHealthPolicy()
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
		if err := cfg.Validate(); err != nil {
			t.Error(err)
		}
	})
}

// FuzzDriverRoots: wherever the driver is said to be, it is looked for at an absolute path.
func FuzzDriverRoots(f *testing.F) {
	f.Add("/", "/driver-root", "", uint8(0))
	f.Add("/run/nvidia/driver", "/driver-root", "/dev-root", uint8(3))
	f.Fuzz(func(t *testing.T, root, mounted, dev string, there uint8) {
		s := settings{driverRoot: root, containerRoot: mounted, devRoot: dev}
		if absolute(root) != nil || mounted != "" && absolute(mounted) != nil || dev != "" && absolute(dev) != nil {
			return
		}
		asked := 0
		s.findRoots(func(string) bool { asked++; return there>>(asked-1)&1 == 1 })
		for _, path := range []string{s.core.Roots.Driver, s.devRoot, cmp.Or(s.core.Roots.Dev, "/")} {
			if !filepath.IsAbs(path) {
				t.Errorf("%q of %+v", path, s)
			}
		}
		if s.fallbackDriver != (s.core.Roots.Driver == mounted && mounted != "" && there&1 == 1) {
			t.Errorf("fallback %v: %s", s.fallbackDriver, fmt.Sprint(s.core.Roots))
		}
	})
}
