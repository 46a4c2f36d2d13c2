package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// healthRecord is the state of the health checks of one GPU: which signals it supports, and their latest values. A check
// makes a new record, so that an abandoned check changes nothing.
type healthRecord struct {
	id         gpu.DeviceID
	mig        bool // MIG mode, on which the supported signals depend, as they do on the ECC mode
	ecc        gpu.Toggle
	lastFailed bool // the GPU did not answer the last check: the next one reads everything

	fieldsCall   signalSupport
	fields       [len(fields)]signalSupport
	links        [nvml.NVLINK_MAX_LINKS]signalSupport
	linksChanged bool // the last reading changed their number: see signalSupport.changed
	signals      [len(signals)]signalSupport
	lastRead     [intervals]time.Time // when the signals of this interval were last read

	processesCall signalSupport
	processes     *[]gpu.Process // nil = unknown

	sample health.Sample
}

// signalSupport is whether a GPU has a signal, and how the last reading of it ended.
type signalSupport struct {
	unsupported bool // it is read again with the slow signals only, as one such answer may be wrong
	wasRead     bool // it was read successfully before
	failed      bool // the last reading failed: the next check reads it again
	changed     bool // the last reading changed its value: the next check reads it again, as one reading may be wrong
}

// update records the result of a reading, and reports whether its value counts (zero for an unsupported signal). A
// signal that was read and is not supported now has failed: see retained.
func (y *signalSupport) update(err error) bool {
	y.failed = err != nil && (y.wasRead || !isUnsupported(err))
	if y.failed {
		return false
	}
	y.unsupported, y.wasRead = err != nil, err == nil
	return true
}

// interval is how often a signal is read.
type interval uint8

// The first three are in Options. intervalOnce is the first check, and the first one after the GPU did not answer.
const (
	intervalSlow interval = iota
	intervalFabric
	intervalLinks
	intervalOnce
	intervals // their number
)

// checkPlan is what a check reads besides what every check does.
type checkPlan struct {
	now time.Time
	due [intervals]bool
	all bool // everything, as after the GPU did not answer

	proc fs.FS // procfs, to read the GPU's processes; nil = they are not read
}

// forDevice is r, or an empty record if r is of another GPU or of another mode.
func (r healthRecord) forDevice(d gpu.Device) healthRecord {
	if r.id != d.ID || r.mig != d.MIG || r.ecc != d.ECC {
		return healthRecord{id: d.ID, mig: d.MIG, ecc: d.ECC}
	}
	return r
}

// minEventInterval bounds how often events make a check read the signals that are not due.
const minEventInterval = time.Second

// plan is what is due at now. After an event of the GPU, that is everything except intervalOnce.
func (s *Session) plan(r healthRecord, now time.Time, event bool) checkPlan {
	p := checkPlan{now: now, all: r.lastFailed || r.lastRead[intervalOnce].IsZero()}
	if s.processes {
		p.proc = s.proc
	}
	for i, d := range s.intervals {
		age := now.Sub(r.lastRead[i])
		p.due[i] = p.all || d > 0 && (age >= d || event && age >= minEventInterval)
	}
	return p
}

// start is the record at the start of a check.
func (r healthRecord) start(p checkPlan) healthRecord {
	r.lastFailed = false
	for i, due := range p.due {
		if due {
			r.lastRead[i] = p.now
		}
	}
	if !p.due[intervalSlow] {
		return r
	}
	r.fieldsCall.unsupported, r.processesCall.unsupported = false, false
	for _, all := range [][]signalSupport{r.fields[:], r.links[:]} {
		for i := range all {
			all[i].unsupported = false
		}
	}
	return r
}

// checkWithRetry checks a GPU. If it is lost, the check is repeated with the handle of its PCI address, which identifies
// no other GPU, and differs from d.handle after a reset. A lookup by UUID may fail because another GPU is lost.
func (r healthRecord) checkWithRetry(c *caller, lib nvml.Interface, d nvmlDevice, p checkPlan) healthRecord {
	next := r.check(c, d.handle, p)
	if !isLost(c.err) || !c.slot.library.has(handleByPCI) {
		return next
	}
	lost := c.err
	c.err = nil
	h := required(c, handleByPCI, func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByPciBusId(string(d.device.PCI)) })
	switch {
	case c.err == nil:
		next = r.check(c, h, p)
	case isLost(c.err), isUnsupported(c.err), returnCode(c.err) == nvml.ERROR_NOT_FOUND:
		c.err = lost
	}
	return next
}

// errNoAnswer means that no call by which a check finds that a GPU is there had an answer.
var errNoAnswer = errors.New("the driver answers no call about the GPU")

// check reads the UUID, which the library may have cached, then the fields, for which the GPU has to answer, then the
// signals that are due. RESET_REQUIRED is an answer: the recovery action is a reset.
func (r healthRecord) check(c *caller, h nvml.Device, p checkPlan) healthRecord {
	r = r.start(p)
	id := readUUID(c, h, r.id)
	if c.err == nil && id != r.id {
		c.err = fmt.Errorf("the handle is of another GPU: %s", id)
	}
	answered := !c.fellBack
	if p.due[intervalOnce] {
		r.sample.VGPU = optional(c, "nvmlDeviceGetVirtualizationMode", health.NotReported, func() (health.Tristate, nvml.Return) {
			mode, ret := h.GetVirtualizationMode()
			return health.TristateOf(mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU), ret
		})
	}
	answered = r.readFields(c, h, p.due[intervalLinks]) || r.readMemory(c, h) || answered
	if c.err == nil && !answered {
		c.err = errNoAnswer
	}
	r.readSignals(c, h, p)
	r.readProcesses(c, h, p)
	r.sample.Partial = r.partial()
	if returnCode(c.err) == nvml.ERROR_RESET_REQUIRED {
		c.err = nil
		r.sample.RecoveryAction, r.sample.Partial, r.lastFailed = health.RecoveryReset, true, true
	}
	return r
}

// readMemory makes a call for which the GPU has to answer, and reports whether it did.
func (r healthRecord) readMemory(c *caller, h nvml.Device) (answered bool) {
	if c.err != nil {
		return false
	}
	_, err := call(c.slot, memoryInfo, c.at, h.GetMemoryInfo)
	if !isUnsupported(err) {
		c.err = err
	}
	return err == nil
}

// partial reports whether a signal could not be read that could be before.
func (r *healthRecord) partial() bool {
	for _, all := range [][]signalSupport{{r.fieldsCall}, r.fields[:], r.links[:], r.signals[:]} {
		for _, y := range all {
			if y.failed && y.wasRead {
				return true
			}
		}
	}
	return false
}

// endsCheck reports whether an error concerns the whole GPU and not one signal.
func endsCheck(err error) bool {
	return endsReading(err) || returnCode(err) == nvml.ERROR_RESET_REQUIRED
}
