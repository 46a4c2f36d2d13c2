package storm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// gpuKinds are the faults of GPUs, of the driver and of the clock on a machine with two agents.
func (p *twoAgents) gpuKinds() []kind {
	bus, driver := []string{"bus"}, []string{"driver"}
	short := [2]time.Duration{50 * time.Millisecond, time.Second}
	return []kind{
		{name: "removed", weight: 40, domains: bus, gpu: true, draw: drawAbsence, begin: p.remove, end: p.putBack},
		{name: "replaced", weight: 5, domains: bus, gpu: true, draw: drawAbsence, begin: p.remove, end: p.putAnother},
		{name: "replaced immediately", weight: 5, domains: bus, gpu: true, begin: p.replaceNow},
		{name: "reordered", weight: 16, domains: bus, gpu: true, begin: func(f *fault) error { return errors.Join(p.remove(f), p.putBack(f)) }},
		{name: "lost", weight: 8, domains: bus, gpu: true, lasts: short, begin: p.breaking(p.Lose), end: p.repairing(p.Restore)},
		{name: "call fails", weight: 12, domains: bus, gpu: true, lasts: short, draw: drawLastingFail,
			begin: p.failCall, end: p.repairing(func(n int) error { return p.Heal(simdriver.GPU(n)) })},
		{name: "fatal XID", weight: 20, domains: bus, gpu: true, lasts: short, draw: drawXID(fatalXIDs...), begin: p.fatalXID, end: p.repairing(p.Reset)},
		{name: "unloaded", weight: 4, domains: driver, driver: true, lasts: short, begin: p.setLoaded(false, p.Unload), end: p.setLoaded(true, p.Load)},
		{name: "slow statistics", weight: 8, domains: driver, lasts: [2]time.Duration{100 * time.Millisecond, 2 * time.Second},
			draw: drawSlowStatistics, begin: p.slowStatistics, end: p.endSlowStatistics},
		{name: "clock jumps", weight: 5, draw: drawClockStep, begin: p.jumpClock},
	}
}

// drawAbsence draws how long a GPU is not in its slot: mostly for less time than agents remember it.
func drawAbsence(r *rand.Rand, f *fault) {
	f.lasts = between(r, 20*time.Millisecond, 700*time.Millisecond)
	if r.IntN(12) == 0 {
		f.lasts = between(r, removeLostAfter, removeLostAfter+removeLostAfter/4)
	}
}

func drawLastingFail(r *rand.Rand, f *fault) {
	f.call = one(r, "nvmlDeviceGetUUID", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "*", one(r, gpuCalls...))
	f.code, f.count = gpuReturnCode(r), simdriver.Always
}

// looksRepaired records that a GPU may look repaired.
func (p *twoAgents) looksRepaired(n int, gpu gpu.DeviceID) {
	p.repaired[n] = time.Now()
	p.assignments.repair(gpu)
}

// quiet is after how long agents have read a GPU that could not be read.
const quiet = 3 * time.Second

// beginUnreadable records that a GPU may not be readable.
func (p *twoAgents) beginUnreadable(n int) {
	p.looksRepaired(n, p.uuid(n))
	if time.Since(p.unreadable[n].ended) > quiet {
		p.unreadable[n] = unreadable{began: time.Now()}
	}
}

// endUnreadable records that a GPU is readable again. One that was not for so long that an agent may have forgotten it may be offered
// as something else.
func (p *twoAgents) endUnreadable(n int, gpu gpu.DeviceID) {
	p.looksRepaired(n, gpu)
	u := p.unreadable[n]
	u.ended = time.Now()
	p.unreadable[n] = u
	p.assignments.addGPU(gpu, time.Since(u.began) > removeLostAfter/2)
}

// breaking is a fault with which a GPU may not be readable; repairing is its end.
func (p *twoAgents) breaking(begin func(slot int) error) func(*fault) error {
	return func(f *fault) error {
		p.beginUnreadable(f.slot)
		return begin(f.slot)
	}
}

func (p *twoAgents) repairing(end func(slot int) error) func(*fault) error {
	return func(f *fault) error {
		p.endUnreadable(f.slot, p.uuid(f.slot))
		return end(f.slot)
	}
}

func (p *twoAgents) remove(f *fault) error { return p.breaking(p.removeGPU)(f) }

func (p *twoAgents) putBack(f *fault) error {
	uuid := p.removed[f.slot].uuid
	p.endUnreadable(f.slot, gpu.DeviceID(uuid))
	return p.addGPU(f.slot, uuid)
}

func (p *twoAgents) putAnother(f *fault) error {
	uuid := p.newUUID()
	p.repaired[f.slot] = time.Now()
	p.unreadable[f.slot] = unreadable{began: time.Now(), ended: time.Now()}
	p.assignments.addGPU(gpu.DeviceID(uuid), false)
	return p.addGPU(f.slot, uuid)
}

func (p *twoAgents) replaceNow(f *fault) error { return errors.Join(p.remove(f), p.putAnother(f)) }

func (p *twoAgents) failCall(f *fault) error {
	p.beginUnreadable(f.slot)
	return p.Fail(simdriver.GPU(f.slot), f.call, f.code, f.count)
}

// fatalXID raises an XID after which only a reset makes the GPU healthy. An agent that has it in its history must have it in each later
// process, until the reset.
func (p *twoAgents) fatalXID(f *fault) error {
	if p.driver || time.Since(p.repaired[f.slot]) < 3*time.Second {
		return errSkipped
	}
	if err := p.XID(f.slot, uint64(f.count)); err != nil {
		return err
	}
	gpu, text := p.uuid(f.slot), fmt.Sprintf("XID %d ", f.count)
	of := func(o *offered, health string) bool {
		return slices.ContainsFunc(o.Units, func(u offeredUnit) bool { return u.GPU == gpu && strings.Contains(u.Health, health) })
	}
	for _, a := range p.agents {
		p.until(time.Second, func() bool {
			o := a.ready()
			return o == nil || !of(o, "") || of(o, text)
		})
		if o := a.ready(); o == nil || !of(o, text) {
			continue // NVML drops an XID while no process waits for events, and another fault may hide it
		}
		if a.command("save", "") == nil && a.process != nil {
			p.assignments.setFaulty(a.name, gpu)
		}
	}
	return nil
}

func (p *twoAgents) setLoaded(loaded bool, change func() error) func(*fault) error {
	return func(*fault) error {
		p.driver = !loaded
		for n := range gpus {
			p.looksRepaired(n, "")
		}
		return change()
	}
}

func (p *twoAgents) slowStatistics(f *fault) error {
	p.driver = true
	return p.Slow(simdriver.All, f.call, f.took)
}

func (p *twoAgents) endSlowStatistics(*fault) error {
	p.driver = false
	return p.Heal(simdriver.All)
}

// jumpClock sets the wall clock, also for processes that start later.
func (p *twoAgents) jumpClock(f *fault) error {
	p.ahead += f.took
	if p.ahead.Abs() > 1000*24*time.Hour {
		p.ahead = 0
	}
	return errors.Join(p.agents[forNomad].command("ahead", p.ahead.String()), p.agents[forKubernetes].command("ahead", p.ahead.String()))
}
