package core_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// patient is a GPU of a random life, and the truth about it.
type patient struct {
	at     core.Placement
	guest  bool // its driver gives no verdict
	vitals core.HealthSample
	mute   core.ObservationKind // what is observed of it instead of a check; 0 = it answers

	broken   []string // causes that nothing but a reset mends, and that none has
	demand   int      // checks in a row that showed the present verdict
	lost     bool     // it was seen to be lost, and not to be back
	renewed  bool     // it was reset, and not checked since
	reloaded bool     // its driver was loaded anew, and it was not checked since
}

// between reports whether a fault now could not be told from one before something that mends.
func (p *patient) between() bool { return p.lost || p.renewed || p.reloaded }

// fate is a life of chance: what happens to three GPUs, one of them in MIG mode and one in a guest.
type fate struct {
	*rand.Rand
	cfg      core.Config
	now      time.Time
	state    core.State
	machine  core.Snapshot
	patients []*patient
	driver   bool // it can be asked
	boot     int
	booted   time.Time
	read     time.Time
	jumps    *rand.Rand      // by which the wall clock jumps at times; nil = it does not
	jumped   time.Duration   // by how much in all
	log      []func() string // what happened, for who has to find out why
	bug      string          // what must not have happened
}

func newFate(seed uint64) *fate {
	f := &fate{Rand: rand.New(rand.NewPCG(seed, 32)), cfg: core.DefaultConfig(), now: dawn, machine: migMachine(), driver: true}
	f.cfg.MIG = core.MIGMixed
	extra := f.machine.Devices[0]
	extra.ID, extra.At, extra.Index, extra.PCI = "GPU-guest", core.WholeGPU("GPU-guest"), 2, "0000:30:00.0"
	f.machine = core.NewSnapshot(core.Snapshot{Driver: f.machine.Driver, Devices: append(f.machine.Devices, extra)})
	for _, d := range f.machine.Devices {
		if d.At == core.WholeGPU(d.ID) {
			p := &patient{at: d.At, guest: d.ID == "GPU-guest", vitals: fit()}
			if p.guest {
				p.vitals.RecoveryAction = core.RecoveryUnknown
			}
			f.patients = append(f.patients, p)
		}
	}
	f.cfg.Health.Manual = f.oneIn(10)
	f.cfg.Health.DegradedTakesNoWork = f.oneIn(5)
	if f.oneIn(2) {
		f.cfg.Health.MaxRecoveries = 1000
	}
	f.booted = f.now
	f.state = core.Restore(f.cfg, core.Checkpoint{BootID: "a", BootTime: f.booted}, "a")
	f.look(pace)
	return f
}

func (f *fate) oneIn(n int) bool { return f.IntN(n) == 0 }

func matchesAny[T any](f *fate, of ...T) T { return of[f.IntN(len(of))] }

func (f *fate) note(format string, args ...any) {
	at := f.now.Sub(dawn)
	f.log = append(f.log, func() string { return at.String() + " " + fmt.Sprintf(format, args...) })
}

// see folds observations as State.Observe does, but offers nothing: nobody looks.
func (f *fate) see(obs ...core.Observation) {
	for i, o := range obs {
		obs[i], _ = core.Locate(f.state.Snapshot, o)
	}
	f.state.Ledger = f.state.Ledger.Apply(f.cfg.Health, f.now, obs...)
}

// look checks all GPUs after a while, and reads the machine now and then.
func (f *fate) look(after time.Duration) {
	f.now = f.now.Add(after)
	if !f.driver {
		f.see()
		return
	}
	var obs []core.Observation
	for _, p := range f.patients {
		obs = append(obs, p.look(f.oneIn(20)))
	}
	if f.now.Sub(f.read) >= f.cfg.Rescan {
		f.read = f.now
		f.state = f.state.Read(f.cfg, f.now, f.machine, obs...)
		return
	}
	f.see(obs...)
}

// look is what a check of the GPU observes.
func (p *patient) look(partial bool) core.Observation {
	p.vitals.Energy.Value += 1000
	if p.mute != 0 {
		p.lost = p.lost || p.mute == core.Lost
		return core.Observation{At: p.at, Kind: p.mute, Detail: "no answer"}
	}
	if p.lost || p.reloaded && p.vitals.RecoveryAction == core.RecoveryNone {
		p.broken = nil
	}
	p.demand++
	p.lost, p.renewed, p.reloaded = false, false, false
	v := p.vitals
	v.Partial = partial
	return core.Observation{At: p.at, Kind: core.Checked, Sample: v}
}

// wants sets the verdict.
func (p *patient) wants(v core.RecoveryAction) {
	if !p.guest && p.vitals.RecoveryAction != v {
		p.vitals.RecoveryAction, p.demand = v, 0
	}
}

