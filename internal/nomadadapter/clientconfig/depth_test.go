package clientconfig_test

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/clientconfig"
)

// A text of 3,000,000 levels is an error: the parser calls itself for each level, and no program survives the overflow
// of its stack.
func TestDepthIsBounded(t *testing.T) {
	const many = 3_000_000
	for _, c := range []struct{ name, text string }{
		{"blocks", strings.Repeat("a {\n", many)},
		{"blocks that end", strings.Repeat("a {", many) + strings.Repeat("}", many)},
		{"lists", "a = " + strings.Repeat("[", many)},
		{"both", "a = " + strings.Repeat("[{a=", many)},
		{"after a mistake", "\x01 a = " + strings.Repeat("[", many)},
		{"JSON", strings.Repeat(`{"a":`, many)},
		{"JSON after space", "\u00a0\n" + strings.Repeat(`{"a":`, many)},
		{"JSON lists", `{"a":` + strings.Repeat("[", many)},
		{"JSON, brackets in texts", strings.Repeat(`{"}}${":["]]",`, many)},
		{"brackets in texts", "a = " + strings.Repeat(`["]]\"]", `, many)},
		{"brackets in comments", strings.Repeat("a { # }}}\n", many)},
	} {
		_, err := clientconfig.Parse("c.hcl", []byte(c.text))
		if err == nil || !strings.Contains(err.Error(), "nested deeper than 100 levels") {
			t.Errorf("%s: %.200v", c.name, err)
		}
	}
}

// Many blocks that are not nested are no problem, nor brackets in texts and comments.
func TestFlatTextIsParsed(t *testing.T) {
	const many = 1000
	for _, c := range []struct{ name, text string }{
		{"blocks", strings.Repeat("host_volume \"x\" {}\n", many)},
		{"texts", "a = \"" + strings.Repeat("{[", many) + "\""},
		{"interpolation", "a = \"${" + strings.Repeat("{", many) + strings.Repeat("}", many) + "}\""},
		{"comments", "# " + strings.Repeat("{", many) + "\na = 1"},
		{"JSON texts", `{"a": "` + strings.Repeat("{[${", many) + `"}`},
		{"100 levels", strings.Repeat("a {\n", 100) + strings.Repeat("}\n", 100)},
	} {
		if _, err := clientconfig.Parse("c.hcl", []byte(c.text)); err != nil {
			t.Errorf("%s: %.200v", c.name, err)
		}
	}
}
