package core_test

import (
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// A failed proof makes its GPU unhealthy until a proof passes: no check, reset or time clears it, nor do a restart and a reboot.
func TestFailedProof(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	at := gpuAt(0)
	expect := func(when, text string) {
		t.Helper()
		if h := l.state.Ledger.Health(at); !strings.HasPrefix(h.String(), text) || h.Simulated {
			t.Errorf("%s: %s, want %s", when, h, text)
		}
		if h := l.state.Ledger.Health(gpuAt(1)); h.State != health.Healthy {
			t.Errorf("%s the neighbour is %s", when, h)
		}
	}
	failed := health.ProofFailure{Summary: "gemm: 3 of 4096 tiles\ndiffer\x00" + strings.Repeat(" x", 200), State: health.Unhealthy}
	l.state = l.state.ProofFailed(l.cfg, l.now, at.GPU, failed)
	const text = "unhealthy: proof failed (gemm: 3 of 4096 tiles differ x x"
	expect("failed", text)
	if h := l.state.Ledger.Health(at); h.Clears != "a proof that passes, or the command clear" || len(h.Detail) > 100 || !strings.HasSuffix(h.String(), h.Clears) {
		t.Errorf("%+v: %s", h, h)
	}
	l.read(500)
	expect("after many checks", text)
	l.restart("boot", "boot")
	l.read(3)
	expect("after a restart", text)
	l.restart("boot", "another boot")
	l.read(500)
	expect("after a reboot", text)
	l.state = l.state.ProofFailed(l.cfg, l.now, at.GPU, health.ProofFailure{Summary: "slow", State: health.Degraded})
	expect("failed again, by another policy", "degraded: proof failed (slow)")
	if c := l.state.Ledger.Conditions(); len(c) != 1 || c[0].Count != 2 || c[0].Repair() != health.Reset || !c[0].Last.After(c[0].Since) {
		t.Errorf("%+v", c)
	}
	l.state = l.state.ProofPassed(l.cfg, l.now, at.GPU)
	expect("passed", "healthy")
	if l.state = l.state.ProofPassed(l.cfg, l.now, at.GPU); len(l.state.Ledger.Conditions()) > 0 {
		t.Errorf("%v", l.state.Ledger.Conditions())
	}
}

// A GPU that fails, is reset and fails again needs service, which a proof that passes does not end. (Case 21, as far as it is a condition.)
func TestProofThatFailsAgain(t *testing.T) {
	s := newLedgerFixture(t)
	s.ledger = s.ledger.ProofFailed(s.policy, s.now, a.GPU, health.ProofFailure{Summary: "x", State: health.Unhealthy})
	s.reset()
	s.ledger = s.ledger.ProofFailed(s.policy, s.now, a.GPU, health.ProofFailure{Summary: "x", State: health.Unhealthy, Service: true})
	s.expect("failed again", health.Unhealthy, "NEEDS_SERVICE")
	if c := s.condition("NEEDS_SERVICE"); c.Repair() != health.Replace || c.Detail != "failed its proof again after a reset" {
		t.Errorf("%+v", c)
	}
	s.ledger = s.ledger.ProofPassed(s.policy, s.now, a.GPU)
	s.expect("passed", health.Unhealthy, "NEEDS_SERVICE")
	s.checkFor(10 * time.Minute)
	ledger, cleared, err := s.ledger.Clear(s.policy, s.now, health.Command{GPU: a.GPU})
	if s.ledger = ledger; err != nil || len(cleared) != 1 {
		t.Errorf("cleared %v, %v", cleared, err)
	}
	s.expect("cleared", health.Healthy, "")
}

// The policy counts for a failed proof as for other conditions.
func TestFailedProofAndPolicy(t *testing.T) {
	for name, tc := range map[string]struct {
		tune   func(*health.Policy)
		failed health.State
		passed health.State
		clears string
	}{
		"manual recovery":              {func(p *health.Policy) { p.ManualRecovery = true }, health.Unhealthy, health.Unhealthy, "an operator (command clear)"},
		"degraded GPUs take no work":   {func(p *health.Policy) { p.DegradedTakesNoWork = true }, health.Unhealthy, health.Healthy, "a proof that passes, or the command clear"},
		"an operator's ignore is over": {func(*health.Policy) {}, health.Degraded, health.Healthy, "a proof that passes, or the command clear"},
	} {
		s := newLedgerFixture(t, tc.tune)
		state := health.Degraded
		if name == "manual recovery" {
			state = health.Unhealthy
		}
		fail := func() {
			s.ledger = s.ledger.ProofFailed(s.policy, s.now, a.GPU, health.ProofFailure{Summary: "x", State: state})
		}
		fail()
		s.expect(name, tc.failed, "PROOF_FAILED")
		ignored, _, err := s.ledger.Ignore(s.policy, s.now, health.Command{GPU: a.GPU}, s.now.Add(checkInterval))
		if s.ledger = ignored; err != nil {
			t.Error(err)
		}
		s.expect(name+", ignored", health.Healthy, "")
		fail()
		s.expect(name+", failed again", tc.failed, "PROOF_FAILED")
		if got := s.condition("PROOF_FAILED").Clears(); got != tc.clears {
			t.Errorf("%s: cleared by %s", name, got)
		}
		s.ledger = s.ledger.ProofPassed(s.policy, s.now, a.GPU)
		if h := s.ledger.Health(a); h.State != tc.passed {
			t.Errorf("%s, passed: %s", name, h)
		}
	}
}

// PROVING is no fault: nothing repairs it, and no toleration of work counts for it.
func TestProvingIsNoFault(t *testing.T) {
	h := health.New(health.ReasonProving, "")
	if health.RepairOf("PROVING") != health.NoRepair || h.Schedulable() || h.Tolerable() || h.State >= health.Unhealthy || !h.Reason.OfUnit() {
		t.Errorf("%+v", h)
	}
	if health.RepairOf("PROOF_FAILED") != health.Reset {
		t.Errorf("PROOF_FAILED: %s", health.RepairOf("PROOF_FAILED"))
	}
}

// case 14 of proofs: XIDs that the program of a proof causes are no failures of workloads, also if they are read after
// its end. Others are faults of the GPU, whatever runs on it.
func TestXIDsOfProof(t *testing.T) {
	taken := func(owner inventory.Purpose) inventory.Host {
		return inventory.Host{Ownership: inventory.Ownership{GPUs: []inventory.GPUOwner{{GPU: a.GPU, Local: true, Taken: owner}}}}
	}
	for name, tc := range map[string]struct {
		after time.Duration // from the end of a proof to the report of an XID; negative = before it
		age   time.Duration // of the XID
		codes []uint64
		want  string
	}{
		"while it runs":         {-time.Second, 0, []uint64{13, 31, 43, 45}, ""},
		"just after it":         {9 * time.Second, 0, []uint64{31}, ""},
		"a workload's":          {11 * time.Second, 0, []uint64{31}, "WORKLOADS_FAILING"},
		"a late line":           {time.Minute, 61 * time.Second, []uint64{31}, ""},
		"one of a workload":     {time.Minute, 30 * time.Second, []uint64{31}, "WORKLOADS_FAILING"},
		"one of before it":      {-time.Second, 62 * time.Second, []uint64{31}, "WORKLOADS_FAILING"},
		"a fault while it runs": {-time.Second, 0, []uint64{95}, "XID_95"},
		"a fault just after it": {time.Second, 0, []uint64{79}, "XID_79"},
	} {
		cfg, now := core.DefaultConfig(), testStart
		snapshot := coretest.GPUs(1)
		snapshot.Devices[0].ID, snapshot.Devices[0].At = a.GPU, a
		s := core.NewState(cfg).Read(cfg, now, gpu.NewSnapshot(snapshot), health.Observation{At: a, Kind: health.Checked, Sample: healthySample()})
		for range 3 {
			s = s.Observe(cfg, now, health.Observation{At: a, Kind: health.Reserved}) // whoever had it before, and gets it afterwards
			now = now.Add(10 * time.Second)
			s = s.WithHost(cfg, now, taken(inventory.Proof))
			if now = now.Add(time.Minute); tc.after > 0 {
				s = s.WithHost(cfg, now, taken(""))
				now = now.Add(tc.after)
			}
			for _, code := range tc.codes {
				o := xidEvent(a, code)
				o.Age = health.Age{Least: tc.age, Most: tc.age}
				s = s.Observe(cfg, now, o)
			}
			s = s.WithHost(cfg, now, taken(""))
			now = now.Add(time.Minute)
		}
		if h := s.Ledger.Health(a); h.Cause() != tc.want {
			t.Errorf("%s: %q, want %q", name, h.Cause(), tc.want)
		}
	}
}
