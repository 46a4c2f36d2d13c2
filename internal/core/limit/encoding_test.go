package limit_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
)

// What is written is read as the same, and what this program can't have written is refused.
func TestEncoding(t *testing.T) {
	w := newWorld(limit.Misc, zero)
	k := w.start(limit.ByTask, zero, 20*gib, 1)
	w.charge(w.fork(k.groups[0], k.owner()), zero, gib)
	ended := w.start(limit.ByTask, zero, 10*gib, 1)
	w.passes.pass()
	w.end(ended)
	w.passes.pass()
	s := w.passes.saved.WithPod(limit.Pod{Work: holders.Work{ID: "u"}, GPU: zero, Bytes: gib}).WithPod(limit.Pod{Work: holders.Work{ID: "u", Claim: "c"}, GPU: one, Bytes: gib})
	text, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	again, err := limit.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	same, _ := again.Encode()
	if string(same) != string(text) || len(again.Records) != 1 || len(again.Records[0].Uncounted) != 1 || len(again.Pods) != 2 || len(again.Leftovers) != 1 {
		t.Errorf("%s\n%s", text, same)
	}
	if less := again.WithoutPod(holders.Work{ID: "u", Claim: "c"}); len(less.Pods) != 1 || len(again.Pods) != 2 {
		t.Errorf("%+v", less)
	}
	for name, change := range map[string][2]string{
		"no GPU":                 {`"gpu": "GPU-0"`, `"gpu": ""`},
		"no path":                {`"path": "/nomad`, `"path": "","x": "`},
		"no bytes":               {`"bytes": 1073741824`, `"bytes": 0`},
		"wrong time":             {`"boot": "boot"`, `"boot": "boot", "bootTime": "9999-01-01T00:00:00Z"`},
		"not in order, or twice": {`"gpu": "GPU-1"`, `"gpu": "GPU-0"`},
	} {
		bad := strings.Replace(string(text), change[0], change[1], 1)
		if name == "not in order, or twice" {
			bad = strings.Replace(bad, `"Claim": "c"`, `"Claim": ""`, 1)
		}
		got, err := limit.Parse([]byte(bad))
		if _, is := errors.AsType[*durable.ContentError](err); !is || !reflect.DeepEqual(got, limit.Saved{}) {
			t.Errorf("%s: %v, %+v", name, err, got)
		}
	}
	older := strings.Replace(string(text), `"leftovers"`, `"values"`, 1)
	if got, err := limit.Parse([]byte(older)); err != nil || len(got.Records) != 1 || got.Leftovers != nil {
		t.Errorf("a file of before: %v, %+v", err, got)
	}
	if _, err := limit.Parse([]byte(`{"version": 2}`)); err == nil {
		t.Error("another version is read")
	}
}
