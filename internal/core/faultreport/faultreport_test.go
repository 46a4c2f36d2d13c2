package faultreport_test

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

var report = faultreport.Report{
	Version: faultreport.Version, At: time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC), Boot: "b1",
	Faults: []faultreport.Fault{
		{GPU: "GPU-1", State: health.GPULost, Repair: health.Reboot, Cause: "LOST", Since: time.Date(2026, 11, 27, 11, 0, 0, 0, time.UTC), Holders: []string{"u1"}, HoldersKnown: true},
		{GPU: "GPU-2", GI: new(uint32(3)), State: health.Unhealthy, Repair: health.Reset, Cause: "XID_95", Advisory: true},
	},
	Devices: map[string]int{"nvidia.com/gpu": 6, "nvidia.com/mig-1g.10gb": 0},
}

// What is written is read.
func TestReport(t *testing.T) {
	text, err := faultreport.Encode(report)
	if err != nil {
		t.Fatal(err)
	}
	got, err := faultreport.Parse(text)
	if err != nil || !reflect.DeepEqual(got, report) {
		t.Errorf("got %+v, %v\nwant %+v", got, err, report)
	}
	if at, want := got.Faults[1].Placement(), (gpu.Placement{GPU: "GPU-2", GI: 3, CI: gpu.Whole}); at != want {
		t.Errorf("placement %v, want %v", at, want)
	}
}

// A report that is too long is cut by whole faults from its end.
func TestReportIsCut(t *testing.T) {
	long := report
	for len(long.Faults) < 200 {
		long.Faults = append(long.Faults, report.Faults[0])
	}
	text, err := faultreport.Encode(long)
	if err != nil || len(text) > faultreport.MaxBytes {
		t.Fatalf("%d bytes, %v", len(text), err)
	}
	got, err := faultreport.Parse(text)
	if err != nil || len(got.Faults)+got.More != 200 || got.More == 0 || got.Faults[0].Cause != "LOST" {
		t.Errorf("%d faults, %d more, %v", len(got.Faults), got.More, err)
	}
}

// A text that is no report is an error, which names what is wrong.
func TestReportIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":                                   "read the report",
		`{"v":2}`:                            "version 2",
		`{"v":1,"faults":[{"gpu":""}]}`:      "fault 0",
		`{"v":1,"faults":[{"gpu":"GPU-1"}]}`: "cause",
		strings.Repeat(" ", 1+faultreport.MaxBytes):                                             "bytes",
		`{"v":1,"faults":[{"gpu":"GPU-1","cause":"LOST","state":"ill"}]}`:                       "state",
		`{"v":1,"faults":[{"gpu":"GPU-1","cause":"\u001b[2J"}]}`:                                "cause",
		`{"v":1,"faults":[{"gpu":"GPU-1\n","cause":"LOST"}]}`:                                   "GPU",
		`{"v":1,"faults":[{"gpu":"GPU-1","cause":"` + strings.Repeat("X", 65) + `"}]}`:          "cause",
		`{"v":1,"faults":[{"gpu":"GPU-` + strings.Repeat("1", 125) + `","cause":"LOST"}]}`:      "GPU",
		`{"v":1,"faults":[{"gpu":"GPU-1","cause":"LOST","since":"0000-01-01T00:00:00+23:59"}]}`: "since",
	} {
		if _, err := faultreport.Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	text, _ := faultreport.Encode(report)
	f.Add(text)
	f.Fuzz(func(t *testing.T, text string) {
		r, err := faultreport.Parse(text)
		if err != nil {
			return
		}
		if _, err := faultreport.Encode(r); err != nil {
			t.Errorf("a report that was read can't be written: %v", err)
		}
		for _, f := range r.Faults {
			if _, err := f.Since.UTC().MarshalJSON(); err != nil {
				t.Errorf("a time that was read can't be written: %v", err)
			}
		}
	})
}
