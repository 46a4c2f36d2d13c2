package configfile_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/configfile"
)

var known = map[string]configfile.Kind{
	"flags.name": configfile.Scalar, "flags.on": configfile.Toggle, "flags.plugin.list": configfile.List,
	"flags.map": configfile.Mapping, "flags.gfd": configfile.Opaque, "policy": configfile.Section,
}

// parse is what a text says, a line for each value, and every problem.
func parse(text string) (says []string, problems []string) {
	f, errs := configfile.Parse("/c.yaml", []byte(text), known)
	for _, key := range slices.Sorted(maps.Keys(f.Values)) {
		says = append(says, fmt.Sprintf("%s = %q", f.Values[key].Where, f.Values[key].Text))
	}
	for key, n := range f.Sections {
		var v any
		if err := n.Decode(&v); err != nil {
			errs = append(errs, err)
		}
		says = append(says, fmt.Sprintf("%s = %v", key, v))
	}
	for _, err := range errs {
		problems = append(problems, err.Error())
	}
	return says, problems
}

func TestValues(t *testing.T) {
	for name, tc := range map[string]struct {
		text string
		want []string
	}{
		"nothing":         {"", nil},
		"a comment":       {"# nothing\n", nil},
		"null":            {"~\n", nil},
		"empty documents": {"---\n---\nflags: {name: x}\n---\n# end\n", []string{`/c.yaml:3: flags.name = "x"`}},
		"every kind": {"version: v1\nflags:\n  name: x\n  on: true\n  plugin: {list: [a, 1]}\n  map: {63: ignore, 94: degraded}\n  gfd: {a: {b: c}}\n", []string{
			`/c.yaml:7: flags.gfd = "..."`, `/c.yaml:6: flags.map = "63=ignore,94=degraded"`, `/c.yaml:3: flags.name = "x"`,
			`/c.yaml:4: flags.on = "true"`, `/c.yaml:5: flags.plugin.list = "a,1"`, `/c.yaml:1: version = "v1"`,
		}},
		"what says nothing": {"flags: {name: ~, gfd: {a: false, b: [], c: {}}, map: , plugin: ~}\npolicy:\n", []string{
			`/c.yaml:1: flags.gfd = ""`, `/c.yaml:1: flags.map = ""`, `/c.yaml:1: flags.name = ""`, `policy = <nil>`,
		}},
		"words are not interpreted": {"flags: {name: 0:1, plugin: {list: [1e3, 010, yes, 0x1, 1_0, ~]}}\n", []string{
			`/c.yaml:1: flags.name = "0:1"`, `/c.yaml:1: flags.plugin.list = "1e3,010,yes,0x1,1_0,~"`,
		}},
		"aliases": {"flags:\n  name: &x a\n  plugin: {list: [*x, *x]}\n  map: {1: *x}\npolicy: {a: &y [*x], b: *y}\n", []string{
			`/c.yaml:4: flags.map = "1=a"`, `/c.yaml:2: flags.name = "a"`, `/c.yaml:3: flags.plugin.list = "a,a"`, `policy = map[a:[a] b:[a]]`,
		}},
		"merge keys": {"policy: {x: &x {a: 1, b: 2}, y: &y {b: 3, c: 4}, z: {<<: [*y, *x], c: 5}}\nflags: {<<: {name: n}}\n", []string{
			`/c.yaml:2: flags.name = "n"`, `policy = map[x:map[a:1 b:2] y:map[b:3 c:4] z:map[a:1 b:3 c:5]]`,
		}},
		"a merge of merges": {"policy: {a: &a {k: 1}, b: &b {<<: *a, l: 2}, c: {<<: *b, k: 3}}\n", []string{
			`policy = map[a:map[k:1] b:map[k:1 l:2] c:map[k:3 l:2]]`,
		}},
		"a quoted merge key is none": {"policy: {\"<<\": {a: 1}}\n", []string{`policy = map[<<:map[a:1]]`}},
	} {
		t.Run(name, func(t *testing.T) {
			says, problems := parse(tc.text)
			if diff := cmp.Diff(tc.want, says); diff != "" || problems != nil {
				t.Errorf("%v\n%s", problems, diff)
			}
		})
	}
}

