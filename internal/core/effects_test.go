package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Kinds of drivers: with a recovery action that covers the fault, without one, and with one that does not cover
// it.
var (
	trusted = func(t testing.TB) *ledgerFixture { return newLedgerFixture(t) } // recovery action None, R580
	guest   = func(t testing.TB) *ledgerFixture {                              // no recovery action
		return newFixtureWith(t, "580.95.05", func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown })
	}
	early = func(t testing.TB) *ledgerFixture { return newFixtureWith(t, "550.163", func(*health.Sample) {}) } // covers no code yet
)

// The effect of a fault immediately, and 40 s later, after the settle window.
func TestEffect(t *testing.T) {
	const (
		h, d, u, l = health.Healthy, health.Degraded, health.Unhealthy, health.GPULost
	)
	event := func(code uint64) health.Observation { return health.Observation{At: a, Kind: health.Event, Code: code} }
	for _, tc := range []struct {
		class                         string
		o                             health.Observation
		once, trusted, guest, earlier health.State
	}{
		{"application", xidEvent(a, 13), h, h, h, h},
		{"application", xidEvent(a, 31), h, h, h, h},
		{"application", xidEvent(a, 45), h, h, h, h},
		{"info", xidEvent(a, 38), h, h, h, h},
		{"info", xidEvent(a, 147), h, h, h, h},
		{"info", xidEvent(a, 121), d, d, d, d},
		{"trigger", xidEvent(a, 154), h, h, h, h},
		{"contained", xidEvent(a, 94), d, d, d, d},
		{"contained", xidEvent(a, 63), d, d, d, d},
		{"contained", xidEvent(a, 157), d, d, d, d},
		{"reset", xidEvent(a, 46), u, u, u, u},
		{"reset", xidEvent(a, 48), u, u, u, u},
		{"reset", xidEvent(a, 95), u, u, u, u},
		{"reset", xidEvent(a, 119), u, u, u, u},
		{"reset, in doubt", xidEvent(a, 159), d, d, u, d}, // covered by every branch that has the code
		{"node", xidEvent(a, 54), u, u, u, u},
		{"node", xidEvent(a, 79), l, u, u, u}, // the GPU responds all the time
		{"fabric", xidEvent(a, 74), d, d, u, u},
		{"fabric", xidEvent(a, 144), d, d, u, u},
		{"fabric", xidEvent(a, 149), d, d, u, u},
		{"fabric", xidEvent(a, 155), d, d, d, d},
		{"fabric", xidEvent(a, 136), u, u, u, u},
		{"fabric", xidEvent(a, 173), u, u, u, u},
		{"suspect", xidEvent(a, 109), d, d, d, d},
		{"suspect", xidEvent(a, 1), d, d, d, d},
		{"suspect", xidEvent(a, 500), d, d, d, d},
		{"suspect", xidEvent(a, 999), d, d, d, d},
		{"storm", event(0x200), d, d, d, d},
		{"retirement", event(0x400), d, d, d, d},
		{"retirement failure", event(0x800), u, u, u, u},
		{"non-fatal poison", event(0x1000), d, d, d, d},
		{"fatal poison", event(0x2000), u, u, u, u},
		{"unavailable", event(0x4000), u, u, u, u},
		{"no fault", event(0x1), h, h, h, h},
	} {
		cause := ""
		if tc.once > health.Healthy {
			cause = health.Condition{Reason: health.ReasonXID, Code: tc.o.Code}.Cause()
			if tc.o.Kind == health.Event {
				cause = health.Condition{Reason: health.ReasonEvent, Code: tc.o.Code}.Cause()
			}
		}
		for world, then := range map[string]struct {
			begin func(testing.TB) *ledgerFixture
			state health.State
		}{"recovery action": {trusted, tc.trusted}, "no recovery action": {guest, tc.guest}, "an early driver": {early, tc.earlier}} {
			t.Run(fmt.Sprintf("%s %s with %s", tc.class, cause, world), func(t *testing.T) {
				s := then.begin(t)
				s.observe(tc.o)
				s.expect("immediately", tc.once, cause)
				s.checkFor(40 * time.Second)
				s.expect("later", then.state, cause)
			})
		}
	}
}

// No code has a worse effect than its rule, and none without a rule has an effect.
func TestEffectOfEveryXID(t *testing.T) {
	states := map[xid.Effect]health.State{
		xid.None: health.Healthy, xid.Degrades: health.Degraded, xid.Withdraws: health.Unhealthy, xid.Loses: health.GPULost,
	}
	for rule := range xid.XIDs() {
		s := newLedgerFixture(t)
		s.reportXIDs(rule.Code)
		if h := s.ledger.Health(a); h.State != states[rule.Effect] || (h.State > health.Healthy) != (h.Action != "" && h.Clears != "") {
			t.Errorf("XID %d: %q, the rule is %+v", rule.Code, h, rule)
		}
		if h := s.ledger.Health(a); h.Action != rule.Action && h.State > health.Healthy {
			t.Errorf("XID %d: action %q, want %q", rule.Code, h.Action, rule.Action)
		}
	}
}

