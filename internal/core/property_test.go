package core_test

import (
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

func (f *fate) loseDriver() {
	state := matchesAny(f, core.DriverAbsent, core.DriverFailed)
	gone := core.NoDriver(state, "gone")
	gone.Unloaded = state == core.DriverAbsent && f.oneIn(2)
	f.note("the driver is %s, unloaded: %t", state, gone.Unloaded)
	f.driver = false
	f.state = f.state.Read(f.cfg, f.now, gone)
	for _, p := range f.patients {
		p.reloaded = p.reloaded || gone.Unloaded
	}
}

// restart ends the agent, or the machine with it.
func (f *fate) restart(reboot bool) {
	f.note("a restart; of the machine: %t", reboot)
	record := f.state.Checkpoint(string(rune('a' + f.boot)))
	if f.jumps != nil && !reboot {
		f.jump()
	}
	if reboot {
		f.boot++
		f.booted = f.now
		for _, p := range f.patients {
			p.renew()
			p.mute, p.demand, p.lost, p.reloaded, p.renewed = 0, 0, false, false, false
		}
	}
	boot := core.Boot{ID: string(rune('a' + f.boot)), Time: f.booted}
	f.state = core.Restore(f.cfg, record.Rebase(boot, f.now), boot.ID)
	f.driver, f.read = true, time.Time{}
	f.look(pace)
}

// order is an operator's.
func (f *fate) order(p *patient) {
	o := core.Command{GPU: p.at.GPU, VerifiedAt: f.now.Add(-time.Duration(f.IntN(2)) * time.Minute)}
	var causes []string
	for _, c := range f.state.Ledger.Conditions() {
		causes = append(causes, c.Cause())
	}
	if len(causes) > 0 && f.oneIn(2) {
		o.Cause = matchesAny(f, causes...)
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
		f.bug = "a refused order changed something"
	}
	f.state = next
	for _, c := range cleared {
		p.broken = slices.DeleteFunc(p.broken, func(cause string) bool { return cause == c.Cause() })
	}
}

// layOut takes a MIG instance away, or gives it back.
func (f *fate) layOut() {
	whole := newFate(0).machine
	if len(f.machine.Devices) == len(whole.Devices) {
		whole = without(whole, "MIG-1")
	}
	f.note("MIG has %d devices", len(whole.Devices))
	f.machine, f.read = whole, time.Time{}
	f.look(pace)
}

// ignored reports whether an operator disregards a cause.
func ignored(l core.Ledger, at core.Placement, prefix string) bool {
	return slices.ContainsFunc(l.Conditions(), func(c core.Condition) bool {
		return c.At == at && strings.HasPrefix(c.Cause(), prefix) && !c.Simulated && !c.IgnoredUntil.IsZero()
	})
}

// Whatever happens in whatever order, these hold.
func TestInvariants(t *testing.T) {
	const lives, steps = 2000, 200
	percent := debug.SetGCPercent(800) // lives are short, and there are many
	t.Cleanup(func() { debug.SetGCPercent(percent) })
	for worker := range uint64(2) {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for seed := worker; seed < lives && !t.Failed(); seed += 2 {
				f := newFate(seed)
				was := map[core.DeviceID]core.HealthState{}
				for step := range steps {
					intervened := f.step()
					f.testify(t, was, intervened)
					if step%10 == 0 {
						f.pure(t)
					}
					if t.Failed() {
						for _, what := range f.log[max(0, len(f.log)-25):] {
							t.Log(what())
						}
						t.Fatalf("seed %d: stands %v", seed, f.state.Ledger.Conditions())
					}
				}
				if seed%200 < 2 {
					f.wayBack(t, seed)
				}
			}
		})
	}
}

