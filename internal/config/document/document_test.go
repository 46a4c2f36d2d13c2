package document_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/document"
)

// parse returns the values of a text, a line for each scalar with its place, and every problem.
func parse(text string) (values []string, problems []string) {
	d := document.Parse("/c.yaml", []byte(text))
	var walk func(document.Value)
	walk = func(v document.Value) {
		switch {
		case v.IsMapping():
			for _, p := range v.Pairs() {
				walk(p.Value)
			}
		case v.IsList():
			for _, item := range v.Items() {
				walk(item)
			}
		default:
			values = append(values, fmt.Sprintf("%s = %q", v.Where(), v.Text()))
		}
	}
	if root := d.Root(); root.Given() {
		walk(root)
	}
	if err := d.Err(); err != nil {
		problems = strings.Split(err.Error(), "\n")
	}
	return values, problems
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
		"every kind": {"version: v1\nflags:\n  name: x\n  on: true\n  plugin: {list: [a, 1]}\n  map: {63: ignore, 94: degraded}\n", []string{
			`/c.yaml:1: version = "v1"`, `/c.yaml:3: flags.name = "x"`, `/c.yaml:4: flags.on = "true"`,
			`/c.yaml:5: flags.plugin.list[0] = "a"`, `/c.yaml:5: flags.plugin.list[1] = "1"`,
			`/c.yaml:6: flags.map.63 = "ignore"`, `/c.yaml:6: flags.map.94 = "degraded"`,
		}},
		"absent": {"flags: {name: ~, map: , plugin: null}\npolicy:\n", []string{
			`/c.yaml:1: flags.name = ""`, `/c.yaml:1: flags.map = ""`, `/c.yaml:1: flags.plugin = ""`, `/c.yaml:2: policy = ""`,
		}},
		"scalars are not interpreted": {"flags: {name: 0:1, list: [1e3, 010, yes, 0x1, 1_0]}\n", []string{
			`/c.yaml:1: flags.name = "0:1"`, `/c.yaml:1: flags.list[0] = "1e3"`, `/c.yaml:1: flags.list[1] = "010"`,
			`/c.yaml:1: flags.list[2] = "yes"`, `/c.yaml:1: flags.list[3] = "0x1"`, `/c.yaml:1: flags.list[4] = "1_0"`,
		}},
		"aliases": {"flags:\n  name: &x a\n  list:\n    - *x\n  map: {1: *x}\npolicy: {a: &y [*x], b: *y}\n", []string{
			`/c.yaml:2: flags.name = "a"`, `/c.yaml:4: flags.list[0] = "a"`, `/c.yaml:5: flags.map.1 = "a"`,
			`/c.yaml:6: policy.a[0] = "a"`, `/c.yaml:6: policy.b[0] = "a"`,
		}},
		"merge keys": {"x: {x: &x {a: 1, b: 2}, y: &y {b: 3, c: 4}}\nz: {<<: [*y, *x], c: 5}\nflags: {<<: {name: n}}\n", []string{
			`/c.yaml:1: x.x.a = "1"`, `/c.yaml:1: x.x.b = "2"`, `/c.yaml:1: x.y.b = "3"`, `/c.yaml:1: x.y.c = "4"`,
			`/c.yaml:2: z.c = "5"`, `/c.yaml:1: z.b = "3"`, `/c.yaml:1: z.a = "1"`, `/c.yaml:3: flags.name = "n"`,
		}},
		"a merge of merges": {"a: &a {k: 1}\nb: &b {<<: *a, l: 2}\nc: {<<: *b, k: 3}\n", []string{
			`/c.yaml:1: a.k = "1"`, `/c.yaml:2: b.l = "2"`, `/c.yaml:1: b.k = "1"`, `/c.yaml:3: c.k = "3"`, `/c.yaml:2: c.l = "2"`,
		}},
		"a quoted merge key is none": {"policy: {\"<<\": {a: 1}}\n", []string{`/c.yaml:1: policy.<<.a = "1"`}},
	} {
		t.Run(name, func(t *testing.T) {
			values, problems := parse(tc.text)
			if diff := cmp.Diff(tc.want, values); diff != "" || problems != nil {
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
		"another document":           {"version: v1\n---\nflags: {name: x}\n", []string{"/c.yaml:2: another document begins: want one"}},
		"another, broken document":   {"version: v1\n---\n{\n", []string{"/c.yaml: line 3: did not find expected node content"}},
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

// A mapping reports each key that it does not have, with its line.
func TestFields(t *testing.T) {
	text := "flags: {name: 1}\nflags: {name: 2}\nflag: x\n? [a]\n: b\n? \"a\\nb\"\n: c\n\"\": d\nlist: x\nmap: {a: 1}\nlong: 3\n"
	d := document.Parse("/c.yaml", []byte(text))
	root := d.Root().Fields("flags", "list", "map", "long")
	if v := root.At("flags"); v.Where() != "/c.yaml:1: flags" || len(root.Given("flags", "name")) != 1 {
		t.Errorf("%+v", v)
	}
	if v := root.At("flags").Fields("name", "other").At("other"); v.Given() || v.Where() != "/c.yaml:1: flags.other" {
		t.Errorf("%+v", v)
	}
	root.At("list").Items()
	root.At("map").Scalar()
	root.At("long").Fields("a", "b")
	root.At("long").Fields("a", "b", "c", "d", "e", "f", "g")
	want := strings.Split(`/c.yaml:2: flags = "{...}": given twice
/c.yaml:3: flag = "x": unknown key: did you mean flags?
/c.yaml:4: (not a scalar) = "b": unknown key: want flags, list, map or long
/c.yaml:6: "a\nb" = "c": unknown key: want flags, list, map or long
/c.yaml:8: "" = "d": unknown key: want flags, list, map or long
/c.yaml:9: list = "x": want a list
/c.yaml:10: map = "{...}": want a single value
/c.yaml:11: long = "3": want a mapping with a or b
/c.yaml:11: long = "3": want a mapping`, "\n")
	if diff := cmp.Diff(want, strings.Split(d.Err().Error(), "\n")); diff != "" {
		t.Error(diff)
	}
	if d := document.Parse("/c.yaml", []byte("flags\n")); len(d.Root().Fields("a", "b").Given("a")) > 0 || d.Err().Error() != "/c.yaml:1: want a mapping with a or b" {
		t.Error(d.Err())
	}
}

func TestNearest(t *testing.T) {
	names := []string{"flags", "health", "imex", "resources", "sharing", "timeSlicing"}
	for written, want := range map[string]string{
		"flag": "flags", "shearing": "sharing", "timeslicing": "timeSlicing", "slicing": "timeSlicing", "ressource": "resources", "": "imex", "HEALTH": "health",
	} {
		if got := document.Nearest(written, names); got != want {
			t.Errorf("%q: %q, want %q", written, got, want)
		}
	}
}
