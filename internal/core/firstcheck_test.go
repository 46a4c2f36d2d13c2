package core_test

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// A GPU whose first check shows what makes it unhealthy if it persists is not offered before that is known: at the start, and when
// the driver is back. Later such a check has no effect: TestLevels.
func TestUnconfirmedFirstCheck(t *testing.T) {
	for _, l := range levelReasons() {
		if l.state != health.Unhealthy || l.checks == 1 {
			continue
		}
		t.Run(l.cause, func(t *testing.T) {
			s := newUncheckedFixture(t, "580")
			s.setSample(l.set)
			s.check(1)
			s.expect("at the start", health.Unknown, "UNCHECKED")
			first := s.ledger.Health(a)
			if !strings.HasSuffix(first.Detail, ", not confirmed") {
				t.Errorf("%v", first)
			}
			s.check(l.checks - 2)
			if h := s.ledger.Health(a); h != first {
				t.Errorf("was %v, is %v", first, h)
			}
			s.check(1)
			s.expect("confirmed", health.Unhealthy, l.cause)

			s = newLedgerFixture(t)
			s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Code: uint64(gpu.DriverReleased)})
			s.setSample(l.set)
			s.observe(driverAvailable("580.95.05"))
			s.check(1)
			s.expect("after maintenance", health.Unknown, "UNCHECKED")
			s.expectAt("its neighbour", b, health.Healthy, "")
			s.setSample(l.unset)
			s.check(1)
			s.expect("not confirmed", health.Healthy, "")
			s.setSample(l.set)
			s.check(l.checks - 1)
			s.expect("later", health.Healthy, "")
		})
	}
}