// testify holds what is published against the truth.
func (f *fate) testify(t *testing.T, was map[core.DeviceID]core.HealthState, intervened bool) {
	l := f.state.Ledger
	for _, p := range f.patients {
		h := l.Health(p.at)
		needed := 1
		if p.vitals.RecoveryAction == core.RecoveryDrainP2P || p.vitals.RecoveryAction == core.RecoveryIMEX {
			needed = 2
		}
		if p.vitals.RecoveryAction > core.RecoveryNone && p.demand >= needed && h.Schedulable() && !ignored(l, p.at, "VERDICT_") {
			t.Errorf("%s takes work, and its driver wants %s: %s", p.at, p.vitals.RecoveryAction, h)
		}
		for _, cause := range p.broken {
			if h.Schedulable() && !ignored(l, p.at, cause) {
				t.Errorf("%s takes work with %s, and was not reset: %s", p.at, cause, h)
			}
		}
		if p.lost && p.mute == core.Lost && h.Schedulable() {
			t.Errorf("%s takes work, and is lost: %s", p.at, h)
		}
	}
	maps.DeleteFunc(was, func(id core.DeviceID, _ core.HealthState) bool { // who comes anew has no past
		return !slices.ContainsFunc(f.state.Snapshot.Devices, func(d core.Device) bool { return d.ID == id })
	})
	for _, d := range f.state.Snapshot.Devices {
		h := l.Health(d.At)
		if h.State < l.Health(core.WholeGPU(d.At.GPU)).State {
			t.Errorf("%s is better than its GPU: %s", d.ID, h)
		}
		if (h.State > core.Healthy) != (h.Reason != core.ReasonNone) || (h.State > core.Healthy) == h.Since.IsZero() {
			t.Errorf("%s is %q, caused by %q", d.ID, h, h.Cause())
		}
		if was[d.ID] == core.GPULost && h.Schedulable() && !intervened {
			t.Errorf("%s was lost a moment ago: %s", d.ID, h)
		}
		was[d.ID] = h.State
	}
	cs := l.Conditions()
	for i, c := range cs {
		if i > 0 && !before(cs[i-1], c) {
			t.Errorf("not in order, or twice: %+v, %+v", cs[i-1], c)
		}
		if c.Since.After(c.Last) || c.Last.After(f.now) || c.Count < 1 {
			t.Errorf("impossible: %+v", c)
		}
	}
	if f.bug != "" {
		t.Error(f.bug)
	}
}

// before is the canonical order, spelled out once more.
func before(a, b core.Condition) bool {
	for _, part := range [][2]string{{sortable(a.Simulated), sortable(b.Simulated)}, {string(a.At.GPU), string(b.At.GPU)}} {
		if part[0] != part[1] {
			return part[0] < part[1]
		}
	}
	switch {
	case a.At.GI != b.At.GI:
		return a.At.GI < b.At.GI
	case a.At.CI != b.At.CI:
		return a.At.CI < b.At.CI
	case a.Reason != b.Reason:
		return a.Reason < b.Reason
	}
	return a.Code < b.Code && a.Reason != core.ReasonRecoveryAction
}

func sortable(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

// pure holds that equal arguments give equal results, and that what is observed of one GPU is nobody else's.
func (f *fate) pure(t *testing.T) {
	l, p := f.state.Ledger, matchesAny(f, f.patients...)
	was := l.Conditions()
	o := core.Observation{
		At: f.place(p), Kind: matchesAny(f, core.XID, core.Event, core.Lost, core.ProbeFailed, core.CallPending, core.Unresponsive, core.Checked, core.DriverRebound, core.Reserved),
		Code: matchesAny[uint64](f, 13, 79, 94, 95, 0x2000), Sample: p.vitals,
	}
	now := f.now.Add(time.Duration(f.IntN(100)) * time.Second)
	with, again, without := l.Apply(f.cfg.Health, now, o), l.Apply(f.cfg.Health, now, o), l.Apply(f.cfg.Health, now)
	if !slices.Equal(with.Conditions(), again.Conditions()) {
		t.Errorf("%+v: once %v, once %v", o, with.Conditions(), again.Conditions())
	}
	if !slices.Equal(was, l.Conditions()) {
		t.Errorf("%+v has changed the past: %v, was %v", o, l.Conditions(), was)
	}
	for _, at := range f.patients {
		if text := with.Health(at.at).String(); len(text) > 200 {
			t.Errorf("%d bytes: %s", len(text), text)
		}
	}
	for _, other := range f.patients {
		if other != p && with.Health(other.at) != without.Health(other.at) {
			t.Errorf("%+v touches %s: %s", o, other.at, with.Health(other.at))
		}
	}
}

// wayBack holds that there always is one: resets, time, and an operator for what neither ends.
func (f *fate) wayBack(t *testing.T, seed uint64) {
	f.driver, f.read = true, time.Time{}
	for _, p := range f.patients {
		p.mute, p.vitals.Busy = 0, true
	}
	for range 3 {
		for _, p := range f.patients {
			p.wants(core.RecoveryReset)
			p.vitals.Replays.Value++ // in a guest a reset shows by nothing but its counters
			p.vitals.Uncorrectable.Value++
		}
		f.look(pace)
		for _, p := range f.patients {
			p.renew()
		}
		f.look(pace)
	}
	for range 600 {
		f.look(pace)
	}
	for _, p := range f.patients {
		for _, c := range f.state.Ledger.Conditions() {
			if c.At.GPU == p.at.GPU && c.Evidence != 0 && !c.Simulated && c.State >= core.Unhealthy && c.IgnoredUntil.IsZero() {
				t.Errorf("seed %d: nothing ends %s", seed, c)
			}
		}
		if next, _, err := f.state.Clear(f.cfg, f.now, core.Command{GPU: p.at.GPU}); err == nil {
			f.state = next
		}
		if h := f.state.Ledger.Health(p.at); h.State != core.Healthy {
			t.Errorf("seed %d: an operator can't end %s", seed, h)
		}
	}
}
