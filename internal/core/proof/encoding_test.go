package proof_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// What a command writes is bounded, whatever it is.
func TestBounds(t *testing.T) {
	w := newWorld(t, 1)
	b := w.until(20 * minute)
	values := map[string]float64{"nan": math.NaN(), "inf": math.Inf(-1), "with space": 1, "": 2, strings.Repeat("n", 65): 3, "0": 4, "é": 5}
	for i := range 100 {
		values[fmt.Sprintf("v_%03d", i)] = float64(i)
	}
	w.state, _ = w.state.Ended(proof.End{GPU: b.GPU, Number: b.Number, Outcome: proof.Passed, Took: -second, Summary: "\xff\n\x1b[31m" + strings.Repeat("é ", 1000), Values: values}, w.now)
	last := w.record(b.GPU).Last
	if len(last.Values) != 32 || last.Values["v_031"] != 31 || last.Took != 0 {
		t.Errorf("%+v", last)
	}
	if len(last.Summary) > 256 || !strings.HasPrefix(last.Summary, "? [31mé é") || !strings.HasSuffix(last.Summary, "...") {
		t.Errorf("%q", last.Summary)
	}
	w.restart()
	if again := w.record(b.GPU).Last; again.Summary != last.Summary || len(again.Values) != 32 {
		t.Errorf("%+v", again)
	}
}

// A text that is not of this program is refused as a whole, with an error that has the reason.
func TestParse(t *testing.T) {
	gpu := func(more string) string {
		return `{"version":1,"begun":3,"gpus":[{"gpu":"GPU-1","since":"2026-11-27T09:00:00Z"` + more + `}]}`
	}
	for text, want := range map[string]string{
		``:                                       "unexpected end of JSON input",
		`{}`:                                     "its version is 0, and this program reads 1",
		`{"version":2,"gpus":7}`:                 "its version is 2, and this program reads 1",
		`{"version":1,"gpus":7}`:                 "cannot unmarshal number",
		strings.Repeat(" ", proof.MaxBytes+1):    "it has 2097153 bytes, and 2097152 are the most",
		`{"version":1,"gpus":[{}]}`:              "no UUID",
		`{"version":1,"gpus":[{"gpu":"GPU-1"}]}`: "the record of GPU-1: no time",
		gpu(`,"needsService":true`):              "needs service without a failure",
		gpu(`,"tries":{"count":-1}`):             "its tries can't be",
		gpu(`,"running":{"number":1,"reason":"boot"}`):                                                                         "its proof has no beginning",
		gpu(`,"running":{"number":4,"reason":"boot","began":"2026-11-27T09:00:00Z"}`):                                          "its proof has the number 4",
		gpu(`,"fault":"9999-11-27T09:00:00Z"`):                                                                                 "it has a time that no clock shows",
		gpu(`,"running":{"number":1,"reason":"whim"}`):                                                                         `unknown reason "whim"`,
		gpu(`,"last":{"passed":true,"reason":"boot"}`):                                                                         "its verdict can't be",
		gpu(`,"last":{"passed":true,"reason":"boot","at":"2026-11-27T09:00:00Z","values":{"a b":1}}`):                          `"a b" is no name of a value`,
		`{"version":1,"gpus":[{"gpu":"GPU-2","since":"2026-11-27T09:00:00Z"},{"gpu":"GPU-1","since":"2026-11-27T09:00:00Z"}]}`: "the record of GPU-1: it is there twice, or not in order",
	} {
		_, err := proof.Parse([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.200s: %v, want %s", text, err, want)
		}
	}
	var version *durable.VersionError
	if _, err := proof.Parse([]byte(`{"version":9}`)); !errors.As(err, &version) || version.Version != 9 {
		t.Error(err)
	}
	var content *durable.ContentError
	if _, err := proof.Parse([]byte(gpu(`,"needsService":true`))); !errors.As(err, &content) || content.GPU != "GPU-1" {
		t.Error(err)
	}
	if _, err := proof.Parse([]byte(gpu(""))); err != nil {
		t.Error(err)
	}
}

// FuzzParse has texts of any content: the decision does not fail, and what it makes of one that is accepted is accepted again.
func FuzzParse(f *testing.F) {
	w := newWorld(f, 3)
	w.policy.Withhold = true
	for _, o := range []proof.Outcome{proof.Passed, proof.Failed, proof.NotRun} {
		w.end(w.until(2*minute).GPU, o)
		f.Add([]byte(w.encoded(w.state)))
	}
	w.gpu(1).Reset = w.now.Add(second)
	w.until(2 * minute)
	f.Add([]byte(w.encoded(w.state)))
	f.Add([]byte(`{"version":1,"gpus":[{"gpu":"0","since":"2200-01-01T00:00:00Z"},{"gpu":"1","since":"1000-01-01T00:00:00Z"}]}`)) // times far apart
	policy, node := w.policy, w.node
	f.Fuzz(func(t *testing.T, text []byte) {
		now := w.now
		s, err := proof.Parse(text)
		if err != nil {
			return
		}
		for range 3 {
			r := policy.Next(s, node, now)
			for _, b := range r.Begin {
				r.State, _ = r.State.Ended(proof.End{GPU: b.GPU, Number: b.Number, Outcome: proof.Failed}, now)
			}
			again, err := r.State.Encode()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := proof.Parse(again); err != nil {
				t.Fatalf("%v\nin  %s\nout %s", err, text, again)
			}
			s, now = r.State, now.Add(hour)
		}
	})
}

func TestCheck(t *testing.T) {
	good := proof.Default()
	good.Command = []string{"/bin/true"}
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	bad := proof.Policy{Command: []string{"true"}, Every: second, OnFail: health.GPULost, Windows: []proof.Window{{From: hour, To: hour}}}
	var keys []string
	joined, _ := bad.Check().(interface{ Unwrap() []error })
	for _, err := range joined.Unwrap() {
		one, ok := errors.AsType[*setting.Error](err)
		if !ok || one.Remedy == "" || one.Value == "" {
			t.Errorf("%v", err)
			continue
		}
		keys = append(keys, one.Key)
	}
	if got := strings.Join(keys, " "); got != "command at onFail windows maxPerNode timeout every idleFor" {
		t.Error(got)
	}
}
