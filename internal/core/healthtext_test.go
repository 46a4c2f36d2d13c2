package core_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// faultCase is a fault that persists.
type faultCase struct {
	name  string
	begin func(*ledgerFixture)
	again func(*ledgerFixture)
}

// faultCases has at least one for every reason.
func faultCases() []faultCase {
	set := func(change func(*health.Sample)) func(*ledgerFixture) {
		return func(s *ledgerFixture) { s.setSample(change) }
	}
	mute := func(kind health.ObservationKind) func(*ledgerFixture) {
		return func(s *ledgerFixture) { s.failing[a.GPU] = kind }
	}
	codes := func(codes ...uint64) func(*ledgerFixture) { return func(s *ledgerFixture) { s.reportXIDs(codes...) } }
	each := func(change func(*health.Sample)) func(*ledgerFixture) {
		return func(s *ledgerFixture) { s.setSample(change); s.check(60) }
	}
	event := func(s *ledgerFixture) { s.observe(health.Observation{At: a, Kind: health.Event, Code: 0x2000}) }
	logged := func(s *ledgerFixture) {
		o := xidEvent(a, 149)
		o.FromKernelLog = true
		o.Detail = fmt.Sprintf("NETIR_LINK_EVT Fatal XC0 i0 Link %02d (0x004505c6 0x00000000 0x00000000 0x00000000)", s.now.Minute()%18)
		s.observe(o)
	}
	fatal := func(s *ledgerFixture) {
		s.observe(operationalEvent(health.OperationalEvent{Module: "GSP", Code: 7, Severity: health.SeverityFatal}))
	}
	all := []faultCase{
		{"healthy", func(*ledgerFixture) {}, nil},
		{"lost", mute(health.Lost), nil},
		{"lost and back", func(s *ledgerFixture) { mute(health.Lost)(s); s.check(1); delete(s.failing, a.GPU) }, nil},
		{"errors", mute(health.ProbeFailed), nil},
		{"hang", func(s *ledgerFixture) {
			s.observe(health.Observation{At: a, Kind: health.Unresponsive, Detail: "nvmlDeviceGetFieldValues"})
		}, func(s *ledgerFixture) { mute(health.CallPending)(s) }},
		{"hang of the driver", func(s *ledgerFixture) {
			s.observe(health.Observation{At: gpu.Node, Kind: health.Unresponsive, Detail: "nvmlInit"})
		}, nil},
		{"not checked", func(s *ledgerFixture) {
			s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable}, driverAvailable("580"))
			mute(health.CallPending)(s)
		}, nil},
		{"no driver", func(*ledgerFixture) {}, func(s *ledgerFixture) {
			s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Detail: "driver and library versions differ; reboot"})
		}},
		{"ECC", set(func(v *health.Sample) { v.Uncorrectable.Value++ }), set(func(v *health.Sample) { v.Uncorrectable.Value++ })},
		{"operational event", fatal, fatal},
		{"recovery action in the kernel log", func(s *ledgerFixture) {
			s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown })
			s.check(1)
			s.observe(xidLine(154, resetRequired))
		}, func(s *ledgerFixture) { s.observe(xidLine(154, resetRequired)) }},
		{"heat", each(func(v *health.Sample) { v.ThermalSlowdown.Value += uint64(10 * time.Minute) }), set(func(v *health.Sample) { v.ThermalSlowdown.Value += uint64(checkInterval) })},
		{"brake", each(func(v *health.Sample) { v.PowerBrake.Value += uint64(10 * time.Minute) }), set(func(v *health.Sample) { v.PowerBrake.Value += uint64(checkInterval) })},
		{"replays", each(func(v *health.Sample) { v.Replays.Value += 1000 }), set(func(v *health.Sample) { v.Replays.Value += 20 })},
		{"workloads", func(s *ledgerFixture) {
			for range 3 {
				s.allocate(a)
				s.reportXIDs(31)
			}
		}, codes(13)},
		{"service after three", func(s *ledgerFixture) { s.faultAndReset(46); s.faultAndReset(119); s.faultAndReset(140) }, nil},
		{"service after a relapse", func(s *ledgerFixture) {
			s.faultAndReset(119)
			s.reportXIDs(119)
			s.reset()
			s.checkFor(10 * time.Minute)
		}, nil},
		{"fabric too late", func(s *ledgerFixture) {
			set(func(v *health.Sample) { v.Fabric = health.FabricStarting })(s)
			s.checkFor(11 * time.Minute)
		}, nil},
		{"of class contained", codes(94), codes(94)},
		{"of class reset", codes(95), codes(95)},
		{"reset, the driver agrees", func(s *ledgerFixture) {
			codes(95)(s)
			set(func(v *health.Sample) { v.RecoveryAction = health.RecoveryReset })(s)
		}, nil},
		{"of class node", codes(54), codes(54)},
		{"fallen off the bus", func(s *ledgerFixture) { codes(79)(s); mute(health.Lost)(s) }, nil},
		{"of class fabric", codes(144), codes(144)},
		{"of class suspect", codes(109), codes(109)},
		{"unknown", codes(500), codes(500)},
		{"that NVML could not identify", codes(999), codes(999)},
		{"worn out", codes(161), codes(161)},
		{"an event", event, event},
		{"from the kernel log", logged, logged},
		{"a simulated fault", func(s *ledgerFixture) { s.simulate(95) }, func(s *ledgerFixture) { s.simulate(95) }},
		{"no recovery action, no events", func(s *ledgerFixture) {
			set(func(v *health.Sample) { v.RecoveryAction, v.Events = health.RecoveryUnknown, health.No })(s)
			codes(110)(s)
		}, nil},
		{"maintenance", func(s *ledgerFixture) {
			s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Code: uint64(gpu.DriverReleased), Detail: health.Maintenance{}.String()})
		}, nil},
		{"maintenance with an end", func(s *ledgerFixture) {
			until := health.Maintenance{Since: s.now, Until: s.now.Add(time.Hour)}
			s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Code: uint64(gpu.DriverReleased), Detail: until.String()})
		}, nil},
		{"failed proof", func(s *ledgerFixture) {
			s.ledger = s.ledger.ProofFailed(s.policy, s.now, a.GPU, health.ProofFailure{Summary: "matrix product: 3 of 4096 tiles differ from the host's value", State: health.Unhealthy})
		}, nil},
		{"unknown faults", func(s *ledgerFixture) {
			set(func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown })(s)
			s.ledger = s.ledger.WithUnknownFaults(s.policy, s.now, a.GPU)
		}, nil},
		{"manual", func(s *ledgerFixture) { s.policy.ManualRecovery = true; codes(48)(s) }, nil},
	}
	for _, l := range levelReasons() {
		all = append(all, faultCase{"level " + l.cause, func(s *ledgerFixture) { s.setSample(l.set); s.check(l.checks) }, nil})
	}
	return all
}

