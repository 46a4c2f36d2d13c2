package storm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// harmlessCalls are calls whose failure is no sign of a fault: statistics, links, texts.
var harmlessCalls = []string{
	"nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetEncoderUtilization",
	"nvmlDeviceGetDecoderUtilization", "nvmlDeviceGetMemoryErrorCounter", "nvmlDeviceGetNvLinkRemotePciInfo",
	"nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetDisplayMode",
	"nvmlDeviceGetPersistenceMode", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetSupportedEventTypes",
	"nvmlDeviceRegisterEvents", "nvmlDeviceGetSerial", "nvmlDeviceGetArchitecture", "nvmlDeviceGetBrand",
	"nvmlDeviceGetEccMode",
}

// gpuCodes concern the whole GPU, whichever call returns them.
var gpuCodes = []string{"GPU_IS_LOST", "RESET_REQUIRED"}

func disturb(s *slot) { s.disturbed = true }

// disturbing is a fault after which the GPU may be unhealthy.
func (w *oneAgent) disturbing(begin func(*fault) error) func(*fault) error {
	return func(f *fault) error {
		w.expected.change(f.slot, disturb)
		return begin(f)
	}
}

// losing is a fault after which the GPU does not answer.
func (w *oneAgent) losing(begin func(slot int) error) func(*fault) error {
	return w.disturbing(func(f *fault) error {
		err := begin(f.slot)
		w.expected.change(f.slot, func(s *slot) { s.set(lost) })
		return err
	})
}

// resetting is a fault after which all GPUs may look reset.
func (w *oneAgent) resetting(change func() error) func(*fault) error {
	return func(*fault) error {
		w.expected.all((*slot).looksReset)
		return change()
	}
}

func (w *oneAgent) failCall(f *fault) error {
	w.expected.change(f.slot, func(s *slot) {
		s.disturbed = s.disturbed || !slices.Contains(harmlessCalls, f.call) || slices.Contains(gpuCodes, f.code)
		s.hideAction(w.expected.bound)
		if slices.Contains(gpuCodes, f.code) {
			s.looksReset() // when it answers again
		}
	})
	return w.Fail(simdriver.GPU(f.slot), f.call, f.code, f.count)
}

func (w *oneAgent) hangCall(f *fault) error {
	w.expected.change(f.slot, func(s *slot) { s.disturbed = true; s.hideAction(w.expected.bound) })
	if err := w.Hang(simdriver.GPU(f.slot), f.call); err != nil {
		return err
	}
	if f.call == "*" || f.call == "nvmlDeviceGetUUID" { // the others are not made in each check
		w.expected.change(f.slot, func(s *slot) { s.set(hung) })
	}
	return nil
}

// slowCall makes a call slow, but not so slow that the GPU is unhealthy.
func (w *oneAgent) slowCall(f *fault) error {
	w.expected.change(f.slot, func(s *slot) { s.hideAction(w.expected.bound) })
	return w.Slow(simdriver.GPU(f.slot), f.call, f.took)
}

func (w *oneAgent) healCalls(f *fault) error {
	w.expected.change(f.slot, func(s *slot) {
		s.clear(hung)
		if slices.Contains(gpuCodes, f.code) {
			s.looksReset()
		}
	})
	err := w.Heal(simdriver.GPU(f.slot))
	w.expected.readable(f.slot)
	return err
}

func (w *oneAgent) restore(f *fault) error {
	w.expected.change(f.slot, func(s *slot) { s.clear(lost); s.looksReset() })
	return w.Restore(f.slot)
}

func (w *oneAgent) bind(f *fault) error {
	w.expected.change(f.slot, func(s *slot) { s.clear(lost); s.setAction(false) })
	return w.Bind(f.slot)
}

func (w *oneAgent) putBack(f *fault) error {
	w.expected.change(f.slot, func(s *slot) { s.clear(lost); s.setAction(false) })
	return errors.Join(w.addGPU(f.slot, w.removed[f.slot].uuid), w.readDevices(f.slot))
}

// replace puts another GPU into a slot.
func (w *oneAgent) replace(f *fault) error {
	w.expected.change(f.slot, func(s *slot) { disturb(s); s.setAction(false) })
	delete(w.needsReset, f.slot)
	return errors.Join(w.removeGPU(f.slot), w.addGPU(f.slot, w.newUUID()), w.readDevices(f.slot))
}

func (w *oneAgent) setAction(f *fault) error {
	w.expected.change(f.slot, disturb)
	err := w.Set(f.slot, "recovery_action", fmt.Sprint(f.count))
	w.expected.change(f.slot, func(s *slot) { s.setAction(true) })
	return err
}

func (w *oneAgent) clearAction(f *fault) error {
	w.expected.change(f.slot, func(s *slot) { s.setAction(false) })
	return w.Set(f.slot, "recovery_action", "0")
}

func (w *oneAgent) reset(f *fault) error {
	w.expected.change(f.slot, func(s *slot) { disturb(s); s.setAction(false) })
	return w.Change(f.slot, "recovery_action = 0", "pcie_replays = 0", "energy = 0") // a lost GPU stays lost
}

// resetAfterXID is the reset that the driver recommends after a fatal XID.
func (w *oneAgent) resetAfterXID(f *fault) error {
	if err := w.Set(f.slot, "recovery_action", "1"); err != nil {
		return err
	}
	w.expected.change(f.slot, func(s *slot) { s.setAction(false) })
	return w.Reset(f.slot)
}

func (w *oneAgent) repartition(f *fault) error {
	if err := w.SetMIG(f.slot, layouts[f.count]...); err != nil {
		return err
	}
	return w.readDevices(f.slot)
}

