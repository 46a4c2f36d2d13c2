package faultreport_test

import (
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// The beginning of Nomad's HealthDescription is an interface: its words do not change.
func TestDescription(t *testing.T) {
	minute := time.Date(2026, 11, 20, 10, 31, 0, 0, time.UTC)
	fault := health.Health{
		State: health.Unhealthy, Reason: health.ReasonXID, Code: 95, Detail: "uncontained memory error", Since: minute.Add(20 * time.Second),
		RecoveryAction: health.RecoveryReset, Action: "drain and reset the GPU", Clears: "reset seen",
	}
	with := func(change func(*health.Health)) health.Health {
		h := fault
		change(&h)
		return h
	}
	lost := health.New(health.ReasonLost, "since when ever")
	lost.Since = fault.Since
	for _, c := range []struct {
		conditions []health.Health
		begins     string
		want       faultreport.Description
	}{
		{nil, "", faultreport.Description{}},
		{[]health.Health{{Limitations: "no XID events"}}, "healthy (", faultreport.Description{}},
		{
			[]health.Health{fault, lost}, "XID_95 unhealthy: XID 95 uncontained memory error since 2026-11-20T10:31Z; action: drain",
			faultreport.Description{Cause: "XID_95", State: health.Unhealthy, Since: minute},
		},
		{
			[]health.Health{with(func(h *health.Health) { h.Simulated = true })}, "XID_95 simulated: unhealthy: XID 95",
			faultreport.Description{Cause: "XID_95", State: health.Unhealthy, Since: minute, Simulated: true},
		},
		{
			[]health.Health{with(func(h *health.Health) { h.Simulated, h.Advisory = true, true })}, "XID_95 simulated: observed, not enforced: unhealthy: XID 95",
			faultreport.Description{Cause: "XID_95", State: health.Unhealthy, Since: minute, Simulated: true, Advisory: true},
		},
		{[]health.Health{lost}, "LOST lost: GPU is lost (since", faultreport.Description{Cause: "LOST", State: health.GPULost, Since: minute}},
		{
			[]health.Health{{State: health.Degraded, Reason: health.ReasonEvent, Code: 0x2000}}, "EVENT_0x2000 degraded: event 0x2000",
			faultreport.Description{Cause: "EVENT_0x2000", State: health.Degraded},
		},
		{
			[]health.Health{health.New(health.ReasonUnchecked, "row remapping failed, not confirmed")}, "UNCHECKED unknown: not checked yet",
			faultreport.Description{Cause: "UNCHECKED", State: health.Unknown},
		},
	} {
		text := faultreport.Describe(c.conditions)
		if !strings.HasPrefix(text, c.begins) || (text == "") != (c.begins == "") {
			t.Errorf("%q does not begin with %q", text, c.begins)
		}
		if got, ok := faultreport.ParseDescription(text); !ok || got != c.want {
			t.Errorf("%q: %+v, %t\nwant %+v", text, got, ok, c.want)
		}
	}
	if before, after := faultreport.Describe([]health.Health{with(func(h *health.Health) { h.RecoveryAction = health.RecoveryNone })}), faultreport.Describe([]health.Health{fault}); before != after {
		t.Errorf("the recovery action changes %q to %q", before, after)
	}
}

// Each cause that there is can be read.
func TestEachCauseIsRead(t *testing.T) {
	for _, r := range health.Reasons() {
		for code := range uint64(12) {
			h := health.Health{State: health.Unhealthy, Reason: r, Code: code}
			if got, ok := faultreport.ParseDescription(faultreport.Describe([]health.Health{h})); !ok || got.Cause != h.Cause() {
				t.Errorf("%q: %+v, %t", faultreport.Describe([]health.Health{h}), got, ok)
			}
		}
	}
}

// A GPU that is proved has no fault by what other programs read: nothing is to be repaired, and no work to be moved.
func TestProofIsNoFault(t *testing.T) {
	text := faultreport.Describe([]health.Health{health.New(health.ReasonProving, "")})
	if want := "PROVING unknown: withheld for a proof for a short time; cleared by: the end of the proof"; text != want {
		t.Errorf("%q, want %q", text, want)
	}
	if d, ok := faultreport.ParseDescription(text); !ok || d.State >= health.Unhealthy || health.RepairOf(d.Cause) != health.NoRepair {
		t.Errorf("%+v, %t", d, ok)
	}
}

// A text of another form is not taken for one of this.
func TestDescriptionOfOthers(t *testing.T) {
	for _, text := range []string{
		"unhealthy: XID 95 uncontained memory error since 2026-11-20T10:31Z", "XID_95", "XID_95 ", "XID_95 unhealthy", "XID_95 ill: XID 95", " unhealthy: x",
		"GPU fell off the bus", "xid_95 unhealthy: XID 95",
	} {
		if got, ok := faultreport.ParseDescription(text); ok || got != (faultreport.Description{}) {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

func FuzzParseDescription(f *testing.F) {
	f.Add("XID_95 simulated: unhealthy: XID 95 uncontained memory error since 2026-11-20T10:31Z; action: drain")
	f.Fuzz(func(t *testing.T, text string) {
		if d, ok := faultreport.ParseDescription(text); ok != (d.Cause != "") && text != "" && !strings.HasPrefix(text, "healthy") {
			t.Errorf("%+v, %t", d, ok)
		}
	})
}
