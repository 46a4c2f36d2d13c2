package core_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
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
	*rand.Rand
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
	f := &randomSim{Rand: rand.New(rand.NewPCG(seed, 32)), cfg: core.DefaultConfig(), now: testStart, host: migMachine(), driverReady: true}
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

func (f *randomSim) oneIn(n int) bool { return f.IntN(n) == 0 }

func oneOf[T any](f *randomSim, of ...T) T { return of[f.IntN(len(of))] }

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
	p := oneOf(f, f.gpus...)
	switch n := f.IntN(40); {
	case n < 18:
		f.checkAll(time.Duration(1+f.IntN(20)) * time.Second)
	case n < 22:
		f.fault(p)
	case n < 26:
		f.changeSample(p)
		f.note("%v has sample %+v", p.at, p.sample)
	case n == 26:
		p.failing = oneOf(f, health.Lost, health.ProbeFailed, health.CallPending, health.Unresponsive)
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
	return gpu.Placement{GPU: p.at.GPU, GI: uint32(1 + f.IntN(3)), CI: oneOf(f, 0, gpu.Whole)}
}

// fault reports a random fault, real or simulated.
func (f *randomSim) fault(p *simGPU) {
	if !f.driverReady || p.ambiguous() {
		return
	}
	o := xidEvent(f.randomPlacement(p), oneOf[uint64](f, 13, 31, 45, 48, 63, 74, 79, 80, 94, 95, 109, 121, 144, 154, 155, 157, 161, 500, 999, 46, 119, 140))
	hard := []uint64{46, 119, 140}
	if f.oneIn(5) {
		o.Kind, o.Code, hard = health.Event, oneOf[uint64](f, 1, 0x200, 0x400, 0x800, 0x1000, 0x2000, 0x4000), []uint64{0x4000}
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
		p.setRecoveryAction(oneOf(f, health.RecoveryReset, health.RecoveryReboot, health.RecoveryDrainAndReset, health.RecoveryOther))
	case 3:
		if v.RecoveryAction == health.RecoveryNone || v.RecoveryAction == health.RecoveryDrainP2P || v.RecoveryAction == health.RecoveryIMEX {
			p.setRecoveryAction(oneOf(f, health.RecoveryDrainP2P, health.RecoveryIMEX, health.RecoveryNone))
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
		v.Fabric = oneOf(f, health.FabricStarting, health.FabricHealthy, health.FabricLimited, health.FabricUnhealthy, health.FabricMisconfigured)
	case 8:
		v.LinksUp.Value = uint64(f.IntN(19))
	case 9:
		v.Uncorrectable.Value++
	case 10:
		v.Replays.Value += uint64(f.IntN(5000))
	case 11:
		v.Busy, v.PCIeWidth = f.oneIn(2), oneOf(f, 8, 16)
	}
}
