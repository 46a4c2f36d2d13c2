package kube

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

func encoded(t *testing.T, at time.Time, faults ...faultreport.Fault) string {
	text, err := faultreport.Encode(faultreport.Report{At: at, Faults: faults})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// When the word of an agent is of, after each annotation that is read.
func TestReportAge(t *testing.T) {
	one, two := encoded(t, start, xid("GPU-1")), encoded(t, start.Add(30*time.Second), xid("GPU-1"))
	type read struct {
		text    string
		current bool
	}
	for name, tc := range map[string]struct {
		reads []read // one each minute
		want  int    // minutes after the first
	}{
		"first":                           {[]read{{one, true}}, -1},
		"unchanged":                       {[]read{{one, true}, {one, true}}, -1},
		"renewed":                         {[]read{{one, true}, {two, true}}, 1},
		"renewed, and old since":          {[]read{{one, true}, {two, true}, {two, true}}, 1},
		"changed while nothing was read":  {[]read{{one, true}, {two, false}}, -1},
		"and the renewal of before holds": {[]read{{one, true}, {two, true}, {one, false}}, 1},
		"without faults":                  {[]read{{encoded(t, start), true}}, 0},
		"faults have ended":               {[]read{{one, true}, {encoded(t, start), true}}, 1},
		"faults begin":                    {[]read{{encoded(t, start), true}, {one, true}}, 1},
		"no annotation":                   {[]read{{"", true}}, -1},
		"annotation is removed":           {[]read{{one, true}, {two, true}, {"", true}}, -1},
		"annotation is new":               {[]read{{"", true}, {one, true}}, 1},
		"can't be read":                   {[]read{{one, true}, {two, true}, {"{", true}}, -1},
		"can be read again":               {[]read{{"{", true}, {one, true}}, 1},
	} {
		var r report
		at := start
		for i, one := range tc.reads {
			at = start.Add(time.Duration(i) * time.Minute)
			r = r.next(one.text, at, one.current)
		}
		want := time.Time{}
		if tc.want >= 0 {
			want = start.Add(time.Duration(tc.want) * time.Minute)
		}
		if got := r.reportedAt(at); !got.Equal(want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

// The counts of a node are used again some time after the latest fault that takes a GPU from new work.
func TestReportSettles(t *testing.T) {
	degraded := xid("GPU-2")
	degraded.State = health.Degraded
	worse := xid("GPU-2")
	var r report
	for i, step := range []struct {
		text    string
		after   time.Duration
		counted bool
	}{
		{encoded(t, start), 0, true},
		{encoded(t, start, xid("GPU-1")), time.Minute, false},
		{encoded(t, start, xid("GPU-1")), time.Minute + settle, true},
		{encoded(t, start.Add(time.Second), xid("GPU-1")), 2 * time.Minute, true},
		{encoded(t, start, xid("GPU-1"), degraded), 3 * time.Minute, false},
		{encoded(t, start, xid("GPU-1"), degraded), 4 * time.Minute, true},
		{encoded(t, start, xid("GPU-1"), worse), 5 * time.Minute, false},
		{encoded(t, start), 6 * time.Minute, true},
		{"{", 7 * time.Minute, false},
		{`{"v":1,"at":"2026-11-27T12:00:00Z","faults":[],"more":3}`, 9 * time.Minute, false},
	} {
		r = r.next(step.text, start.Add(step.after), true)
		if got := r.counted(start.Add(step.after)); got != step.counted {
			t.Errorf("step %d: counted %t", i, got)
		}
	}
}

// A node that is gone is forgotten.
func TestReportsForget(t *testing.T) {
	all := reports{}
	all.see([]*node{{named: named{name: "a"}}, {named: named{name: "b"}}}, start, true)
	all.see([]*node{{named: named{name: "b"}}}, start, true)
	if _, ok := all["a"]; ok || len(all) != 1 {
		t.Errorf("%v", all)
	}
}
