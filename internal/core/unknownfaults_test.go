package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// A GPU whose earlier faults are not known takes no work until something that can tell shows that it has none.
func TestWhatShowsThatAGPUWithUnknownFaultsWorks(t *testing.T) {
	checks := func(s *ledgerFixture) { s.checkFor(5 * time.Minute) }
	reported := func(v health.RecoveryAction) func(*ledgerFixture) {
		return func(s *ledgerFixture) { s.setSample(func(o *health.Sample) { o.RecoveryAction = v }); checks(s) }
	}
	manual := func(p *health.Policy) { p.ManualRecovery = true }
	for name, c := range map[string]struct {
		driver string
		tune   func(*health.Policy)
		does   func(*ledgerFixture)
		want   string
	}{
		"no action by a driver that covers the codes": {"580.95.05", nil, checks, ""},
		"the same, incomplete checks": {"580.95.05", nil, func(s *ledgerFixture) {
			s.setSample(func(v *health.Sample) { v.Partial = true })
			checks(s)
		}, "FAULTS_UNKNOWN"},
		"the same, with manual recovery":         {"580.95.05", manual, checks, "FAULTS_UNKNOWN"},
		"no action by a driver that does not":    {"570.124.06", nil, checks, "FAULTS_UNKNOWN"},
		"no action is reported":                  {"580.95.05", nil, reported(health.RecoveryUnknown), "FAULTS_UNKNOWN"},
		"an old driver":                          {"535.183.01", nil, reported(health.RecoveryUnknown), "FAULTS_UNKNOWN"},
		"the driver asks for a reset":            {"580.95.05", nil, reported(health.RecoveryReset), "RECOVERY_ACTION_GPU_RESET"},
		"a reset, with an old driver":            {"535.183.01", nil, func(s *ledgerFixture) { wasReset(s); checks(s) }, ""},
		"a reset, with manual recovery":          {"535.183.01", manual, func(s *ledgerFixture) { wasReset(s); checks(s) }, "FAULTS_UNKNOWN"},
		"a proof that passes":                    {"535.183.01", nil, proved, ""},
		"a proof that passes, by hand":           {"535.183.01", manual, proved, "FAULTS_UNKNOWN"},
		"an operator":                            {"535.183.01", manual, cleared, ""},
		"a log since the driver was loaded":      {"535.183.01", nil, logged, ""},
		"a log since then, with manual recovery": {"535.183.01", manual, logged, "FAULTS_UNKNOWN"},
	} {
		t.Run(name, func(t *testing.T) {
			tune := c.tune
			if tune == nil {
				tune = func(*health.Policy) {}
			}
			s := newUncheckedFixture(t, c.driver, tune)
			s.ledger = s.ledger.WithUnknownFaults(s.policy, s.now, a.GPU)
			s.expect("at first", health.Unknown, "FAULTS_UNKNOWN")
			c.does(s)
			if h := s.ledger.Health(a); h.Cause() != c.want {
				t.Errorf("%s, want %q", h, c.want)
			}
		})
	}
}

func wasReset(s *ledgerFixture) {
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown })
	s.check(1)
	s.observe(health.Observation{At: a, Kind: health.WasReset})
}

func proved(s *ledgerFixture) { s.ledger = s.ledger.ProofPassed(s.policy, s.now, a.GPU) }

func logged(s *ledgerFixture) { s.ledger = s.ledger.WithKnownFaults(s.policy, s.now) }

func cleared(s *ledgerFixture) {
	ledger, _, err := s.ledger.Clear(s.policy, s.now, health.Command{GPU: a.GPU})
	if err != nil {
		s.Error(err)
	}
	s.ledger = ledger
}

// health.VerdictBranch is the first branch that covers all that any branch covers.
func TestVerdictBranch(t *testing.T) {
	latest := 0
	for r := range xid.XIDs() {
		latest = max(latest, r.RecoveryActionSince)
	}
	if latest != health.VerdictBranch {
		t.Errorf("%d, want %d", health.VerdictBranch, latest)
	}
}

// Unknown faults outlive restarts. A reboot ends them, but not where an operator has to clear everything.
func TestUnknownFaultsOverRestartsAndReboots(t *testing.T) {
	for _, manual := range []bool{false, true} {
		for _, read := range []bool{false, true} { // whether the driver was read before the restart
			l := newRestartFixture(t, coretest.GPUs(2))
			l.cfg.Health.ManualRecovery = manual
			damaged := core.Checkpoint{BootID: "a"}.WithUnknownFaults(l.now)
			l.samples[coretest.GPU(0)].RecoveryAction = health.RecoveryUnknown
			l.samples[coretest.GPU(1)].RecoveryAction = health.RecoveryUnknown
			l.state = core.Restore(l.cfg, damaged, "a")
			if read {
				l.read(3)
			}
			unknown := map[gpu.DeviceID]string{
				coretest.GPU(0): "unknown FAULTS_UNKNOWN", coretest.GPU(1): "unknown FAULTS_UNKNOWN",
			}
			for range 2 {
				l.restart("a", "a")
				l.read(1)
				l.expect("after a restart", unknown)
			}
			l.restart("a", "b")
			l.read(1)
			if !manual {
				unknown = allHealthy(2)
			}
			l.expect("after a reboot", unknown)
		}
	}
}