// How long recovery takes without an operator: until evidence begins to hold, and a dwell time of a minute from
// then on.
func TestRecoveryUntouched(t *testing.T) {
	const (
		action = 90 * time.Second  // the recovery action counts after 30 s
		level  = 70 * time.Second  // the first check shows that nothing is pending
		quiet  = 660 * time.Second // ten minutes
	)
	for _, tc := range []struct {
		code                    uint64
		trusted, guest, earlier time.Duration
	}{
		{95, action, never, action},
		{48, action, never, action},
		{62, action, never, never}, // covered from R565 on
		{158, action, never, action},
		{119, never, never, never},
		{46, never, never, never},
		{54, never, never, never},
		{151, never, never, never},
		{79, action, never, never},
		{94, action, never, action},
		{63, level, level, level},
		{160, level, level, level},
		{155, level, level, level},
		{74, action, never, action},
		{149, action, never, action},
		{109, action, never, action},
		{92, quiet, quiet, quiet},
		{121, quiet, quiet, quiet},
		{176, quiet, quiet, quiet},
		{500, action, quiet, action},
		{999, action, quiet, action},
		{157, never, never, never},
		{161, never, never, never},
		{164, never, never, never},
		{168, never, never, never},
	} {
		for world, want := range map[string]struct {
			begin func(testing.TB) *ledgerFixture
			time.Duration
		}{"recovery action": {trusted, tc.trusted}, "no recovery action": {guest, tc.guest}, "an early driver": {early, tc.earlier}} {
			t.Run(fmt.Sprintf("%d with %s", tc.code, world), func(t *testing.T) {
				s := want.begin(t)
				s.reportXIDs(tc.code)
				s.expectRecovery("untouched", want.Duration)
			})
		}
	}
}

// A pending repair of any kind requires a reset.
func TestRecoveryWaitsForRepair(t *testing.T) {
	for code, change := range map[uint64]func(*health.Sample){
		63:  func(v *health.Sample) { v.RemapPending, v.RetirementPending = health.Yes, health.No },
		160: func(v *health.Sample) { v.RepairPending = health.Yes },
		155: func(v *health.Sample) { v.LinksUp.Value = 17 },
	} {
		s := guest(t)
		s.reportXIDs(code)
		s.setSample(change)
		s.checkFor(time.Hour)
		if c := s.condition(fmt.Sprint("XID_", code)); !c.ClearingSince.IsZero() {
			t.Errorf("XID %d recovers: %+v", code, c)
		}
	}
}

// What a reset clears, and what it does not clear.
func TestRecoveryByReset(t *testing.T) {
	for _, tc := range []struct {
		code uint64
		want time.Duration // from the check that shows the reset
	}{
		{46, time.Minute}, {48, time.Minute}, {62, time.Minute}, {64, time.Minute}, {94, time.Minute}, {95, time.Minute},
		{109, time.Minute}, {110, time.Minute}, {119, time.Minute}, {120, time.Minute}, {136, time.Minute}, {140, time.Minute},
		{159, time.Minute}, {167, time.Minute}, {168, time.Minute}, {175, time.Minute}, {177, time.Minute}, {185, time.Minute},
		{54, never}, {151, never}, {157, never}, {164, never}, {165, never},
	} {
		s := trusted(t)
		s.reportXIDs(tc.code)
		s.reset()
		s.expectRecovery(fmt.Sprint("XID ", tc.code, " reset"), tc.want)
	}
}

// While the driver reports a recovery action, no fault is cleared, for any time.
func TestRecoveryActionHoldsRecovery(t *testing.T) {
	for _, v := range []health.RecoveryAction{
		health.RecoveryReset, health.RecoveryReboot, health.RecoveryDrainP2P, health.RecoveryDrainAndReset, health.RecoveryIMEX, health.RecoveryOther,
	} {
		for _, code := range []uint64{94, 95, 109, 500} {
			s := trusted(t)
			s.reportXIDs(code)
			s.setSample(func(vitals *health.Sample) { vitals.RecoveryAction = v })
			s.checkFor(20 * time.Minute)
			if h := s.ledger.Health(a); h.State != health.Unhealthy || h.RecoveryAction != v {
				t.Errorf("XID %d, recovery action %s: %s", code, v, h)
			}
			if c := s.condition(fmt.Sprint("XID_", code)); !c.ClearingSince.IsZero() {
				t.Errorf("XID %d recovers against the recovery action %s", code, v)
			}
		}
	}
}
