package monitor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// Another policy applies to the present state: no session is opened again, and an unhealthy GPU stays unhealthy.
func TestApplyPolicy(t *testing.T) {
	onGPUs(t, 4, func(t *testing.T, m *coretest.Machine, r *running) {
		m.SendEvent(xid(1, 79))
		r.after(time.Second)
		opened := m.Calls()["Open"]
		next := core.DefaultConfig()
		next.Health.Mode = health.ModeOff // which ApplyPolicy ignores
		next.Policy.Rules = []inventory.Rule{
			{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(0)}}, NotOffered: "reserved"},
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

// A device is logged and counted once, whatever the number of its shares.
func TestSharesAreOneDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		share := func(n int) func(*core.Config) {
			return func(c *core.Config) {
				c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: n}}}
			}
		}
		transitions := func(r *running) {
			t.Helper()
			if n := r.Stats().Transitions; len(n) != 2 || n[coretest.GPU(0)] != 0 || n[coretest.GPU(1)] != 1 {
				t.Errorf("transitions: %v", n)
			}
		}
		machine := coretest.NewMachine(coretest.GPUs(2))
		r := run(t, machine, share(100))
		if n := r.Current().Len(); n != 200 {
			t.Errorf("%d units", n)
		}
		r.logged(`msg="device found"`, 2)
		r.logged(`pool=gpu.shared sharing="time-slicing by 100"`, 2)
		machine.SendEvent(xid(1, 95))
		synctest.Wait()
		r.logged(`msg="device unhealthy" id=`+string(coretest.GPU(1))+" ", 1)
		transitions(r)
		next := core.DefaultConfig()
		share(50)(&next)
		must(t, r.ApplyPolicy(t.Context(), next))
		synctest.Wait()
		r.logged(`msg="device pool or sharing changed"`, 2)
		r.logged(`sharing="time-slicing by 50" was="gpu.shared time-slicing by 100"`, 2)
		r.logged(`msg="device gone"`, 0)
		r.logged("WITHDRAWN", 0)
		transitions(r)
	})
}

// sharedByMPS offers every GPU twice by MPS, as pool "gpu.mps".
func sharedByMPS(c *core.Config) {
	c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true}}}
}

// schedulable counts the units of an inventory that take work.
func schedulable(inv *inventory.Allocatable) (n int) {
	for u := range inv.Units() {
		if u.Health.Schedulable() {
			n++
		}
	}
	return n
}

// A node that is set before Run counts from the first reading on: no unit is published as unhealthy because its MPS daemon has
// not been checked yet.
func TestHostSetBeforeRunCountsFromTheFirstReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, coretest.NewMachine(coretest.GPUs(2)), setup{config: sharedByMPS, before: func(m *monitor.Monitor) {
			setHost(m, inventory.Host{})
			setHost(m, inventory.Host{MPS: []string{"gpu.mps"}})
		}})
		for _, inv := range r.seen {
			if n := schedulable(inv); inv.Len() > 0 && (inv.Len() != 4 || n != 4) {
				t.Errorf("%d of %d units take work", n, inv.Len())
			}
		}
		if r.Current().Len() != 4 {
			t.Errorf("%d units", r.Current().Len())
		}
	})
}

func TestHostIsPublishedOnlyIfUnitsChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		machine := coretest.NewMachine(coretest.GPUs(2))
		r := run(t, machine, sharedByMPS)
		if n := schedulable(r.Current()); n != 0 {
			t.Errorf("%d units take work without an MPS daemon", n)
		}
		setHost(r, inventory.Host{MPS: []string{"gpu.mps"}})
		synctest.Wait()
		if n := schedulable(r.Current()); n != 4 {
			t.Errorf("%d units take work", n)
		}
		published := len(r.seen)
		setHost(r, inventory.Host{MPS: []string{"gpu.mps", "other.mps"}})
		r.after(time.Minute)
		if len(r.seen) != published || len(r.State().Host.MPS) != 2 {
			t.Errorf("%d needless publications; node %v", len(r.seen)-published, r.State().Host)
		}

		machine.FailOpen(gpu.ErrNoDriver) // it is applied without a session, too
		machine.FailSession(gpu.ErrDriverLost)
		r.after(time.Minute)
		setHost(r, inventory.Host{})
		synctest.Wait()
		if len(r.State().Host.MPS) != 0 {
			t.Errorf("host %v", r.State().Host)
		}
	})
}

