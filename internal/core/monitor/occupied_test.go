package monitor_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// The devices of SetOccupied take no work, and no others, until it is called without them; what else is set of the host changes nothing of
// that. The same devices again are no news.
func TestOccupied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := run(t, coretest.NewMachine(coretest.GPUs(2)), func(*core.Config) {})
		occupied := func() []inventory.Occupied {
			return []inventory.Occupied{{Device: coretest.GPU(1), Detail: "pid 7 (python)"}}
		}
		r.SetOccupied(occupied())
		for what, set := range map[string]func(){
			"alone": func() {}, "host": func() { setHost(r, inventory.Host{MPS: []string{"gpu.mps"}}) }, "CDI": func() { r.SetCDI(nil) },
		} {
			set()
			synctest.Wait()
			u, _ := r.Current().Unit(inventory.UnitID(coretest.GPU(1)))
			if schedulable(r.Current()) != 1 || u.Health.Reason != health.ReasonOccupied || u.Health.Detail != "pid 7 (python)" {
				t.Errorf("%s: %s", what, u.Health)
			}
		}
		published := len(r.seen)
		r.SetOccupied(occupied())
		r.after(time.Minute)
		if len(r.seen) != published || len(r.State().Host.MPS) != 1 {
			t.Errorf("%d needless publications; host %v", len(r.seen)-published, r.State().Host)
		}
		r.SetOccupied(nil)
		synctest.Wait()
		if n := schedulable(r.Current()); n != 2 {
			t.Errorf("%d devices take work", n)
		}
	})
}
