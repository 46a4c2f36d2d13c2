package storm

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

func loseOne(p *pair) error {
	n, gpu, ok := p.slot()
	if !ok {
		return errSkipped
	}
	p.renew(n, gpu)
	p.lasting(n, "is back:", func() error { return p.Restore(n) })
	return p.Lose(n)
}

func failOne(p *pair) error {
	n, gpu, ok := p.slot()
	if !ok {
		return errSkipped
	}
	p.renew(n, gpu)
	p.lasting(n, "answers:", func() error { return p.Heal(simdriver.GPU(n)) })
	call := one(p.random, "nvmlDeviceGetUUID", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "*", one(p.random, gpuCalls...))
	return p.Fail(simdriver.GPU(n), call, one(p.random, returns[:len(returns)-ofTheDriver]...), simdriver.Always)
}

// fatalOne raises an XID after which only a reset mends the GPU. When both agents have it in their history, they must know it
// in each later life, until the reset.
func fatalOne(p *pair) error {
	n, gpu, ok := p.slot()
	if !ok || p.driver || time.Since(p.renewed[n]) < 3*time.Second {
		return errSkipped
	}
	p.lasting(n, "is reset:", func() error { return p.Reset(n) })
	if err := p.XID(n, uint64(one(p.random, 46, 119, 140, 167, 175))); err != nil {
		return err
	}
	for _, a := range p.agents {
		lists := false
		p.until(time.Second, func() bool {
			well := false
			if o := a.life.offer(); o != nil && o.Ready {
				for _, u := range o.Units {
					lists, well = lists || u.GPU == gpu, well || u.GPU == gpu && u.Well
				}
			}
			return !lists || !well
		})
		if o := a.life.offer(); !lists || o == nil || !o.Ready || slices.ContainsFunc(o.Units, func(u offeredUnit) bool { return u.GPU == gpu && u.Well }) {
			continue // NVML has no memory: nobody listened
		}
		if a.command("keep", "") == nil && a.life != nil {
			p.deals.fail(a.name, gpu)
		}
	}
	return nil
}

func unloadForAWhile(p *pair) error {
	if p.driver {
		return errSkipped
	}
	p.driver = true
	renew := func() {
		for n := range gpus {
			p.renew(n, "")
		}
	}
	renew()
	p.later(p.between(50*time.Millisecond, time.Second), "loaded", func() error {
		p.driver = false
		renew()
		return p.Load()
	})
	return p.Unload()
}

// slowStatistics makes a call slow that only live numbers need.
func slowStatistics(p *pair) error {
	if p.driver {
		return errSkipped
	}
	p.driver = true
	p.later(p.between(100*time.Millisecond, 2*time.Second), "statistics are fast", func() error {
		p.driver = false
		return p.Heal(simdriver.All)
	})
	return p.Slow(simdriver.All, one(p.random, numberCalls...), p.between(50*time.Millisecond, 400*time.Millisecond))
}

// jump sets the wall clock, for agents that run and for those that start later.
func jump(p *pair) error {
	by := one(p.random, jumps...)
	if p.random.IntN(2) == 0 {
		by = -by
	}
	p.ahead += by
	if p.ahead.Abs() > 1000*24*time.Hour {
		p.ahead = 0
	}
	for _, a := range p.agents {
		if err := a.command("ahead", p.ahead.String()); err != nil {
			return err
		}
	}
	return nil
}