// renew is what a reset leaves of a GPU.
func (p *patient) renew() {
	v := &p.vitals
	p.wants(core.RecoveryNone)
	v.RemapPending, v.RepairPending, v.Fabric, v.LinksUp.Value, v.PCIeWidth = core.No, core.No, core.FabricHealthy, 18, 16
	v.Energy.Value, v.Replays.Value, v.Uncorrectable.Value = 0, 0, 0
	p.broken, p.renewed = nil, true
}

// step is what happens next. It reports whether somebody intervened who may: an operator, or a reboot.
func (f *fate) step() (intervened bool) {
	p := matchesAny(f, f.patients...)
	switch n := f.IntN(40); {
	case n < 18:
		f.look(time.Duration(1+f.IntN(20)) * time.Second)
	case n < 22:
		f.fault(p)
	case n < 26:
		f.ail(p)
		f.note("%v says %+v", p.at, p.vitals)
	case n == 26:
		p.mute = matchesAny(f, core.Lost, core.ProbeFailed, core.CallPending, core.Unresponsive)
		f.note("%s falls silent: %d", p.at, p.mute)
		f.look(pace)
	case n < 29:
		p.mute = 0
		f.note("%s answers", p.at)
	case n < 31:
		f.note("%s is reset", p.at)
		p.renew()
		f.look(pace)
	case n == 31:
		f.loseDriver()
	case n < 34:
		f.driver, f.read = true, time.Time{}
		f.note("the driver answers")
	case n == 34:
		f.restart(f.oneIn(4))
		return true
	case n == 35:
		f.note("%s is bound anew", p.at)
		f.now = f.now.Add(time.Millisecond)
		f.see(core.Observation{At: p.at, Kind: core.DriverRebound})
		p.broken = nil
	case n == 36:
		f.order(p)
		return true
	case n == 37:
		f.layOut()
	case n == 38:
		f.see(core.Observation{At: f.place(p), Kind: core.Reserved})
	default:
		f.now = f.now.Add(time.Duration(f.IntN(3*60)) * time.Minute)
		f.note("a while later")
		f.see()
	}
	return false
}

// place is somewhere on a GPU.
func (f *fate) place(p *patient) core.Placement {
	if p.at.GPU != "GPU-m" || f.oneIn(2) {
		return p.at
	}
	return core.Placement{GPU: p.at.GPU, GI: uint32(1 + f.IntN(3)), CI: matchesAny(f, 0, core.Whole)}
}

// fault has the driver report something, or an operator rehearse it.
func (f *fate) fault(p *patient) {
	if !f.driver || p.between() {
		return
	}
	o := xidEvent(f.place(p), matchesAny[uint64](f, 13, 31, 45, 48, 63, 74, 79, 80, 94, 95, 109, 121, 144, 154, 155, 157, 161, 500, 999, 46, 119, 140))
	hard := []uint64{46, 119, 140}
	if f.oneIn(5) {
		o.Kind, o.Code, hard = core.Event, matchesAny[uint64](f, 1, 0x200, 0x400, 0x800, 0x1000, 0x2000, 0x4000), []uint64{0x4000}
	}
	o.Simulated, o.FromKernelLog = f.oneIn(10), f.oneIn(5)
	f.note("%v: kind %d code %d simulated %t", o.At, o.Kind, o.Code, o.Simulated)
	f.see(o)
	if slices.Contains(hard, o.Code) && !o.Simulated {
		c := core.Condition{Reason: core.ReasonXID, Code: o.Code}
		if o.Kind == core.Event {
			c.Reason = core.ReasonEvent
		}
		p.broken = append(p.broken, c.Cause())
	}
}

// ail changes what a GPU says. Nothing gets better here but what needs no reset for that.
func (f *fate) ail(p *patient) {
	v := &p.vitals
	switch f.IntN(12) {
	case 0, 1, 2:
		p.wants(matchesAny(f, core.RecoveryReset, core.RecoveryReboot, core.RecoveryDrainAndReset, core.RecoveryOther))
	case 3:
		if v.RecoveryAction == core.RecoveryNone || v.RecoveryAction == core.RecoveryDrainP2P || v.RecoveryAction == core.RecoveryIMEX {
			p.wants(matchesAny(f, core.RecoveryDrainP2P, core.RecoveryIMEX, core.RecoveryNone))
		}
	case 4:
		v.RemapPending = core.Yes
	case 5:
		v.RepairPending = core.Yes
	case 6:
		if f.oneIn(4) {
			v.RemapFailed = core.Yes
		}
	case 7:
		v.Fabric = matchesAny(f, core.FabricStarting, core.FabricHealthy, core.FabricLimited, core.FabricUnhealthy, core.FabricMisconfigured)
	case 8:
		v.LinksUp.Value = uint64(f.IntN(19))
	case 9:
		v.Uncorrectable.Value++
	case 10:
		v.Replays.Value += uint64(f.IntN(5000))
	case 11:
		v.Busy, v.PCIeWidth = f.oneIn(2), matchesAny(f, 8, 16)
	}
}
