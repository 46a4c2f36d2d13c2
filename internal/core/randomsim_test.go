package core_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// simGPU is a simulated GPU with random faults, and its true state.
type simGPU struct {
	at      gpu.Placement
	guest   bool // its driver reports no recovery action
	sample  health.Sample
	failing health.ObservationKind // observed instead of a check; 0 = it responds

	needsReset   []string // causes that only a reset clears
	actionChecks int      // consecutive checks that showed the present recovery action
	lost         bool     // it was observed as lost, and has not responded since
	wasReset     bool     // it was reset, and not checked since
	reloaded     bool     // its driver was loaded again, and it was not checked since
}

// ambiguous reports whether a fault now can't be distinguished from one before a reset.
func (p *simGPU) ambiguous() bool { return p.lost || p.wasReset || p.reloaded }

// randomSim simulates random events on three GPUs, one of them in MIG mode and one in a vGPU guest.
type randomSim struct {
	generator
	cfg         core.Config
	now         time.Time
	state       core.State
	host        gpu.Snapshot
	gpus        []*simGPU
	driverReady bool // it can be called
	boot        int
	bootTime    time.Time
	lastRead    time.Time
	clockRand   *rand.Rand      // sets the wall clock at random; nil = never
	clockOffset time.Duration   // sum of these changes
	log         []func() string // what happened, for the message of a failure
	failure     string          // invariant that was violated
}

func newRandomSim(seed uint64) *randomSim {
	f := &randomSim{generator: generator{rand.New(rand.NewPCG(seed, 32))}, cfg: core.DefaultConfig(), now: testStart, host: migMachine(), driverReady: true}
	f.cfg.MIG = inventory.MIGMixed
	extra := f.host.Devices[0]
	extra.ID, extra.At, extra.Index, extra.PCI = "GPU-guest", gpu.WholeGPU("GPU-guest"), 2, "0000:30:00.0"
	f.host = gpu.NewSnapshot(gpu.Snapshot{Driver: f.host.Driver, Devices: append(f.host.Devices, extra)})
	for _, d := range f.host.Devices {
		if d.At == gpu.WholeGPU(d.ID) {
			p := &simGPU{at: d.At, guest: d.ID == "GPU-guest", sample: healthySample()}
			if p.guest {
				p.sample.RecoveryAction = health.RecoveryUnknown
			}
			f.gpus = append(f.gpus, p)
		}
	}
	f.cfg.Health.ManualRecovery = f.oneIn(10)
	f.cfg.Health.DegradedTakesNoWork = f.oneIn(5)
	if f.oneIn(2) {
		f.cfg.Health.MaxRecoveries = 1000
	}
	f.bootTime = f.now
	f.state = core.Restore(f.cfg, core.Checkpoint{BootID: "a", BootTime: f.bootTime}, "a")
	f.checkAll(checkInterval)
	return f
}

func (f *randomSim) note(format string, args ...any) {
	at := f.now.Sub(testStart)
	f.log = append(f.log, func() string { return at.String() + " " + fmt.Sprintf(format, args...) })
}

// observe applies observations as State.Observe does, but does not build the inventory.
func (f *randomSim) observe(obs ...health.Observation) {
	for i, o := range obs {
		obs[i], _ = core.Locate(f.state.Snapshot, o)
	}
	f.state.Ledger = f.state.Ledger.Apply(f.cfg.Health, f.now, obs...)
}

// checkAll checks all GPUs after a time, and reads a snapshot if one is due.
func (f *randomSim) checkAll(after time.Duration) {
	f.now = f.now.Add(after)
	if !f.driverReady {
		f.observe()
		return
	}
	var obs []health.Observation
	for _, p := range f.gpus {
		obs = append(obs, p.check(f.oneIn(20)))
	}
	if f.now.Sub(f.lastRead) >= f.cfg.Rescan {
		f.lastRead = f.now
		f.state = f.state.Read(f.cfg, f.now, f.host, obs...)
		return
	}
	f.observe(obs...)
}

// check returns the observation of a check.
func (p *simGPU) check(partial bool) health.Observation {
	p.sample.Energy.Value += 1000
	if p.failing != 0 {
		p.lost = p.lost || p.failing == health.Lost
		return health.Observation{At: p.at, Kind: p.failing, Detail: "no response"}
	}
	if p.lost || p.reloaded && p.sample.RecoveryAction == health.RecoveryNone {
		p.needsReset = nil
	}
	p.actionChecks++
	p.lost, p.wasReset, p.reloaded = false, false, false
	v := p.sample
	v.Partial = partial
	return health.Observation{At: p.at, Kind: health.Checked, Sample: v}
}

// setRecoveryAction sets the recovery action.
func (p *simGPU) setRecoveryAction(v health.RecoveryAction) {
	if !p.guest && p.sample.RecoveryAction != v {
		p.sample.RecoveryAction, p.actionChecks = v, 0
	}
}

// reset resets the GPU.
func (p *simGPU) reset() {
	v := &p.sample
	p.setRecoveryAction(health.RecoveryNone)
	v.RemapPending, v.RepairPending, v.Fabric, v.LinksUp.Value, v.PCIeWidth = health.No, health.No, health.FabricHealthy, 18, 16
	v.Energy.Value, v.Replays.Value, v.Uncorrectable.Value = 0, 0, 0
	p.needsReset, p.wasReset = nil, true
}

