package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
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
		{"info", xidEvent(a, 38), h, h, h, h},
		{"info", xidEvent(a, 121), d, d, d, d},
		{"trigger", xidEvent(a, 154), h, h, h, h},
		{"contained", xidEvent(a, 94), d, d, d, d},
		{"reset", xidEvent(a, 95), u, u, u, u},
		{"reset", xidEvent(a, 119), u, u, u, u},
		{"reset, in doubt", xidEvent(a, 159), d, d, u, d}, // covered by every branch that has the code
		{"node", xidEvent(a, 54), u, u, u, u},
		{"node", xidEvent(a, 79), l, u, u, u}, // the GPU responds all the time
		{"fabric", xidEvent(a, 74), d, d, u, u},
		{"fabric", xidEvent(a, 155), d, d, d, d},
		{"fabric", xidEvent(a, 136), u, u, u, u},
		{"suspect", xidEvent(a, 109), d, d, d, d},
		{"suspect", xidEvent(a, 999), d, d, d, d},
		{"storm", event(0x200), d, d, d, d},
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

// What clears each code is what docs/faults.md has: the evidence of its rule, and the recovery action None from the driver on that covers the code.
func TestClearsOfEveryXID(t *testing.T) {
	for rule := range xid.XIDs() {
		if rule.Effect == xid.None || rule.Class == xid.Suspect {
			continue
		}
		covered := rule.Clears
		if covered != 0 && rule.RecoveryActionSince > 0 {
			covered |= xid.NoRecoveryAction
		}
		for _, c := range []struct {
			world string
			begin func(testing.TB) *ledgerFixture
			want  xid.Evidence
		}{{"recovery action", trusted, covered}, {"no recovery action", guest, rule.Clears &^ xid.NoRecoveryAction}} {
			s := c.begin(t)
			s.reportXIDs(rule.Code)
			if clears := s.ledger.Health(a).Clears; clears != c.want.String() {
				t.Errorf("XID %d with %s: cleared by %q, want %q", rule.Code, c.world, clears, c.want)
			}
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
		{62, action, never, never}, // covered from R565 on
		{158, action, never, action},
		{119, never, never, never},
		{54, never, never, never},
		{79, action, never, never},
		{94, action, never, action},
		{63, level, level, level},
		{160, level, level, level},
		{155, level, level, level},
		{149, action, never, action},
		{109, action, never, action},
		{92, quiet, quiet, quiet},
		{121, quiet, quiet, quiet},
		{500, action, quiet, action},
		{157, never, never, never},
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

// While the driver reports a recovery action, no fault is cleared, for any time.
func TestRecoveryActionHoldsRecovery(t *testing.T) {
	for _, v := range []health.RecoveryAction{
		health.RecoveryReset, health.RecoveryReboot, health.RecoveryDrainP2P, health.RecoveryDrainAndReset, health.RecoveryIMEX, health.RecoveryBusReset,
		health.RecoverySystemReboot, health.RecoveryOther,
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

// The effect of a second XID soon after the first.
func TestRepeatRule(t *testing.T) {
	r565 := func(t testing.TB) *ledgerFixture { return newFixtureWith(t, "565.57.01", func(*health.Sample) {}) }
	for _, tc := range []struct {
		name          string
		begin         func(testing.TB) *ledgerFixture
		code          uint64
		apart         time.Duration
		first, second health.State
	}{
		{"109 within ten minutes", guest, 109, 10 * time.Minute, health.Degraded, health.Unhealthy},
		{"109 after them", guest, 109, 10*time.Minute + checkInterval, health.Degraded, health.Degraded},
		{"109 with a recovery action", trusted, 109, time.Minute, health.Degraded, health.Degraded},
		{"109, not covered before R570", r565, 109, time.Minute, health.Degraded, health.Unhealthy},
		{"80 within an hour", trusted, 80, time.Hour, health.Healthy, health.Degraded},
		{"80 after it", trusted, 80, time.Hour + checkInterval, health.Healthy, health.Healthy},
		{"80 without a recovery action", guest, 80, time.Minute, health.Healthy, health.Degraded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := tc.begin(t)
			s.reportXIDs(tc.code)
			if h := s.ledger.Health(a); h.State != tc.first {
				t.Errorf("the first: %s", h)
			}
			s.checkFor(tc.apart)
			s.reportXIDs(tc.code)
			if h := s.ledger.Health(a); h.State != tc.second {
				t.Errorf("the second: %s", h)
			}
		})
	}
	t.Run("on two GPUs", func(t *testing.T) {
		s := guest(t)
		s.observe(xidEvent(a, 109), xidEvent(b, 109), xidEvent(a, 80), xidEvent(b, 80))
		for _, at := range []gpu.Placement{a, b} {
			s.expectAt("with one each", at, health.Degraded, "XID_109")
		}
	})
	t.Run("on two instances", func(t *testing.T) {
		s := guest(t)
		s.observe(xidEvent(gi(1), 109), xidEvent(gi(2), 109))
		for _, at := range []gpu.Placement{gi(1), gi(2)} {
			s.expectAt("with one each", at, health.Degraded, "XID_109")
		}
	})
	t.Run("after a reset", func(t *testing.T) {
		s := guest(t)
		s.reportXIDs(109)
		s.wait(time.Second)
		s.observe(health.Observation{At: a, Kind: health.DriverRebound})
		s.expectRecovery("by the reset", time.Minute)
		s.reportXIDs(109)
		s.expect("it is the first since", health.Degraded, "XID_109")
	})
	t.Run("a condition without effect expires", func(t *testing.T) {
		s := trusted(t)
		s.reportXIDs(80)
		s.checkFor(time.Hour)
		if n := len(s.ledger.Conditions()); n != 1 {
			t.Errorf("%d conditions within the hour", n)
		}
		s.checkFor(checkInterval)
		if cs := s.ledger.Conditions(); len(cs) != 0 || s.ledger.NeedsTick() {
			t.Errorf("conditions after the hour: %v", cs)
		}
	})
	t.Run("80 twice, then quiet", func(t *testing.T) {
		s := trusted(t)
		s.reportXIDs(80, 80)
		s.expect("immediately", health.Degraded, "XID_80")
		s.expectRecovery("after the second", 11*time.Minute)
	})
}

// XID 74 on a GPU without NVLinks is no reason to withdraw it.
func TestNVLinkOnly(t *testing.T) {
	for _, tc := range []struct {
		name  string
		links gpu.OptionalUint64
		want  health.State
	}{
		{"18 links", gpu.OptionalUint64{Value: 18, OK: true}, health.Unhealthy},
		{"none active", gpu.OptionalUint64{OK: true}, health.Degraded},
		{"not supported", gpu.OptionalUint64{}, health.Degraded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newFixtureWith(t, "580", func(v *health.Sample) { v.RecoveryAction, v.LinksUp = health.RecoveryUnknown, tc.links })
			s.reportXIDs(74)
			s.expect("immediately", health.Degraded, "XID_74")
			s.wait(29 * time.Second)
			s.expect("before it is settled", health.Degraded, "XID_74")
			s.wait(time.Second)
			s.expect("settled", tc.want, "XID_74")
		})
	}
	t.Run("links that went down with it", func(t *testing.T) {
		s := guest(t)
		s.reportXIDs(74)
		s.setSample(func(v *health.Sample) { v.LinksUp.Value = 0 })
		s.checkFor(time.Minute)
		s.expect("settled", health.Unhealthy, "XID_74")
	})
}

// From the driver branch in the catalogue on, the recovery action overrides a rule, in both directions.
func TestRecoveryActionSince(t *testing.T) {
	for _, tc := range []struct {
		driver string
		code   uint64
		want   health.State // with the recovery action None, after the settle window
		over   time.Duration
	}{
		{"564.99", 144, health.Unhealthy, 90 * time.Second},
		{"565.01", 144, health.Degraded, 90 * time.Second},
		{"565.01", 143, health.Unhealthy, never},
		{"575.01", 143, health.Unhealthy, 90 * time.Second},
		{"565.01", 120, health.Unhealthy, 90 * time.Second},
		{"550.01", 120, health.Unhealthy, never},
		{"580.95.05", 119, health.Unhealthy, never},
		{"no number", 120, health.Unhealthy, never},
	} {
		s := newFixtureWith(t, tc.driver, func(*health.Sample) {})
		s.reportXIDs(tc.code)
		begun := *s
		s.checkFor(40 * time.Second)
		if h := s.ledger.Health(a); h.State != tc.want {
			t.Errorf("driver %s: %s", tc.driver, h)
		}
		begun.expectRecovery("driver "+tc.driver, tc.over)
	}
}
