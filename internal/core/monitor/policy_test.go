package monitor_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Another policy applies to the present state: no session is opened again, and an unhealthy GPU stays unhealthy.
func TestApplyPolicy(t *testing.T) {
	onGPUs(t, 4, func(t *testing.T, m *coretest.Machine, r *running) {
		m.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 79})
		r.after(time.Second)
		opened := m.Calls()["Open"]
		next := core.DefaultConfig()
		next.Health.Mode = health.ModeOff // which ApplyPolicy ignores
		next.Policy.Rules = []inventory.Rule{
			{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(0)}}, Reserve: "reserved"},
			{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 3}},
		}
		must(t, r.ApplyPolicy(t.Context(), next))
		for range 2 { // immediately, and with the next readings
			pools := map[string]int{}
			for u := range r.Current().Units() {
				if u.Health.Reason != health.ReasonWithdrawn {
					pools[u.Pool]++
				}
				if u.Device.ID == coretest.GPU(1) && u.Health.Schedulable() {
					t.Errorf("%s takes work", u.ID)
				}
			}
			if len(pools) != 1 || pools["gpu.shared"] != 9 {
				t.Errorf("pools: %v", pools)
			}
			r.after(5 * time.Minute)
		}
		if n := m.Calls()["Open"]; n != opened {
			t.Errorf("%d sessions were opened", n-opened)
		}
	})
}

// Without a driver, and after Run has returned.
func TestApplyPolicyWithoutASession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		m.FailOpen(gpu.ErrNoDriver)
		r := run(t, m).after(time.Minute)
		next := core.DefaultConfig()
		next.Exclude = []gpu.DeviceID{coretest.GPU(0)}
		must(t, r.ApplyPolicy(t.Context(), next))
		m.FailOpen(nil)
		if r.after(time.Minute); r.Current().Len() != 1 {
			t.Errorf("%d units", r.Current().Len())
		}
		must(t, r.stop())
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.ApplyPolicy(ctx, next); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after Run: %v", err)
		}
	})
}
