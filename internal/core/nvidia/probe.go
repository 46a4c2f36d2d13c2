package nvidia

import (
	"errors"
	"io/fs"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Probe checks every GPU of the last reading, and those it remembers. One GPU's silence is its observation
// and never stops the others; an error is of the driver as a whole. The vitals are complete: what is read
// at a slower pace is as it was read last.
func (s *Session) Probe() ([]core.Observation, error) {
	s.listenAgain()
	var obs []core.Observation
	for index, g := range s.gpus {
		if g.device.ID == "" {
			continue
		}
		o, err := s.check(index, g)
		if isGone(err) {
			return nil, s.gone(err)
		}
		obs = append(obs, o)
	}
	if len(obs) == 0 { // whether the driver is there must be known
		if _, err := call(&s.reader, "nvmlDeviceGetCount", core.Node, s.lib.DeviceGetCount); err != nil {
			return nil, s.gone(err)
		}
	}
	return obs, nil
}

// check asks one GPU. Only an error of the driver as a whole is an error.
func (s *Session) check(index int, g gpu) (core.Observation, error) {
	l := s.lane(index)
	last := l.record.of(g.device)
	hinted := l.hinted.Swap(false)
	last.away = last.away || l.rebound.Swap(false)
	p := s.plan(last, s.now(), hinted)
	if hinted && !p.due[slowly] {
		l.hinted.Store(true) // too soon after another
	}
	next, err := visit(s, index, g.device.At, func(a *asker) record { return last.examine(a, s.lib, g.held, p) })
	o := core.Observation{At: g.device.At, Kind: core.Checked}
	if err == nil {
		l.record, o.Vitals = next, s.vitals(next)
		return o, nil
	}
	last.away = true
	l.record = last
	if stuck, ok := errors.AsType[*StuckError](err); ok {
		o.Kind, o.Detail = core.Waiting, stuck.Call
		return o, nil
	}
	o.Kind, o.Detail = silence(err), err.Error()
	return o, err
}

// vitals are what a record says. NONE is no verdict in a vGPU guest, where the driver can't see what the
// GPU needs, and nothing is one on Tegra, where it never looks.
func (s *Session) vitals(r record) core.Vitals {
	v := r.vitals
	if s.tegra || r.guest && v.Verdict == core.VerdictNone {
		v.Verdict = core.VerdictUnsaid
	}
	v.Events = s.hears(r.id)
	return v
}

// isTegra reports whether the GPU is a part of an NVIDIA system on chip.
func isTegra(sys fs.FS) bool {
	family, _ := fs.ReadFile(sys, "devices/soc0/family") // nothing like it on other machines
	return strings.HasPrefix(strings.ToLower(string(family)), "tegra")
}
