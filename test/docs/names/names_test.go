package names

import (
	"errors"
	"strings"
	"testing"
)

// Each way in which a table can be wrong is a problem with its line.
func TestProblems(t *testing.T) {
	list := "# a comment\na.x\na.y\tdetail\nb\n"
	for name, c := range map[string]struct {
		rows string
		want []string
	}{
		"good":              {"| `a.*` | same | |\n| `b` | differs | another unit |\n", nil},
		"in no row":         {"| `a.*` | same | |\n", []string{"b of the list l is in 0 rows"}},
		"in two rows":       {"| `a.*`, `b` | same | |\n| `a.x` | differs | why |\n", []string{"a.x of the list l is in 2 rows, want 1: lines [2 3]"}},
		"not in the list":   {"| `a.*`, `b`, `c`, `d.*` | same | |\n", []string{":2: c: the list l has no such name", ":2: d.*: the list l has no such name"}},
		"another word":      {"| `a.*`, `b` | Same | |\n", []string{`:2: "Same" in the second column`}},
		"without a reason":  {"| `a.*` | not covered | |\n| `b` | differs |  |\n", []string{":2: not covered without a reason", ":3: differs without a reason"}},
		"too few columns":   {"| `a.*`, `b` | same |\n", []string{":2: 2 columns, want 3"}},
		"no other sections": {"| `a.*`, `b` | same | |\n<!-- end -->\n| `c` | same | |\n", nil},
	} {
		tables, err := tablesOf("<!-- names l -->\n" + c.rows)
		err = errors.Join(err, answer("l", parse(list), tables["l"]))
		if (err == nil) != (c.want == nil) {
			t.Errorf("%s: %v", name, err)
		}
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", name, err, want)
			}
		}
	}
}

// What the document has is compared with the program.
func TestCheck(t *testing.T) {
	absent := errors.New("absent")
	for _, c := range []struct {
		answer Answer
		has    error
		ok     bool
	}{
		{Same, nil, true}, {Same, absent, false}, {NotCovered, nil, false}, {NotCovered, absent, true}, {Differs, nil, true}, {Differs, absent, true},
	} {
		if err := Check("l", Name{Name: "n", Answer: c.answer}, c.has); (err == nil) != c.ok {
			t.Errorf("%s, %v: %v", c.answer, c.has, err)
		}
	}
}
