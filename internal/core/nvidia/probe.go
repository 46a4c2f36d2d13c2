package nvidia

import (
	"errors"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Probe checks the health of every GPU of the latest Snapshot, and of those that did not answer then. A GPU that does
// not answer is an observation about it, and does not prevent the checks of the others; only an error of the whole driver
// is returned. Every sample is complete: signals that were not due have the values that were read last. It belongs to the
// reader.
func (s *Session) Probe() ([]health.Observation, error) {
	s.renewEventSet()
	var obs []health.Observation
	checks := make([]check, len(s.gpus))
	for i, g := range s.gpus {
		checks[i] = s.prepare(g)
	}
	records, errs := queryAll(s, s.targetsOf(s.gpus), func(i int, c *caller) healthRecord {
		return checks[i].last.checkWithRetry(c, s.lib, checks[i].device, checks[i].plan)
	})
	for i, c := range checks {
		if isDriverLost(errs[i]) {
			return nil, s.driverLost(errs[i])
		}
		obs = append(obs, s.finish(c, records[i], errs[i]))
	}
	if len(obs) == 0 { // no call was made that fails if the driver is lost
		if _, err := s.readCount(); err != nil {
			return nil, s.driverLost(err)
		}
	}
	return obs, nil
}

// check is one health check of a GPU.
type check struct {
	worker *gpuWorker
	device nvmlDevice
	last   healthRecord
	plan   checkPlan
}

func (s *Session) prepare(g knownGPU) check {
	c := check{worker: s.worker(g.device.ID), device: g.nvmlDevice}
	c.last = c.worker.record.forDevice(g.device)
	event := c.worker.eventPending.Swap(false)
	if c.worker.rebound.Swap(false) {
		c.last.lastFailed, c.worker.staticKnown = true, false
	}
	c.plan = s.plan(c.last, s.now(), event)
	if event && !c.plan.due[intervalSlow] {
		c.worker.eventPending.Store(true) // less than minEventInterval after the last reading: the next check reads it
	}
	return c
}

// finish stores the result of a check and converts it to an observation.
func (s *Session) finish(c check, next healthRecord, err error) health.Observation {
	o := health.Observation{At: c.device.device.At, Kind: health.Checked}
	if err == nil {
		c.worker.record, o.Sample, o.Processes = next, s.sampleOf(next), next.processes
		return o
	}
	c.last.lastFailed, c.worker.staticKnown = true, false
	c.worker.record = c.last
	if stuck, ok := errors.AsType[*hungError](err); ok {
		o.Kind, o.Detail = health.CallPending, stuck.Call
		return o
	}
	o.Kind, o.Detail = health.KindOf(failureOf(err)), err.Error()
	return o
}

// sampleOf is the sample of a record. A recovery action of NONE counts as unknown in a vGPU guest, whose driver can't see
// the state of the GPU, and so does any on Tegra, whose driver never determines one.
func (s *Session) sampleOf(r healthRecord) health.Sample {
	sample := r.sample
	if s.tegra || sample.VGPU == health.Yes && sample.RecoveryAction == health.RecoveryNone {
		sample.RecoveryAction = health.RecoveryUnknown
	}
	sample.Events, sample.OperationalEvents = s.xidEvents(r.id), s.operationalEvents(r.id)
	return sample
}
