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

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"":                         "",
		"one\n\ttwo  é\n":          "one\n\ttwo  é\n",
		"\x1b]0;title\a\x1b[2Jred": "?]0;title??[2Jred",
		"a\rb\x7f\u009b31m":        "a?b??31m",
		"cut \xc3":                 "cut ?",
		"\u202egnp.exe":            "?gnp.exe",
	} {
		if got := oneline.Printable(text); got != want {
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
