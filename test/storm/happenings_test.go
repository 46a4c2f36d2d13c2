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
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// fatalXID raises an XID after which only a reset mends the GPU. It may be raised while nobody listens, as NVML
// has no memory; so it counts from when it was heard. If something looked like a reset a moment before, the agent
// may see that after the XID, and no claim is made.
func fatalXID(w *storm, f *fault) error {
	var heard uint64
	var resets int
	uuid := gpu.DeviceID(w.UUID(f.slot))
	heard = w.heard(uuid, f.count)
	w.truth.change(f.slot, func(s *slot) { s.blamed, resets = true, s.resets })
	w.note(f)
	if err := w.XID(f.slot, uint64(f.count)); err != nil {
		return err
	}
	w.later.Go(func() {
		if !w.until(2*time.Second, func() bool { return w.heard(uuid, f.count) > heard }) {
			return
		}
		w.truth.change(f.slot, func(s *slot) {
			if s.resets == resets && s.blind == 0 && time.Since(s.reset) > w.truth.bound {
				s.begin(fatal)
			}
		})
	})
	return nil
}

// jumpClock sets the wall clock. Nobody is to blame.
func jumpClock(w *storm, f *fault) error {
	w.ahead.Add(int64(f.took))
	return nil
}

// wall is the agent's wall clock.
func (w *storm) wall() time.Time { return time.Now().Add(time.Duration(w.ahead.Load())) }

// heard is how often the agent has heard an XID of a GPU.
func (w *storm) heard(gpu gpu.DeviceID, code int) uint64 {
	chart, _ := w.monitor.State().Ledger.History(gpu)
	for _, t := range chart.FaultCounts {
		if t.Reason == health.ReasonXID && t.Code == uint64(code) {
			return t.Count
		}
	}
	return 0
}

// note remembers that a GPU may need a reset, and an operator's look if it is the same again.
func (w *storm) note(f *fault) {
	w.fatals[f.slot] = true
	w.raised[sighting{f.slot, uint64(f.count)}]++
}

func severeXID(w *storm, f *fault) error {
	w.truth.change(f.slot, blame)
	w.note(f)
	return w.XID(f.slot, uint64(f.count))
}

// harmlessXID raises an XID of a program. Nobody is to blame.
func harmlessXID(w *storm, f *fault) error { return w.XID(f.slot, uint64(f.count)) }

func strangeXID(w *storm, f *fault) error {
	w.truth.change(f.slot, blame)
	return w.XID(f.slot, uint64(f.count))
}

func event(w *storm, f *fault) error {
	if f.count >= 0x400 {
		w.truth.change(f.slot, blame)
		w.fatals[f.slot] = true
	}
	return w.Event(f.slot, uint64(f.count), 0)
}

func flood(w *storm, f *fault) error { return w.Storm(f.slot, 31, f.count) }

// callOfAll makes a call fail, hang or crawl for everybody, or for nobody in particular.
func callOfAll(w *storm, f *fault) error {
	if f.kind.weather {
		w.truth.all(func(s *slot) { s.blindfold(w.truth.bound); s.renewed() })
	}
	switch f.code {
	case hang:
		return w.Hang(simdriver.All, f.call)
	case crawl:
		return w.Slow(simdriver.All, f.call, f.took)
	}
	return w.Fail(simdriver.All, f.call, f.code, simdriver.Always)
}

func healAll(w *storm, f *fault) error {
	if !f.kind.weather {
		return w.Heal(simdriver.All)
	}
	w.truth.all((*slot).renewed)
	err := w.Heal(simdriver.All)
	w.truth.all((*slot).unblind)
	return err
}

// version is that of the machine's driver.
const version = "570.124.06"

func unload(w *storm, _ *fault) error {
	w.truth.all((*slot).renewed)
	err := w.Unload()
	w.truth.load(false)
	return err
}

func load(w *storm, _ *fault) error {
	w.truth.load(true)
	return w.Load()
}

// reload is another incarnation of the same driver.
func reload(w *storm, _ *fault) error {
	w.truth.all((*slot).renewed)
	return w.SetDriver(version)
}

func hide(w *storm, _ *fault) error {
	w.truth.all((*slot).renewed)
	return w.Hide()
}

func unhide(w *storm, _ *fault) error {
	w.truth.all((*slot).renewed)
	return w.Unhide()
}

// quiesce has the agent let go of the driver, which it can't while a call hangs.
func quiesce(w *storm, _ *fault) error {
	w.truth.all((*slot).renewed)
	ctx, cancel := context.WithTimeout(w.ctx, w.o.patient(10*time.Second))
	defer cancel()
	err := w.monitor.Quiesce(ctx, time.Time{})
	w.truth.load(false)
	if faults, _ := w.Faults(); slices.ContainsFunc(faults, func(line string) bool { return strings.HasPrefix(line, hang) }) {
		if _, held := errors.AsType[*monitor.HeldError](err); held {
			return nil
		}
	}
	return err
}

func resume(w *storm, _ *fault) error {
	w.truth.load(true)
	return w.monitor.Resume(w.ctx)
}

func stopKubelet(w *storm, _ *fault) error {
	w.kubelet.stop((*kubelettest.Kubelet).Stop)
	return nil
}

func crashKubelet(w *storm, _ *fault) error {
	w.kubelet.stop((*kubelettest.Kubelet).Crash)
	return nil
}

// startKubelet starts another one, of this version or of one up to 1.36.
func startKubelet(w *storm, f *fault) error {
	return w.kubelet.start(kubelettest.Behaviour{OneClientPerResource: f.number%2 == 0})
}

// habits are ways in which a kubelet makes it hard to register.
var habits = []kubelettest.Behaviour{
	{Refuse: errors.New("not now")},
	{Delay: 700 * time.Millisecond},
	{StreamDelay: 500 * time.Millisecond},
	{NoStream: true},
	{Lag: 300 * time.Millisecond},
}

func unkind(w *storm, f *fault) error {
	w.kubelet.stop((*kubelettest.Kubelet).Crash)
	return w.kubelet.start(habits[f.count])
}

func beKind(w *storm, _ *fault) error {
	w.kubelet.disturb(func(k *kubelettest.Kubelet) { k.Behave(kubelettest.Behaviour{}) })
	return nil
}

func hangUp(w *storm, _ *fault) error {
	w.kubelet.disturb(func(k *kubelettest.Kubelet) { k.EndStream(kubeadapter.GPUResource) })
	return nil
}

func openFingerprint(w *storm, _ *fault) error { return named("fingerprint", w.nomad.fingerprint()) }

func openStats(w *storm, _ *fault) error { return named("stats", w.nomad.stats()) }

func named(what string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
