package monitor_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// Another policy takes effect on what is known: no session is opened anew, and who is sick stays sick.
func TestAdopt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(4))
		r := run(t, m)
		m.Raise(core.Observation{At: core.WholeGPU(coretest.GPU(1)), Kind: core.XID, Code: 79})
		r.after(time.Second)
		opened := m.Calls()["Open"]
		next := core.DefaultConfig()
		next.Health.Mode = core.ModeOff // which is not the offer
		next.Policy.Rules = []core.Rule{
			{Select: core.Selector{IDs: []core.DeviceID{coretest.GPU(0)}}, Reserve: "reserved"},
			{Sharing: &core.Sharing{Mode: core.TimeSlicing, Replicas: 3}},
		}
		if err := r.ApplyPolicy(t.Context(), next); err != nil {
			t.Fatal(err)
		}
		for range 2 { // at once, and with the next readings
			pools := map[string]int{}
			for u := range r.Current().Units() {
				if u.Health.Reason != core.ReasonWithdrawn {
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

// Without a driver, and without anybody who follows the machine.
func TestAdoptWithoutASession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := coretest.NewMachine(coretest.GPUs(2))
		m.FailOpen(core.ErrNoDriver)
		r := run(t, m).after(time.Minute)
		next := core.DefaultConfig()
		next.Exclude = []core.DeviceID{coretest.GPU(0)}
		if err := r.ApplyPolicy(t.Context(), next); err != nil {
			t.Error(err)
		}
		m.FailOpen(nil)
		if r.after(time.Minute); r.Current().Len() != 1 {
			t.Errorf("%d units", r.Current().Len())
		}
		if err := r.stop(); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.ApplyPolicy(ctx, next); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("adopted by nobody: %v", err)
		}
	})
}
