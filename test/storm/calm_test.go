package storm

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
)

// How long recovery may take when nothing is wrong any more: after a storm in which the driver was gone the
// monitor may be between two tries to open it.
const (
	recovery       = 20 * time.Second
	recoveryDriver = 50 * time.Second
)

// calm has everything lifted already. It waits until all is well that gets well by itself, has an operator see to
// the rest, and checks that nothing is left of the storm.
func (w *storm) calm(weather bool) {
	w.later.Wait()
	if w.ctx.Err() != nil {
		return
	}
	w.kubelet.stop((*kubelettest.Kubelet).Stop)
	if err := w.kubelet.start(kubelettest.Behaviour{}); err != nil {
		w.wrong("kubelet: %w", err)
	}
	limit := recovery
	if weather {
		limit = recoveryDriver
	}
	w.await("what needs no hand", limit, func(id string, n int) bool { return w.fatals[n] })
	if w.ctx.Err() == nil {
		w.operate()
	}
	w.await("everything", limit, func(string, int) bool { return false })
	w.handOut()
	w.misuse()
	w.eyes.look(w)
	if w.ctx.Err() == nil {
		w.truth.calm()
	}
	clear(w.fatals)
	w.journal.note("calm")
}

// misuse ends the storm if NVML was misused. A lookup by index may meet a GPU in which a call hangs: a GPU that is
// pulled gives its index to another between the last word on who has which index and the next lookup. It can't be
// helped, does no harm, and happens at most once each time.
//
//	reader   count: 8, who has index 3: GPU 3 ........ lookup of index 3: GPU 4, which hangs
//	machine             GPU 0 is pulled, GPU 4 moves up ...^
//
// Somebody who has hung since before anybody knew its name is then asked who it is: that lookup ends in the same call.
func (w *storm) misuse() {
	violations, err := w.Violations()
	raced, rest := strayLookups(violations)
	if err != nil || len(rest) > 0 || raced > w.moves {
		w.wrong("NVML misused, indices moved %d times: %q, %v", w.moves, violations, err)
		return
	}
	w.raced += raced
	w.moves = 0
	if err := w.ForgiveViolations(); err != nil {
		w.wrong("violations: %w", err)
	}
}

// strayLookups counts the lookups among violations that met a GPU in which a call hangs; rest are the others.
func strayLookups(violations []string) (raced int, rest []string) {
	lookups, asked := map[string]int{}, map[string]int{}
	for _, line := range violations {
		call, on, _ := strings.Cut(line, ": called on ")
		gpu, _, _ := strings.Cut(on, " ")
		switch {
		case strings.HasSuffix(call, " nvmlDeviceGetHandleByIndex_v2"):
			lookups[gpu]++
		case strings.HasSuffix(call, " nvmlDeviceGetUUID") && asked[gpu] < lookups[gpu]:
			asked[gpu]++
		case strings.Contains(call, " nvmlDeviceGetPciInfo") && asked[gpu] > 0: // of that lookup, when its call is back
		default:
			rest = append(rest, line)
		}
	}
	for _, n := range lookups {
		raced += n
	}
	return raced, rest
}

// await waits until both orchestrators have the very units that there are, all of them well but for those excused.
func (w *storm) await(what string, limit time.Duration, excused func(id string, slot int) bool) {
	began := time.Now()
	right := func() bool { return len(w.amiss(excused)) == 0 }
	if !w.until(limit, right) && w.ctx.Err() == nil {
		w.wrong("after a calm of %v %s is not well:\n%s", time.Since(began).Round(time.Second), what, strings.Join(w.amiss(excused), "\n"))
	}
}

// amiss says what is not as it should be.
func (w *storm) amiss(excused func(id string, slot int) bool) (lines []string) {
	fromNomad, fromKubelet, want := w.nomad.view(), w.kubelet.view(), w.truth.units()
	for id, n := range want {
		a, inNomad := fromNomad[id]
		b, inKubelet := fromKubelet[id]
		if inNomad && inKubelet && (a.healthy && b.healthy || a.healthy == b.healthy && excused(id, n)) {
			continue
		}
		u, _ := w.monitor.Current().Unit(inventory.UnitID(id))
		lines = append(lines, fmt.Sprintf("GPU %d (%s): Nomad has it %v, healthy %v; kubelet %v, %v; %s", n, id, inNomad, a.healthy, inKubelet, b.healthy, u.Health))
	}
	for _, view := range []map[string]unit{fromNomad, fromKubelet} {
		for id := range view {
			if _, ok := want[id]; !ok {
				lines = append(lines, id+" is listed, and is no more")
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// operate does what an operator does with GPUs that do not get well by themselves: a reset, of which the driver
// tells before and after, and an order where the agent wants somebody to have looked.
func (w *storm) operate() {
	sick := map[int]gpu.DeviceID{}
	for id, n := range w.truth.units() {
		if u, ok := w.monitor.Current().Unit(inventory.UnitID(id)); ok && !u.Health.Schedulable() {
			sick[n] = u.Device.At.GPU
		}
	}
	for n := range sick {
		must(w.t, w.Set(n, "recovery_action", "1"))
	}
	chart := func(gpu gpu.DeviceID) health.GPUHistory {
		c, _ := w.monitor.State().Ledger.History(gpu)
		return c
	}
	for n, gpu := range sick {
		if !w.until(recovery, func() bool { return chart(gpu).Sample.RecoveryAction == health.RecoveryReset }) && w.ctx.Err() == nil {
			w.wrong("GPU %d: the agent does not hear that the driver wants a reset", n)
		}
		w.truth.change(n, func(s *slot) { s.want(false) })
		must(w.t, w.Reset(n))
	}
	for n, gpu := range sick {
		if !w.until(recovery, func() bool { return w.cause(gpu) == "" || w.cause(gpu) == service }) && w.ctx.Err() == nil {
			w.wrong("GPU %d was reset, and still is %s", n, w.cause(gpu))
		}
		if w.cause(gpu) == service {
			w.look(n, gpu)
		}
	}
}

// service is the cause of a GPU that somebody must have looked at.
const service = "NEEDS_SERVICE"

// cause is what keeps a GPU from being offered; "" if nothing does.
func (w *storm) cause(id gpu.DeviceID) string {
	if h := w.monitor.State().Ledger.Health(gpu.WholeGPU(id)); !h.Schedulable() {
		return h.Cause()
	}
	return ""
}

// look is an operator's word that a GPU which had the same XID again after a reset is well. No other may be
// called for.
func (w *storm) look(n int, gpu gpu.DeviceID) {
	again := false
	for s, times := range w.raised {
		again = again || s.slot == n && times > 1
	}
	if !again {
		w.wrong("GPU %d needs service, and had no XID twice", n)
	}
	if _, err := w.monitor.Clear(w.ctx, health.Command{GPU: gpu, Cause: service}); err != nil && w.ctx.Err() == nil {
		w.wrong("GPU %d: clear: %w", n, err)
	}
}

// handOut asks both sides for every unit.
func (w *storm) handOut() {
	view := w.kubelet.view()
	for id := range w.truth.units() {
		if w.ctx.Err() != nil {
			return
		}
		if _, err := w.nomad.plugin.Reserve([]string{id}); err != nil {
			w.wrong("in a calm: Reserve(%s): %w", id, err)
		}
		if _, err := w.kubelet.allocate(w.ctx, view[id].of, id); err != nil {
			w.wrong("in a calm: Allocate(%s): %w", id, err)
		}
	}
}