// Numbers that other agents shall have wake watchers, though the units are the same: they are written for them.
func TestProposedNumbersWakeWatchers(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, _ *coretest.Machine, r *running) {
		setHost(r, inventory.Host{SharesNumbers: true})
		r.after(2 * time.Second)
		setHost(r, inventory.Host{SharesNumbers: true, Numbering: r.State().ProposedNumbering()})
		r.after(2 * time.Second)
		before, seen := r.Current(), len(r.seen)
		_, _, err := r.Rebind(t.Context())
		must(t, err)
		synctest.Wait()
		if now := r.Current(); len(r.seen) != seen+1 || !now.Equal(before) || r.State().ProposedNumbering().Generation != 1 {
			t.Errorf("%d inventories after a rebind, equal %t, %+v", len(r.seen)-seen, now.Equal(before), r.State().ProposedNumbering())
		}
	})
}

// Of many changes of the node the last one counts, and none blocks, during and after Run.
func TestSetHostNeverBlocks(t *testing.T) {
	onGPUs(t, 1, func(t *testing.T, _ *coretest.Machine, r *running) {
		for n := range 10_000 {
			setHost(r, inventory.Host{MPS: []string{fmt.Sprint(n)}})
		}
		synctest.Wait()
		if got := r.State().Host.MPS; len(got) != 1 || got[0] != "9999" {
			t.Errorf("host: %v", got)
		}
		must(t, r.stop())
		setHost(r, inventory.Host{})
		setHost(r, inventory.Host{})
	})
}

// Policy warnings and overlaps are logged when they begin and when they end, whatever the driver does in between.
func TestWarningsAreLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		machine := coretest.NewMachine(coretest.GPUs(2))
		r := run(t, machine, func(c *core.Config) {
			c.Policy.Rules = []inventory.Rule{{Select: inventory.Selector{At: "policy.yaml:7: rules[0].select", Models: []string{"NVIDIA B200"}}}}
		})
		overlap := inventory.Host{Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(1))}}}
		for range 3 {
			setHost(r, overlap)
			r.after(5 * time.Minute) // rescans
			machine.FailGPU(coretest.GPU(0), health.ProbeFailed)
			r.after(5 * time.Minute)
			machine.RecoverGPU(coretest.GPU(0))
			machine.FailSession(gpu.ErrDriverLost)
			r.after(5 * time.Minute)
			machine.FailSession(nil)
			r.after(5 * time.Minute)
		}
		other := coretest.GPUs(2)
		other.Devices[0].Model = "NVIDIA B200"
		machine.Set(other)
		setHost(r, inventory.Host{})
		r.after(5 * time.Minute)
		for _, line := range []string{
			`level=ERROR msg="the policy does not match this node"`, `level=INFO msg="the policy matches this node again"`,
			`level=WARN msg="device is also offered by another agent"`, `level=INFO msg="device is no longer offered by another agent"`,
		} {
			r.logged(line, 1)
		}
	})
}

// Until the CDI specification for a driver that has just become ready was attempted, the inventory is provisional. What is logged is
// what follows: devices found healthy, not found unhealthy and then healthy.
func TestNothingIsLoggedBeforeCDIWasAttempted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		machine := coretest.NewMachine(coretest.GPUs(2))
		r := run(t, machine, func(c *core.Config) { c.Injection.CDI = inventory.CDIRequired })
		define := func() {
			r.SetCDI(&inventory.CDI{Incarnation: r.State().Incarnation, Defined: []gpu.DeviceID{coretest.GPU(0), coretest.GPU(1)}})
			synctest.Wait()
		}
		if inv := r.Current(); !inv.Provisional() || schedulable(inv) != 0 {
			t.Errorf("provisional %t, %d units take work", inv.Provisional(), schedulable(inv))
		}
		r.logged("device found", 0)
		define()
		if inv := r.Current(); inv.Provisional() || schedulable(inv) != 2 {
			t.Errorf("provisional %t, %d units take work", inv.Provisional(), schedulable(inv))
		}
		r.logged("device found", 2)
		r.logged("CDI", 0)

		machine.FailSession(gpu.ErrDriverLost)
		r.after(time.Minute)
		machine.FailSession(nil) // the next incarnation
		r.after(time.Minute)
		if inv := r.Current(); !inv.Provisional() || schedulable(inv) != 0 {
			t.Errorf("after a reload: provisional %t, %d units take work", inv.Provisional(), schedulable(inv))
		}
		define()
		if inv := r.Current(); inv.Provisional() || schedulable(inv) != 2 {
			t.Errorf("after a reload: provisional %t, %d units take work", inv.Provisional(), schedulable(inv))
		}
		r.logged("CDI", 0)
	})
}

// The devices of SetOccupied take no work, and no others, until it is called without them; what else is set of the node changes nothing of
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
			t.Errorf("%d needless publications; node %v", len(r.seen)-published, r.State().Host)
		}
		r.SetOccupied(nil)
		synctest.Wait()
		if n := schedulable(r.Current()); n != 2 {
			t.Errorf("%d devices take work", n)
		}
	})
}

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