// start begins the fault.
func (sc faultCase) start(t testing.TB) *ledgerFixture {
	s := newLedgerFixture(t)
	sc.begin(s)
	for range 3 {
		sc.repeat(s)
	}
	return s
}

// repeat is one more check of the fault.
func (sc faultCase) repeat(s *ledgerFixture) {
	if sc.again != nil {
		sc.again(s)
	}
	s.samples[a.GPU].Energy.Value += 7000 // counters of a healthy GPU change
	s.check(1)
}

func TestHealthText(t *testing.T) {
	var b strings.Builder
	reasons := map[health.Reason]bool{health.ReasonWithdrawn: true} // of an inventory, not of the ledger
	for _, sc := range faultCases() {
		h := sc.start(t).ledger.Health(a)
		if text := h.String(); len(text) > 200 {
			t.Errorf("%d bytes: %q", len(text), text)
		}
		reasons[h.Reason] = true
		fmt.Fprintf(&b, "%-34s %-26s %s\n", sc.name, h.Cause(), h)
	}
	for r := range health.ReasonWithdrawn {
		if !reasons[r] {
			t.Errorf("no case of %s", r)
		}
	}
	goldenfile.Compare(t, "testdata/health.golden", b.String())
}

// Each change of a text is published to an orchestrator: the text of a fault does not change within an hour.
func TestHealthTextIsStable(t *testing.T) {
	for _, sc := range faultCases() {
		t.Run(sc.name, func(t *testing.T) {
			s := sc.start(t)
			first := s.ledger.Health(a)
			if first.State == health.Unknown {
				s.policy.FabricTimeout = 2 * time.Hour // otherwise it becomes another fault
			}
			for range 360 {
				sc.repeat(s)
				if h := s.ledger.Health(a); h != first && sc.name != "lost and back" {
					t.Fatalf("after %v: %q, was %q", s.now.Sub(testStart), h, first)
				}
			}
		})
	}
}