// fatalXID raises an XID after which only a reset makes the GPU healthy. NVML drops an XID while no process waits for events,
// so it counts from when the agent has recorded it. If something looked like a reset a moment before, the agent may see that
// after the XID, and the GPU need not be unhealthy.
func (w *oneAgent) fatalXID(f *fault) error {
	var resets int
	uuid := gpu.DeviceID(w.UUID(f.slot))
	before := w.xidCount(uuid, f.count)
	w.expected.change(f.slot, func(s *slot) { s.disturbed, resets = true, s.resets })
	if err := w.severeXID(f); err != nil {
		return err
	}
	w.pending.Go(func() {
		if !w.until(2*time.Second, func() bool { return w.xidCount(uuid, f.count) > before }) {
			return
		}
		w.expected.change(f.slot, func(s *slot) {
			if s.resets == resets && s.failing == 0 && time.Since(s.reset) > w.expected.bound {
				s.set(fatal)
			}
		})
	})
	return nil
}

// xidCount is how many of an XID the agent has recorded for a GPU.
func (w *oneAgent) xidCount(gpu gpu.DeviceID, code int) uint64 {
	history, _ := w.monitor.State().Ledger.History(gpu)
	for _, t := range history.FaultCounts {
		if t.Reason == health.ReasonXID && t.Code == uint64(code) {
			return t.Count
		}
	}
	return 0
}

// severeXID raises an XID after which the GPU may need a reset, and an operator's check if it is the same again.
func (w *oneAgent) severeXID(f *fault) error {
	w.needsReset[f.slot] = true
	w.xids[gpuXID{f.slot, f.count}]++
	return w.sendXID(f)
}

func (w *oneAgent) sendXID(f *fault) error {
	w.sent[sentXID{gpu.DeviceID(w.UUID(f.slot)), uint64(f.count)}]++
	return w.XID(f.slot, uint64(f.count))
}

// manyXIDs raises one XID many times.
func (w *oneAgent) manyXIDs(f *fault) error {
	w.sent[sentXID{gpu.DeviceID(w.UUID(f.slot)), 31}] += uint64(f.count)
	return w.Storm(f.slot, 31, f.count)
}

// failRemap makes the GPU fail to remap a row, beside an XID after which it needs a reset: no reset repairs it.
func (w *oneAgent) failRemap(f *fault) error {
	w.expected.change(f.slot, disturb)
	return errors.Join(w.Set(f.slot, "remapped_failed", "yes"), w.severeXID(f))
}

// repairRemap has an operator replace the memory. The condition stays until an operator clears it.
func (w *oneAgent) repairRemap(f *fault) error { return w.Set(f.slot, "remapped_failed", "no") }

func (w *oneAgent) sendEvent(f *fault) error {
	if f.count >= 0x400 {
		w.expected.change(f.slot, disturb)
		w.needsReset[f.slot] = true
	}
	return w.Event(f.slot, uint64(f.count), 0)
}

// callOfAll makes a call fail, hang or be slow for all GPUs.
func (w *oneAgent) callOfAll(f *fault) error {
	if f.kind.driver {
		w.expected.all(func(s *slot) { s.hideAction(w.expected.bound); s.looksReset() })
	}
	switch f.code {
	case hangs:
		return w.Hang(simdriver.All, f.call)
	case slow:
		return w.Slow(simdriver.All, f.call, f.took)
	}
	return w.Fail(simdriver.All, f.call, f.code, simdriver.Always)
}

func (w *oneAgent) healAll(f *fault) error {
	if !f.kind.driver {
		return w.Heal(simdriver.All)
	}
	w.expected.all((*slot).looksReset)
	err := w.Heal(simdriver.All)
	w.expected.all((*slot).showAction)
	return err
}

func (w *oneAgent) unload(f *fault) error {
	err := w.resetting(w.Unload)(f)
	w.expected.setLoaded(false)
	return err
}

func (w *oneAgent) load(*fault) error {
	w.expected.setLoaded(true)
	return w.Load()
}

// quiesce has the agent release the driver, which it can't while a call hangs.
func (w *oneAgent) quiesce(*fault) error {
	w.expected.all((*slot).looksReset)
	ctx, cancel := context.WithTimeout(w.ctx, w.o.limit(10*time.Second))
	defer cancel()
	err := w.monitor.Quiesce(ctx, time.Time{})
	w.expected.setLoaded(false)
	if faults, _ := w.Faults(); slices.ContainsFunc(faults, func(line string) bool { return strings.HasPrefix(line, hangs) }) {
		if _, held := errors.AsType[*monitor.HeldError](err); held {
			return nil
		}
	}
	return err
}

func (w *oneAgent) resume(*fault) error {
	w.expected.setLoaded(true)
	return w.monitor.Resume(w.ctx)
}

func (w *oneAgent) stopKubelet(how func(*kubelettest.Kubelet)) func(*fault) error {
	return func(*fault) error { w.kubelet.stop(how); return nil }
}

func (w *oneAgent) changeKubelet(how func(*kubelettest.Kubelet)) func(*fault) error {
	return func(*fault) error { w.kubelet.disturb(how); return nil }
}

// startKubelet starts another one, of this version or of one up to 1.36.
func (w *oneAgent) startKubelet(f *fault) error {
	return w.kubelet.start(kubelettest.Behaviour{OneClientPerResource: f.number%2 == 0})
}

func (w *oneAgent) misbehave(f *fault) error {
	w.kubelet.stop((*kubelettest.Kubelet).Crash)
	return w.kubelet.start(misbehaviours[f.count])
}
