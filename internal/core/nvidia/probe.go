package nvidia

import (
	"errors"
	"io/fs"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Probe checks every GPU of the last reading, and those it remembers. One GPU's silence is its observation
// and never stops the others; an error is of the driver as a whole. The vitals are complete: what is read
// at a slower pace is as it was read last.
func (s *Session) Probe() ([]core.Observation, error) {
	s.listenAgain()
	var obs []core.Observation
	var checks []check
	var targets []target
	for _, g := range s.gpus {
		checks = append(checks, s.prepare(g))
		targets = append(targets, s.at(g.device))
	}
	records, errs := visitAll(s, targets, func(i int, a *asker) record { return checks[i].run(a, s.lib) })
	for i, c := range checks {
		if isGone(errs[i]) {
			return nil, s.gone(errs[i])
		}
		obs = append(obs, s.finish(c, records[i], errs[i]))
	}
	if len(obs) == 0 { // whether the driver is there must be known
		if _, err := call(&s.reader, "nvmlDeviceGetCount", core.Node, s.lib.DeviceGetCount); err != nil {
			return nil, s.gone(err)
		}
	}
	return obs, nil
}

// check is what to ask a GPU.
type check struct {
	lane *lane
	held held
	last record
	plan plan
}

func (s *Session) prepare(g gpu) check {
	c := check{lane: s.lane(g.device.ID), held: g.held}
	c.last = c.lane.record.of(g.device)
	hinted := c.lane.hinted.Swap(false)
	if c.lane.rebound.Swap(false) {
		c.last.away, c.lane.settled = true, false
	}
	c.plan = s.plan(c.last, s.now(), hinted)
	if hinted && !c.plan.due[slowly] {
		c.lane.hinted.Store(true) // too soon after another
	}
	return c
}

func (c check) run(a *asker, lib nvml.Interface) record {
	return c.last.examine(a, lib, c.held, c.plan)
}

// finish keeps the record of a check, or that the GPU was away, and says what was found.
func (s *Session) finish(c check, next record, err error) core.Observation {
	o := core.Observation{At: c.held.device.At, Kind: core.Checked}
	if err == nil {
		c.lane.record, o.Sample = next, s.vitals(next)
		return o
	}
	c.last.away, c.lane.settled = true, false
	c.lane.record = c.last
	if stuck, ok := errors.AsType[*StuckError](err); ok {
		o.Kind, o.Detail = core.CallPending, stuck.Call
		return o
	}
	o.Kind, o.Detail = core.KindOf(failureOf(err)), err.Error()
	return o
}

// vitals are what a record says. NONE is no verdict in a vGPU guest, where the driver can't see what the
// GPU needs, and nothing is one on Tegra, where it never looks.
func (s *Session) vitals(r record) core.HealthSample {
	v := r.vitals
	if s.tegra || r.guest && v.RecoveryAction == core.RecoveryNone {
		v.RecoveryAction = core.RecoveryUnknown
	}
	v.Events = s.hears(r.id)
	return v
}

// isTegra reports whether the GPU is a part of an NVIDIA system on chip.
func isTegra(sys fs.FS) bool {
	family, _ := fs.ReadFile(sys, "devices/soc0/family") // nothing like it on other machines
	return strings.HasPrefix(strings.ToLower(string(family)), "tegra")
}