func TestProblems(t *testing.T) {
	bomb := "policy: &a0 [x, x]\n"
	for i := range 40 {
		bomb = strings.Replace(bomb, "policy: ", fmt.Sprintf("policy: &a%d [*a%d, *a%d]\nx%d: ", i+1, i, i, i), 1)
	}
	bomb = strings.Join(reversed(strings.Split(strings.TrimSpace(bomb), "\n")), "\n") // anchors stand before their aliases
	for name, tc := range map[string]struct {
		text string
		want []string
	}{
		"syntax":                     {"flags: {\n", []string{"/c.yaml: line 1: did not find expected node content"}},
		"no mapping":                 {"flags\n", []string{"/c.yaml:1: want a mapping"}},
		"a section is none":          {"flags: 3\n", []string{"/c.yaml:1: flags: want a mapping"}},
		"another version":            {"\nversion: v2\n", []string{`/c.yaml:2: version = "v2": want v1`}},
		"another document":           {"version: v1\n---\nflags: {name: x}\n", []string{"/c.yaml:2: another document begins: want one"}},
		"another, broken document":   {"version: v1\n---\n{\n", []string{"/c.yaml: line 3: did not find expected node content"}},
		"kinds":                      {"flags: {name: [x], on: {}, plugin: {list: {a: b}}, map: [x]}\n", []string{"/c.yaml:1: flags.name: want a single value", "/c.yaml:1: flags.on: want a single value", "/c.yaml:1: flags.plugin.list: want a single value", "/c.yaml:1: flags.map: want a mapping"}},
		"lists of lists":             {"flags: {plugin: {list: [[x]]}, map: {a: [b]}}\n", []string{"/c.yaml:1: flags.plugin.list: want a list of words", "/c.yaml:1: flags.map: want a mapping of words"}},
		"given twice":                {"flags: {name: x}\nflags: {name: y}\n", []string{"/c.yaml:2: flags: given twice"}},
		"unknown":                    {"flag: {}\nflags: {nam: x, plugin: {lost: x}}\n", []string{"/c.yaml:1: flag: unknown key: did you mean flags?", "/c.yaml:2: flags.nam: unknown key: did you mean flags.name?", "/c.yaml:2: flags.plugin.lost: unknown key: did you mean flags.plugin.list?"}},
		"keys that are no words":     {"? [a]\n: b\n? \"a\\nb\"\n: c\n\"\": d\n", []string{"/c.yaml:1: (not a word): unknown key: did you mean flags?", `/c.yaml:3: "a\nb": unknown key: did you mean flags?`, `/c.yaml:5: "": unknown key: did you mean flags?`}},
		"unknown anchor":             {"policy: *a\n", []string{"/c.yaml: unknown anchor 'a' referenced"}},
		"itself":                     {"policy: &a {b: [*a]}\n", []string{`/c.yaml:1: the value of anchor "a" contains itself`}},
		"itself by merging":          {"x: 1\npolicy: &a {<<: *a}\n", []string{`/c.yaml:2: the value of anchor "a" contains itself`}},
		"a merge of something else":  {"policy:\n  <<: 3\n", []string{"/c.yaml:2: <<: want a mapping, or a list of mappings"}},
		"a merge of a list of words": {"policy: {<<: [a]}\n", []string{"/c.yaml:1: <<: want a mapping, or a list of mappings"}},
		"aliases of aliases":         {bomb, []string{"/c.yaml: more than 100000 values: are aliases nested?"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, problems := parse(tc.text)
			if diff := cmp.Diff(tc.want, problems); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func reversed(lines []string) []string {
	slices.Reverse(lines)
	return lines
}

// What an alias brings is said to stand where the alias does: the line that somebody has to change.
func TestLinesOfAliases(t *testing.T) {
	f, errs := configfile.Parse("/c.yaml", []byte("flags:\n  name: &x a\npolicy:\n  a:\n    - *x\n"), known)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	if item := f.Sections["policy"].Content[1].Content[0]; item.Kind != yaml.ScalarNode || item.Line != 5 {
		t.Errorf("%+v", item)
	}
}

func TestRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(path, []byte("flags: {name: x}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, errs := configfile.Read(path, known)
	if f.Path != path || f.Values["flags.name"].Text != "x" || len(errs) > 0 {
		t.Errorf("%+v, %v", f, errs)
	}
	if _, errs := configfile.Read(filepath.Dir(path), known); len(errs) != 1 || !strings.HasPrefix(errs[0].Error(), "configuration file: read ") {
		t.Error(errs)
	}
}

func TestNearest(t *testing.T) {
	names := []string{"flags", "health", "imex", "resources", "sharing", "timeSlicing"}
	for written, want := range map[string]string{
		"flag": "flags", "shearing": "sharing", "timeslicing": "timeSlicing", "slicing": "timeSlicing", "ressource": "resources", "": "imex", "HEALTH": "health",
	} {
		if got := configfile.Nearest(written, names); got != want {
			t.Errorf("%q: %q, want %q", written, got, want)
		}
	}
}
