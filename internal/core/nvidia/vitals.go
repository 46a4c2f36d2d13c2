package nvidia

import (
	"errors"
	"fmt"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// record is what is known of the health of one GPU: what it can say, and what it said last. A check makes
// a new one of it, so that a check that comes too late leaves no trace.
type record struct {
	id    core.DeviceID
	mig   bool // what a GPU can say depends on it
	away  bool // it did not answer the last check: everything is asked anew
	guest bool // a vGPU, of which the driver always says that nothing is to be done

	batch  ability
	fields [len(fields)]ability
	links  [nvml.NVLINK_MAX_LINKS]ability
	calls  [len(signals)]ability
	read   [paces]time.Time // when what has this pace was last asked for

	vitals core.HealthSample
}

// ability is whether a GPU has a signal.
type ability struct {
	lacking bool // the driver says that there is no such thing here; not asked again
	told    bool // it was readable before
	failed  bool // it was not the last time; asked again with the next check
	changed bool // it said something new the last time; asked again, as one reading may be wrong
}

// took notes an answer and reports whether the value, which is nothing for what is lacking, counts.
func (y *ability) took(err error) bool {
	y.failed = err != nil && !isUnsupported(err)
	if y.failed {
		return false
	}
	y.lacking, y.told = err != nil, err == nil
	return true
}

// pace is how often a signal is asked for.
type pace uint8

// The paces. What is asked once is asked at the first check, and when the GPU came back.
const (
	slowly pace = iota
	ofFabric
	ofLinks
	once
	paces
)

// plan is what a check asks for beside what every check does.
type plan struct {
	now  time.Time
	due  [paces]bool
	anew bool // also what was lacking before
}

// of is the record to go on with: another one if another GPU is at the index, or MIG mode was switched.
func (r record) of(d core.Device) record {
	if r.id != d.ID || r.mig != d.MIG {
		return record{id: d.ID, mig: d.MIG}
	}
	return r
}

// hintedAtMost keeps a storm of events from becoming one of questions.
const hintedAtMost = time.Second

// plan is what is due at now. A hint brings everything forward that changes.
func (s *Session) plan(r record, now time.Time, hinted bool) plan {
	p := plan{now: now, anew: r.away || r.read[once].IsZero()}
	for pace, every := range s.every {
		age := now.Sub(r.read[pace])
		p.due[pace] = p.anew || every > 0 && (age >= every || hinted && age >= hintedAtMost)
	}
	return p
}

// begin is the record with which a check begins.
func (r record) begin(p plan) record {
	r.away = false
	for pace, due := range p.due {
		if due {
			r.read[pace] = p.now
		}
	}
	if !p.anew {
		return r
	}
	r.batch.lacking = false
	for _, all := range [][]ability{r.fields[:], r.links[:], r.calls[:]} {
		for i := range all {
			all[i].lacking = false
		}
	}
	return r
}

const byPCI = "nvmlDeviceGetHandleByPciBusId"

// examine checks a GPU in its lane. An answer that it is lost is confirmed through its PCI address, which
// names no other GPU and gives another handle where the one that we hold is of before a reset; a lookup by
// UUID may answer with a neighbour's loss.
func (r record) examine(a *asker, lib nvml.Interface, g held, p plan) record {
	next := r.check(a, g.handle, p)
	if !isLost(a.err) || !a.line.have[byPCI] {
		return next
	}
	lost := a.err
	a.err = nil
	h := required(a, byPCI, func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByPciBusId(string(g.device.PCI)) })
	switch {
	case a.err == nil:
		next = r.check(a, h, p)
	case isLost(a.err), isUnsupported(a.err), returned(a.err) == nvml.ERROR_NOT_FOUND:
		a.err = lost
	}
	return next
}

// check asks for the UUID, which the library may know by heart, then for the batch, for which it has to
// ask the GPU, and for what else is due. A GPU that answers only that it wants a reset has answered.
func (r record) check(a *asker, h nvml.Device, p plan) record {
	r = r.begin(p)
	if id := required(a, "nvmlDeviceGetUUID", h.GetUUID); a.err == nil && core.DeviceID(id) != r.id {
		a.err = fmt.Errorf("another GPU answers: %s", id)
	}
	if p.due[once] {
		r.guest = optional(a, "nvmlDeviceGetVirtualizationMode", r.guest, func() (bool, nvml.Return) {
			mode, ret := h.GetVirtualizationMode()
			return mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU, ret
		})
	}
	if !r.readFields(a, h, p.due[ofLinks]) {
		supported(a, "nvmlDeviceGetMemoryInfo", h.GetMemoryInfo)
	}
	r.readSignals(a, h, p)
	r.vitals.Partial = r.partial()
	if returned(a.err) == nvml.ERROR_RESET_REQUIRED {
		a.err = nil
		r.vitals.RecoveryAction, r.vitals.Partial, r.away = core.RecoveryReset, true, true
	}
	return r
}

// partial reports whether something is silent that was heard before.
func (r *record) partial() bool {
	for _, all := range [][]ability{{r.batch}, r.fields[:], r.links[:], r.calls[:]} {
		for _, y := range all {
			if y.failed && y.told {
				return true
			}
		}
	}
	return false
}

// fatal reports whether an error says something about the GPU as a whole, and not of one signal.
func fatal(err error) bool {
	return isLost(err) || isGone(err) || errors.Is(err, errLate) || returned(err) == nvml.ERROR_RESET_REQUIRED
}
