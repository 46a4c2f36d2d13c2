package proofcommand

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"
)

// Case 19.
func TestOutputIsBounded(t *testing.T) {
	bothWays(t, func(r *rig) {
		for name, script := range map[string]string{
			"stdout": `head -c 10000000 /dev/zero | tr '\0' '\377'`,
			"stderr": `head -c 10000000 /dev/zero | tr '\0' '\377' >&2; echo; echo '{"values": {"a": 1}}'`,
			"both":   `head -c 10000000 /dev/zero >&2 & head -c 10000000 /dev/zero; wait`,
		} {
			got := r.script(script)
			if got.Outcome != Passed || len(got.Output) == 0 || len(got.Output) > maxOutput || !utf8.ValidString(got.Output) || got.Summary != "" {
				r.Errorf("%s: %v, %d bytes of output, summary %.100q", name, got.Outcome, len(got.Output), got.Summary)
			}
			if isLine := name == "stderr"; isLine != (got.Values["a"] == 1) || isLine != (got.Note == "") {
				r.Errorf("%s: values %v, note %q", name, got.Values, got.Note)
			}
		}
	})
}

func TestTailKeepsTheEnd(t *testing.T) {
	whole, end := "", Tail{limit: 10}
	for i := range 200 {
		piece := fmt.Sprint(i, strings.Repeat("x", i%23))
		whole += piece
		_, _ = end.Write([]byte(piece))
		if want := whole[max(len(whole)-10, 0):]; i%3 == 0 && end.String() != want {
			t.Fatalf("%q, want %q", end.String(), want)
		}
		if cap(end.text) > 100 {
			t.Fatalf("%d bytes are kept", cap(end.text))
		}
	}
}

// Case 19: what is not understood is dropped, with a note.
func TestLastLine(t *testing.T) {
	many := make([]string, maxValues+2)
	for i := range many {
		many[i] = fmt.Sprintf(`"v%02d": %d`, i, i)
	}
	for _, c := range []struct {
		name, stdout, summary, note string
		values                      map[string]float64
	}{
		{name: "whole", stdout: "noise\n" + `{"summary": "fast", "values": {"gemm_tflops": 612.3, "b": -1e3}}` + "\n", summary: "fast",
			values: map[string]float64{"gemm_tflops": 612.3, "b": -1000}},
		{name: "no line break", stdout: `{"values": {"a": 0}}`, values: map[string]float64{"a": 0}},
		{name: "empty lines after it", stdout: `{"summary": "s"}` + "\r\n \n\n", summary: "s"},
		{name: "nothing"},
		{name: "text", stdout: "a\nECC\x1b[31m  errors:\t\xff7\n", summary: "ECC?[31m errors: ?7"},
		{name: "long text", stdout: strings.Repeat("é", 300), summary: strings.Repeat("é", maxSummary)},
		{name: "too long", stdout: strings.Repeat("a", maxLine+1), note: "the last line of stdout has more than 16384 bytes: it is not read"},
		{name: "as long as it may be", stdout: "x\n{\"summary\": \"s\", \"pad\": \"" + strings.Repeat("a", maxLine-len(`{"summary": "s", "pad": ""}`)) + "\"}\n", summary: "s"},
		{name: "only the last line", stdout: `{"summary": "s"}` + "\nbye\n", summary: "bye"},
		{name: "other keys", stdout: `{"Summary": "S", "VALUES": {"a": 1}, "more": [[[]]]}`},
		{name: "control characters", stdout: `{"summary": "a\n\u001b[2J\u0000b"}`, summary: "a ?[2J?b"},
		{name: "two objects", stdout: `{} {}`, note: "the last line of stdout is not a JSON object: invalid character '{' after top-level value"},
		{name: "deep", stdout: `{"values": ` + strings.Repeat("[", 10002), note: "the last line of stdout is not a JSON object: invalid character '[' exceeded max depth"},
		{name: "deep value", stdout: `{"values": {"a": ` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `, "b": 1}}`, values: map[string]float64{"b": 1},
			note: "dropped of the last line of stdout: value a: not a finite number (1 in all)"},
		{name: "types", stdout: `{"summary": 5, "values": [1]}`, note: "dropped of the last line of stdout: summary is not a string (2 in all)"},
		{name: "numbers", stdout: `{"values": {"a": 1e999, "b": "1", "c": null, "d": true, "e": 1}}`, values: map[string]float64{"e": 1},
			note: "dropped of the last line of stdout: value a: not a finite number (4 in all)"},
		{name: "NaN", stdout: `{"values": {"a": NaN}}`, note: "the last line of stdout is not a JSON object: invalid character 'N' looking for beginning of value"},
		{name: "names", stdout: `{"values": {"A": 1, "": 1, "1a": 1, "a-b": 1, "é": 1, "` + strings.Repeat("a", 65) + `": 1, "` + strings.Repeat("b", 64) + `": 1}}`,
			values: map[string]float64{strings.Repeat("b", 64): 1},
			note:   `dropped of the last line of stdout: value "": a name has at most 64 of a-z, 0-9 and _, and begins with a letter (6 in all)`},
		{name: "too many", stdout: `{"values": {` + strings.Join(many, ", ") + `}}`, values: func() map[string]float64 {
			values := map[string]float64{}
			for i := range maxValues {
				values[fmt.Sprintf("v%02d", i)] = float64(i)
			}
			return values
		}(), note: "dropped of the last line of stdout: value v32: there are more than 32 (2 in all)"},
	} {
		o := newOutput()
		_, _ = o.stdout.Write([]byte(c.stdout))
		got := o.result()
		if got.Summary != c.summary || !maps.Equal(got.Values, c.values) || got.Note != c.note {
			t.Errorf("%s: summary %q, values %v, note %q", c.name, got.Summary, got.Values, got.Note)
		}
	}
}
