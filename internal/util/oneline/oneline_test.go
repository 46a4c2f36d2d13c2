package oneline_test

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/util/oneline"
)

func TestOf(t *testing.T) {
	for text, want := range map[string]string{
		"":                      "",
		" GPU 1\n\tfailed \r\n": "GPU 1 failed",
		"\x1b[31mred":           "[31mred",
		"a\xffb":                "a?b",
		"twelve bytes":          "twelve bytes",
		"thirteen byte":         "thirteen ...",
		"ééééééé":               "éééé...",
	} {
		if got := oneline.Of(text, 12); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestFew(t *testing.T) {
	names := strings.Fields("a b c d")
	for n, want := range []string{"", "a", "a and b", "a, b and 1 more", "a, b and 2 more"} {
		if got := oneline.Few(names[:n]); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
