package kube

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
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

// The server's count of devices may be of before a fault, and of before its end: the lower one of it and the agent's is used.
func TestReportedDevices(t *testing.T) {
	with := func(devices map[string]int) string {
		text, err := faultreport.Encode(faultreport.Report{At: start, Faults: []faultreport.Fault{xid("GPU-1")}, Devices: devices})
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	for name, tc := range map[string]struct {
		text          string
		counted, want int
	}{
		"no report":            {"", 8, 8},
		"count of before":      {with(map[string]int{gpuResource: 7}), 8, 7},
		"count of after":       {with(map[string]int{gpuResource: 7}), 7, 7},
		"agent was restarted":  {with(map[string]int{gpuResource: 7}), 0, 0},
		"resource is not told": {with(nil), 8, 0},
		"can't be read":        {"{", 8, 0},
	} {
		if got := (report{}).next(tc.text, start, true).allocatable(gpuResource, tc.counted); got != tc.want {
			t.Errorf("%s: %d, want %d", name, got, tc.want)
		}
	}
}

// A node of which not all faults are known has no free devices.
func TestReportIsWhole(t *testing.T) {
	for text, want := range map[string]bool{"": true, encoded(t, start, xid("GPU-1")): true, "{": false, `{"v":1,"faults":[],"more":3}`: false} {
		if got := (report{}).next(text, start, true).whole(); got != want {
			t.Errorf("%q: %t", text, got)
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