// For any combination of conditions, the text is one line of at most 200 bytes, and the cause comes first.
func TestHealthTextIsShort(t *testing.T) {
	details := []string{"", strings.Repeat("detail ", 60), strings.Repeat("ü", 200), "cut \xff in two"}
	for code := range uint64(190) {
		for i, detail := range details {
			h := health.Health{
				State: health.Unhealthy, Reason: health.ReasonXID, Code: code, Detail: xid.XID(code).Meaning + " " + detail,
				Since: testStart, RecoveryAction: health.RecoveryDrainAndReset, Action: xid.XID(code).Action, Clears: xid.Evidence(0xff).String(),
				Limitations: "no XID events, recovery action not reported, row remapping not visible under MIG", Simulated: i%2 == 0, Advisory: i%3 == 0,
			}
			text := h.String()
			if len(text) > 200 || strings.ContainsAny(text, "\n\t") || !utf8.ValidString(strings.ReplaceAll(text, "\xff", "")) {
				t.Errorf("%d bytes: %q", len(text), text)
			}
			if !strings.Contains(text, fmt.Sprintf("unhealthy: XID %d ", code)) {
				t.Errorf("what is wrong? %q", text)
			}
		}
	}
}

// What can't be monitored on a GPU is part of its health text, also if it is healthy.
func TestLimits(t *testing.T) {
	for _, tc := range []struct {
		set  func(*health.Sample)
		at   gpu.Placement
		want string
	}{
		{func(*health.Sample) {}, a, "healthy"},
		{func(v *health.Sample) { v.Events = health.No }, a, "healthy (health limited: no XID events)"},
		{func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown }, a, "healthy (health limited: recovery action not reported)"},
		{func(v *health.Sample) { v.Events, v.RecoveryAction = health.No, health.RecoveryUnknown }, a, "healthy (health limited: no XID events, recovery action not reported)"},
		{func(v *health.Sample) { v.RemapPending = health.NotReported }, a, "healthy"},
		{func(v *health.Sample) { v.RemapPending = health.NotReported }, ci(1, 0), "healthy (health limited: row remapping not visible under MIG)"},
		{func(*health.Sample) {}, gpu.WholeGPU("GPU-not-checked"), "healthy"},
	} {
		s := newLedgerFixture(t)
		s.setSample(tc.set)
		s.check(1)
		if got := s.ledger.Health(tc.at).String(); got != tc.want {
			t.Errorf("%q, want %q", got, tc.want)
		}
	}
}

// Each reason has a name for programs, which is unique. The golden file has the names that the ledger uses.
func TestCauses(t *testing.T) {
	seen := map[string]bool{}
	for r := health.ReasonXID; r <= health.ReasonNoCDI; r++ {
		if name := r.String(); name == "" || seen[name] || name != strings.ToUpper(name) {
			t.Errorf("reason %d is called %q", r, name)
		} else {
			seen[name] = true
		}
	}
	damaged := health.Condition{Reason: health.ReasonRecoveryAction, Code: 1 << 40} // of a damaged file
	if got := damaged.Cause(); got != "RECOVERY_ACTION_UNKNOWN_ACTION" {
		t.Error(got)
	}
	if cause := (health.Health{}).Cause(); cause != "" {
		t.Errorf("%q is the cause of a healthy unit", cause)
	}
}
