package core_test

import (
	"cmp"
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

func (f *randomSim) loseDriver() {
	state := oneOf(f, gpu.DriverAbsent, gpu.DriverFailed)
	gone := gpu.NoDriver(state, "gone")
	gone.Unloaded = state == gpu.DriverAbsent && f.oneIn(2)
	f.note("the driver is %s, unloaded: %t", state, gone.Unloaded)
	f.driverReady = false
	f.state = f.state.Read(f.cfg, f.now, gone)
	for _, p := range f.gpus {
		p.reloaded = p.reloaded || gone.Unloaded
	}
}

// restart restarts the agent, or the host.
func (f *randomSim) restart(reboot bool) {
	f.note("a restart; of the machine: %t", reboot)
	record := f.state.Checkpoint(string(rune('a' + f.boot)))
	if f.clockRand != nil && !reboot {
		f.setWallClock()
	}
	if reboot {
		f.boot++
		f.bootTime = f.now
		for _, p := range f.gpus {
			p.reset()
			p.failing, p.actionChecks, p.lost, p.reloaded, p.wasReset = 0, 0, false, false, false
		}
	}
	boot := core.Boot{ID: string(rune('a' + f.boot)), Time: f.bootTime}
	f.state = core.Restore(f.cfg, record.Rebase(boot, f.now), boot.ID)
	f.driverReady, f.lastRead = true, time.Time{}
	f.checkAll(checkInterval)
}

// runCommand is a random command of an operator.
func (f *randomSim) runCommand(p *simGPU) {
	o := health.Command{GPU: p.at.GPU, VerifiedAt: f.now.Add(-time.Duration(f.IntN(2)) * time.Minute)}
	var causes []string
	for _, c := range f.state.Ledger.Conditions() {
		causes = append(causes, c.Cause())
	}
	if len(causes) > 0 && f.oneIn(2) {
		o.Cause = oneOf(f, causes...)
	}
	f.note("order %+v", o)
	before := f.state.Ledger.Conditions()
	if f.oneIn(2) {
		if next, _, err := f.state.Ignore(f.cfg, f.now, o, f.now.Add(time.Duration(1+f.IntN(20))*time.Minute)); err == nil {
			f.state = next
		}
		return
	}
	next, cleared, err := f.state.Clear(f.cfg, f.now, o)
	if err != nil && !slices.Equal(before, next.Ledger.Conditions()) {
		f.failure = "a failed command changed the state"
	}
	f.state = next
	for _, c := range cleared {
		p.needsReset = slices.DeleteFunc(p.needsReset, func(cause string) bool { return cause == c.Cause() })
	}
}

// repartition removes a MIG instance, or adds it again.
func (f *randomSim) repartition() {
	whole := newRandomSim(0).host
	if len(f.host.Devices) == len(whole.Devices) {
		whole = without(whole, "MIG-1")
	}
	f.note("MIG has %d devices", len(whole.Devices))
	f.host, f.lastRead = whole, time.Time{}
	f.checkAll(checkInterval)
}

// ignored reports whether an operator ignores a cause.
func ignored(l health.Ledger, at gpu.Placement, prefix string) bool {
	return slices.ContainsFunc(l.Conditions(), func(c health.Condition) bool {
		return c.At == at && strings.HasPrefix(c.Cause(), prefix) && !c.Simulated && !c.IgnoredUntil.IsZero()
	})
}

// Invariants for any order of events.
func TestInvariants(t *testing.T) {
	const seeds, steps = 2000, 200
	percent := debug.SetGCPercent(800) // many short-lived objects
	t.Cleanup(func() { debug.SetGCPercent(percent) })
	for worker := range uint64(2) {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for seed := worker; seed < seeds && !t.Failed(); seed += 2 {
				f := newRandomSim(seed)
				was := map[gpu.DeviceID]health.State{}
				for step := range steps {
					intervened := f.step()
					f.verifyPublished(t, was, intervened)
					if step%10 == 0 {
						f.verifyPurity(t)
					}
					if t.Failed() {
						for _, what := range f.log[max(0, len(f.log)-25):] {
							t.Log(what())
						}
						t.Fatalf("seed %d: conditions %v", seed, f.state.Ledger.Conditions())
					}
				}
				if seed%200 < 2 {
					f.verifyRecovery(t, seed)
				}
			}
		})
	}
}

