package monitor_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// One check that fails makes no GPU unhealthy, but is a finding until the next check.
func TestCheckReservation(t *testing.T) {
	for mode, want := range map[inventory.CheckMode]struct{ finds, fails bool }{
		inventory.CheckOff: {}, inventory.CheckWarn: {finds: true}, inventory.CheckRefuse: {fails: true},
	} {
		t.Run(string(mode), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := coretest.NewMachine(coretest.GPUs(2))
				r := run(t, m, func(c *core.Config) { c.ReservationCheck = mode })
				check := func() ([]inventory.Finding, error) {
					plan, err := r.Current().Reserve(inventory.UnitID(coretest.GPU(1)), inventory.UnitID(coretest.GPU(0)))
					must(t, err)
					return r.CheckReservation(plan.Units)
				}
				if findings, err := check(); findings != nil || err != nil {
					t.Errorf("at the start: %v, %v", findings, err)
				}
				m.FailGPU(coretest.GPU(1), health.ProbeFailed)
				r.after(11 * time.Second)
				findings, err := check()
				refused, fails := errors.AsType[*inventory.CheckError](err)
				if fails {
					findings = refused.Findings
				}
				found := want.finds || want.fails
				if fails != want.fails || found != (len(findings) == 1 && findings[0].Device.ID == coretest.GPU(1)) {
					t.Errorf("one check failed: %v, %v", findings, err)
				}
				m.RecoverGPU(coretest.GPU(1))
				r.after(10 * time.Second)
				if findings, err := check(); findings != nil || err != nil {
					t.Errorf("answered again: %v, %v", findings, err)
				}
			})
		})
	}
}
