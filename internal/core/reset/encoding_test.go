package reset_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/reset"
)

// What nvidia-smi prints is bounded, whatever it is.
func TestBounds(t *testing.T) {
	w := faultyWorld(t, 1)
	w.gpu(0).Cause = strings.Repeat("X", 1000)
	w.try(0, reset.Cancelled, strings.Repeat("<", 5000))
	w.now = w.now.Add(minute)
	w.begins(0)
	w.now = w.now.Add(-second)
	w.end(0, reset.Failed, "\xff\n\x1b[31m"+strings.Repeat("é ", 1000))
	last := w.record(0).Last
	if len(last.Text) > 512 || !strings.HasPrefix(last.Text, "? [31mé é") || !strings.HasSuffix(last.Text, "...") || len(last.Cause) != 64 {
		t.Errorf("%+v", last)
	}
	w.restart()
	if again := w.record(0).Last; *again != *last {
		t.Errorf("%+v", again)
	}
}

// A text that is not of this program is refused as a whole, with an error that has the reason.
func TestParse(t *testing.T) {
	gpu := func(more string) string {
		return `{"version":1,"begun":3,"gpus":[{"gpu":"GPU-1"` + more + `}]}`
	}
	const at = `"2026-11-27T09:00:00Z"`
	for text, want := range map[string]string{
		``:                                    "unexpected end of JSON input",
		`{}`:                                  "its version is 0, and this program reads 1",
		`{"version":2,"gpus":7}`:              "its version is 2, and this program reads 1",
		`{"version":1,"gpus":7}`:              "cannot unmarshal number",
		strings.Repeat(" ", reset.MaxBytes+1): "it has 1048577 bytes, and 1048576 are the most",
		`{"version":1,"gpus":[{}]}`:           "no UUID",
		`{"version":1,"gpus":[` + strings.Repeat(`{"gpu":"GPU-1"},`, 128) + `{"gpu":"GPU-2"}]}`: "it has 129 GPUs, and 128 are the most",
		`{"version":1,"begun":18446744073709551615}`:                                            "it has 18446744073709551615 resets",
		gpu(`,"attempts":-1`):                                             "its attempts can't be",
		gpu(`,"refusals":1001`):                                           "its attempts can't be",
		gpu(`,"day":["0001-01-01T00:00:00Z"]`):                            "its attempts of a day can't be",
		gpu(`,"attempts":1`):                                              "attempts without an end",
		gpu(`,"retry":` + at):                                             "it waits after no reset",
		gpu(`,"notBegun":"x","retry":"9999-11-27T09:00:00Z"`):             "it has a time that no clock shows",
		gpu(`,"last":{"number":1,"outcome":"cancelled","at":` + at + `}`): "its last end can't be",
		gpu(`,"last":{"number":1,"outcome":"done"}`):                      "its last end can't be",
		gpu(`,"last":{"number":4,"outcome":"done","at":` + at + `}`):      "its number is of no reset",
		gpu(`,"last":{"number":1,"outcome":"perhaps"}`):                   `unknown outcome "perhaps"`,
		gpu(`,"running":{"number":1}`):                                    "its reset can't be",
		gpu(`,"running":{"began":` + at + `}`):                            "its reset can't be",
		gpu(`,"running":{"number":4,"began":` + at + `}`):                 "its number is of no reset",
		`{"version":1,"gpus":[{"gpu":"GPU-2"},{"gpu":"GPU-1"}]}`:          "the record of GPU-1: it is there twice, or not in order",
		`{"version":1,"begun":2,"gpus":[{"gpu":"GPU-1","running":{"number":1,"began":` + at + `}},{"gpu":"GPU-2","running":{"number":2,"began":` + at + `}}]}`: "the record of GPU-2: another GPU is reset at the same time",
	} {
		s, err := reset.Parse([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) || s.Begun > 0 {
			t.Errorf("%.200s: %v, want %s", text, err, want)
		}
	}
	if _, err := reset.Parse([]byte(`{"version":9}`)); !isA[*durable.VersionError](err) {
		t.Error(err)
	}
	if _, err := reset.Parse([]byte(gpu(`,"attempts":1`))); !isA[*durable.ContentError](err) {
		t.Error(err)
	}
	if _, err := reset.Parse([]byte(gpu(""))); err != nil {
		t.Error(err)
	}
}

func isA[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// FuzzParse has texts of any content: the decision does not fail, and what it makes of one that is accepted is accepted again.
func FuzzParse(f *testing.F) {
	w := faultyWorld(f, 3)
	w.fault(1)
	for _, o := range []reset.Outcome{reset.Done, reset.InUse, reset.Failed} {
		w.pass(hour)
		id := w.last.Begin[0].GPU
		for i := range w.node.GPUs {
			if w.gpu(i).ID == id {
				f.Add([]byte(w.encoded(w.state.Calls(id, true))))
				w.end(i, o, "text")
				break
			}
		}
		f.Add([]byte(w.encoded(w.state)))
		if r, runs := w.state.Running(); runs {
			w.state = w.state.Ended(r.GPU, reset.End{Number: r.Running.Number}, w.now)
		}
	}
	f.Add([]byte(`{"version":1,"gpus":[{"gpu":"0","notBegun":"x","retry":"2200-01-01T00:00:00Z"},{"gpu":"1","notBegun":"x","retry":"1000-01-01T00:00:00Z"}]}`)) // times far apart
	policy, node := w.policy, w.node
	f.Fuzz(func(t *testing.T, text []byte) {
		now := w.now
		s, err := reset.Parse(text)
		if err != nil {
			return
		}
		for range 3 {
			r := policy.Next(s, node, now)
			for i, b := range r.Begin {
				r.State = r.State.Calls(b.GPU, i == 0).Ended(b.GPU, reset.End{Number: b.Number, Outcome: reset.Failed}, now)
			}
			again, err := r.State.Encode()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := reset.Parse(again); err != nil {
				t.Fatalf("%v\nin  %s\nout %s", err, text, again)
			}
			s, now = r.State, now.Add(hour)
		}
	})
}

func TestNames(t *testing.T) {
	for _, m := range []reset.Mode{reset.Off, reset.Report, reset.Act} {
		var again reset.Mode
		if text, err := m.MarshalText(); err != nil || string(text) != m.String() || again.UnmarshalText(text) != nil || again != m {
			t.Errorf("%s, %v", m, err)
		}
	}
	var m reset.Mode
	if err := m.UnmarshalText([]byte("on")); err == nil {
		t.Error(m)
	}
	for o := reset.Cancelled; o <= reset.Interrupted; o++ {
		var again reset.Outcome
		if text, err := o.MarshalText(); err != nil || string(text) != o.String() || again.UnmarshalText(text) != nil || again != o {
			t.Errorf("%s, %v", o, err)
		}
	}
	if p := reset.Default(); p.On() || p.Attempts != 2 || health.RecoveryNone == 0 {
		t.Errorf("%+v", p)
	}
}