// verifyPublished compares the published health with the true state.
func (f *randomSim) verifyPublished(t *testing.T, was map[gpu.DeviceID]health.State, intervened bool) {
	l := f.state.Ledger
	for _, p := range f.gpus {
		h := l.Health(p.at)
		needed := 1
		if p.sample.RecoveryAction == health.RecoveryDrainP2P || p.sample.RecoveryAction == health.RecoveryIMEX {
			needed = 2
		}
		if p.sample.RecoveryAction > health.RecoveryNone && p.actionChecks >= needed && h.Schedulable() && !ignored(l, p.at, "RECOVERY_ACTION_") {
			t.Errorf("%s takes work, and its recovery action is %s: %s", p.at, p.sample.RecoveryAction, h)
		}
		for _, cause := range p.needsReset {
			if h.Schedulable() && !ignored(l, p.at, cause) {
				t.Errorf("%s takes work with %s, and was not reset: %s", p.at, cause, h)
			}
		}
		if p.lost && p.failing == health.Lost && h.Schedulable() {
			t.Errorf("%s takes work, and is lost: %s", p.at, h)
		}
	}
	maps.DeleteFunc(was, func(id gpu.DeviceID, _ health.State) bool { // a new GPU has no previous state
		return !slices.ContainsFunc(f.state.Snapshot.Devices, func(d gpu.Device) bool { return d.ID == id })
	})
	for _, d := range f.state.Snapshot.Devices {
		h := l.Health(d.At)
		if h.State < l.Health(gpu.WholeGPU(d.At.GPU)).State {
			t.Errorf("%s is better than its GPU: %s", d.ID, h)
		}
		if (h.State > health.Healthy) != (h.Reason != health.ReasonNone) || (h.State > health.Healthy) == h.Since.IsZero() {
			t.Errorf("%s is %q, caused by %q", d.ID, h, h.Cause())
		}
		if was[d.ID] == health.GPULost && h.Schedulable() && !intervened {
			t.Errorf("%s was lost a moment ago: %s", d.ID, h)
		}
		was[d.ID] = h.State
	}
	cs := l.Conditions()
	for i, c := range cs {
		if i > 0 && !conditionBefore(cs[i-1], c) {
			t.Errorf("not in order, or twice: %+v, %+v", cs[i-1], c)
		}
		if c.Since.After(c.Last) || c.Last.After(f.now) || c.Count < 1 {
			t.Errorf("impossible: %+v", c)
		}
	}
	if f.failure != "" {
		t.Error(f.failure)
	}
}

// conditionBefore is the canonical order of conditions.
func conditionBefore(a, b health.Condition) bool {
	simulated := map[bool]int{true: 1}
	order := cmp.Or(cmp.Compare(simulated[a.Simulated], simulated[b.Simulated]), cmp.Compare(a.At.GPU, b.At.GPU),
		cmp.Compare(a.At.GI, b.At.GI), cmp.Compare(a.At.CI, b.At.CI), cmp.Compare(a.Reason, b.Reason))
	return order < 0 || order == 0 && a.Code < b.Code && a.Reason != health.ReasonRecoveryAction
}

// verifyPurity: equal arguments give equal results, and an observation affects only its own GPU.
func (f *randomSim) verifyPurity(t *testing.T) {
	l, p := f.state.Ledger, oneOf(f, f.gpus...)
	was := l.Conditions()
	o := health.Observation{
		At: f.randomPlacement(p), Kind: oneOf(f, health.XID, health.Event, health.Lost, health.ProbeFailed, health.CallPending, health.Unresponsive, health.Checked, health.DriverRebound, health.Reserved),
		Code: oneOf[uint64](f, 13, 79, 94, 95, 0x2000), Sample: p.sample,
	}
	now := f.now.Add(time.Duration(f.IntN(100)) * time.Second)
	with, again, without := l.Apply(f.cfg.Health, now, o), l.Apply(f.cfg.Health, now, o), l.Apply(f.cfg.Health, now)
	if !slices.Equal(with.Conditions(), again.Conditions()) {
		t.Errorf("%+v: once %v, once %v", o, with.Conditions(), again.Conditions())
	}
	if !slices.Equal(was, l.Conditions()) {
		t.Errorf("%+v has changed the previous ledger: %v, was %v", o, l.Conditions(), was)
	}
	for _, at := range f.gpus {
		if text := with.Health(at.at).String(); len(text) > 200 {
			t.Errorf("%d bytes: %s", len(text), text)
		}
	}
	for _, other := range f.gpus {
		if other != p && with.Health(other.at) != without.Health(other.at) {
			t.Errorf("%+v touches %s: %s", o, other.at, with.Health(other.at))
		}
	}
}

// verifyRecovery: every GPU can recover, by resets, time and an operator's command.
func (f *randomSim) verifyRecovery(t *testing.T, seed uint64) {
	f.driverReady, f.lastRead = true, time.Time{}
	for _, p := range f.gpus {
		p.failing, p.sample.Busy = 0, true
	}
	for range 3 {
		for _, p := range f.gpus {
			p.setRecoveryAction(health.RecoveryReset)
			p.sample.Replays.Value++ // in a guest, only counters show a reset
			p.sample.Uncorrectable.Value++
		}
		f.checkAll(checkInterval)
		for _, p := range f.gpus {
			p.reset()
		}
		f.checkAll(checkInterval)
	}
	for range 600 {
		f.checkAll(checkInterval)
	}
	for _, p := range f.gpus {
		for _, c := range f.state.Ledger.Conditions() {
			if c.At.GPU == p.at.GPU && c.Evidence != 0 && !c.Simulated && c.State >= health.Unhealthy && c.IgnoredUntil.IsZero() {
				t.Errorf("seed %d: no evidence cleared %s", seed, c)
			}
		}
		if next, _, err := f.state.Clear(f.cfg, f.now, health.Command{GPU: p.at.GPU}); err == nil {
			f.state = next
		}
		if h := f.state.Ledger.Health(p.at); h.State != health.Healthy {
			t.Errorf("seed %d: a command does not clear %s", seed, h)
		}
	}
}