// step does one random thing. It reports whether it was an operator's command or a restart, after which a unit may
// recover.
func (f *randomSim) step() (intervened bool) {
	p := pick(f.generator, f.gpus...)
	switch n := f.IntN(40); {
	case n < 18:
		f.checkAll(time.Duration(1+f.IntN(20)) * time.Second)
	case n < 22:
		f.fault(p)
	case n < 26:
		f.changeSample(p)
		f.note("%v has sample %+v", p.at, p.sample)
	case n == 26:
		p.failing = pick(f.generator, health.Lost, health.ProbeFailed, health.CallPending, health.Unresponsive)
		f.note("%s stops responding: %d", p.at, p.failing)
		f.checkAll(checkInterval)
	case n < 29:
		p.failing = 0
		f.note("%s responds", p.at)
	case n < 31:
		f.note("%s is reset", p.at)
		p.reset()
		f.checkAll(checkInterval)
	case n == 31:
		f.loseDriver()
	case n < 34:
		f.driverReady, f.lastRead = true, time.Time{}
		f.note("the driver responds")
	case n == 34:
		f.restart(f.oneIn(4))
		return true
	case n == 35:
		f.note("%s is bound again", p.at)
		f.now = f.now.Add(time.Millisecond)
		f.observe(health.Observation{At: p.at, Kind: health.DriverRebound})
		p.needsReset = nil
	case n == 36:
		f.runCommand(p)
		return true
	case n == 37:
		f.repartition()
	case n == 38:
		f.observe(health.Observation{At: f.randomPlacement(p), Kind: health.Reserved})
	default:
		f.now = f.now.Add(time.Duration(f.IntN(3*60)) * time.Minute)
		f.note("a while later")
		f.observe()
	}
	return false
}

// randomPlacement returns the GPU or one of its instances.
func (f *randomSim) randomPlacement(p *simGPU) gpu.Placement {
	if p.at.GPU != "GPU-m" || f.oneIn(2) {
		return p.at
	}
	return gpu.Placement{GPU: p.at.GPU, GI: uint32(1 + f.IntN(3)), CI: pick(f.generator, 0, gpu.Whole)}
}

// fault reports a random fault, real or simulated.
func (f *randomSim) fault(p *simGPU) {
	if !f.driverReady || p.ambiguous() {
		return
	}
	o := xidEvent(f.randomPlacement(p), pick[uint64](f.generator, 13, 31, 45, 48, 63, 74, 79, 80, 94, 95, 109, 121, 144, 154, 155, 157, 161, 500, 999, 46, 119, 140))
	hard := []uint64{46, 119, 140}
	if f.oneIn(5) {
		o.Kind, o.Code, hard = health.Event, pick[uint64](f.generator, 1, 0x200, 0x400, 0x800, 0x1000, 0x2000, 0x4000), []uint64{0x4000}
	}
	o.Simulated, o.FromKernelLog = f.oneIn(10), f.oneIn(5)
	f.note("%v: kind %d code %d simulated %t", o.At, o.Kind, o.Code, o.Simulated)
	f.observe(o)
	if slices.Contains(hard, o.Code) && !o.Simulated {
		c := health.Condition{Reason: health.ReasonXID, Code: o.Code}
		if o.Kind == health.Event {
			c.Reason = health.ReasonEvent
		}
		p.needsReset = append(p.needsReset, c.Cause())
	}
}

// changeSample changes the GPU's samples. It clears only what needs no reset.
func (f *randomSim) changeSample(p *simGPU) {
	v := &p.sample
	switch f.IntN(12) {
	case 0, 1, 2:
		p.setRecoveryAction(pick(f.generator, health.RecoveryReset, health.RecoveryReboot, health.RecoveryDrainAndReset, health.RecoveryOther))
	case 3:
		if v.RecoveryAction == health.RecoveryNone || v.RecoveryAction == health.RecoveryDrainP2P || v.RecoveryAction == health.RecoveryIMEX {
			p.setRecoveryAction(pick(f.generator, health.RecoveryDrainP2P, health.RecoveryIMEX, health.RecoveryNone))
		}
	case 4:
		v.RemapPending = health.Yes
	case 5:
		v.RepairPending = health.Yes
	case 6:
		if f.oneIn(4) {
			v.RemapFailed = health.Yes
		}
	case 7:
		v.Fabric = pick(f.generator, health.FabricStarting, health.FabricHealthy, health.FabricLimited, health.FabricUnhealthy, health.FabricMisconfigured)
	case 8:
		v.LinksUp.Value = uint64(f.IntN(19))
	case 9:
		v.Uncorrectable.Value++
	case 10:
		v.Replays.Value += uint64(f.IntN(5000))
	case 11:
		v.Busy, v.PCIeWidth = f.oneIn(2), pick(f.generator, 8, 16)
	}
}

func (f *randomSim) loseDriver() {
	state := pick(f.generator, gpu.DriverAbsent, gpu.DriverFailed)
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
		o.Cause = pick(f.generator, causes...)
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
	l, p := f.state.Ledger, pick(f.generator, f.gpus...)
	was := l.Conditions()
	o := health.Observation{
		At: f.randomPlacement(p), Kind: pick(f.generator, health.XID, health.Event, health.Lost, health.ProbeFailed, health.CallPending, health.Unresponsive, health.Checked, health.DriverRebound, health.WasReset, health.Reserved),
		Code: pick[uint64](f.generator, 13, 79, 94, 95, 0x2000), Sample: p.sample,
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
