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

// How long recovery may take without faults. After the driver as a whole failed the monitor may be waiting to open it.
const (
	recovery       = 20 * time.Second
	recoveryDriver = 50 * time.Second
)

// quietPeriod begins when no fault is in force. It waits until everything is healthy that recovers by itself, does what an operator does
// for the rest, and checks that nothing remains of the faults.
func (w *oneAgent) quietPeriod(driver bool) {
	w.pending.Wait()
	if w.ctx.Err() != nil {
		return
	}
	w.kubelet.stop((*kubelettest.Kubelet).Stop)
	if err := w.kubelet.start(kubelettest.Behaviour{}); err != nil {
		w.fail("kubelet: %w", err)
	}
	limit := recovery
	if driver {
		limit = recoveryDriver
	}
	w.await("what recovers by itself", limit, func(_ string, n int) bool { return w.needsReset[n] })
	if w.ctx.Err() == nil {
		w.resetGPUs()
	}
	w.await("everything", limit, func(string, int) bool { return false })
	w.reserveAll()
	w.checkViolations(1, func(string) bool { return false })
	w.views.check(w)
	if w.ctx.Err() == nil {
		w.expected.forget()
	}
	clear(w.needsReset)
	w.journal.note("quiet period ends")
}

// await waits until both orchestrators have exactly the units that must be offered, all healthy except the excused ones.
func (w *oneAgent) await(what string, limit time.Duration, excused func(id string, slot int) bool) {
	began := time.Now()
	if !w.until(limit, func() bool { return len(w.differences(excused)) == 0 }) && w.ctx.Err() == nil {
		w.fail("after %v without faults %s is not healthy:\n%s", time.Since(began).Round(time.Second), what, strings.Join(w.differences(excused), "\n"))
	}
}

// differences are those between what the orchestrators have and what must be offered.
func (w *oneAgent) differences(excused func(id string, slot int) bool) (lines []string) {
	nomad, kubelet, want := w.nomad.view(), w.kubelet.view(), w.expected.units()
	for id, n := range want {
		a, inNomad := nomad[id]
		b, inKubelet := kubelet[id]
		if inNomad && inKubelet && (a.healthy && b.healthy || a.healthy == b.healthy && excused(id, n)) {
			continue
		}
		u, _ := w.monitor.Current().Unit(inventory.UnitID(id))
		lines = append(lines, fmt.Sprintf("GPU %d (%s): Nomad has it %v, healthy %v; kubelet %v, %v; %s", n, id, inNomad, a.healthy, inKubelet, b.healthy, u.Health))
	}
	for _, view := range []map[string]unit{nomad, kubelet} {
		for id := range view {
			if _, ok := want[id]; !ok {
				lines = append(lines, id+" is listed, and no longer exists")
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// resetGPUs does what an operator does with GPUs that do not recover by themselves: a reset, before and after which the driver reports
// recovery actions, and a command where the agent requires a check.
func (w *oneAgent) resetGPUs() {
	unhealthy := map[int]gpu.DeviceID{}
	for id, n := range w.expected.units() {
		if u, ok := w.monitor.Current().Unit(inventory.UnitID(id)); ok && !u.Health.Schedulable() {
			unhealthy[n] = u.Device.At.GPU
		}
	}
	for n := range unhealthy {
		must(w.t, w.Set(n, "recovery_action", "1"))
	}
	for n, gpu := range unhealthy {
		action := func() health.RecoveryAction {
			history, _ := w.monitor.State().Ledger.History(gpu)
			return history.Sample.RecoveryAction
		}
		if !w.until(recovery, func() bool { return action() == health.RecoveryReset }) && w.ctx.Err() == nil {
			w.fail("GPU %d: the agent does not notice that the driver recommends a reset", n)
		}
		w.expected.change(n, func(s *slot) { s.setAction(false) })
		must(w.t, w.Reset(n))
	}
	for n, gpu := range unhealthy {
		if !w.until(recovery, func() bool { return w.cause(gpu) == "" || w.cause(gpu) == needsService }) && w.ctx.Err() == nil {
			w.fail("GPU %d was reset, and still is %s", n, w.cause(gpu))
		}
		if w.cause(gpu) == needsService {
			w.clearService(n, gpu)
		}
	}
}

// needsService is the cause of a GPU that an operator must check.
const needsService = "NEEDS_SERVICE"

// cause is why a GPU is not offered; "" if it is.
func (w *oneAgent) cause(id gpu.DeviceID) string {
	if h := w.monitor.State().Ledger.Health(gpu.WholeGPU(id)); !h.Schedulable() {
		return h.Cause()
	}
	return ""
}

// clearService is an operator's command that a GPU is healthy which had the same XID again after a reset. No other may need it.
func (w *oneAgent) clearService(n int, gpu gpu.DeviceID) {
	again := false
	for xid, times := range w.xids {
		again = again || xid.slot == n && times > 1
	}
	if !again {
		w.fail("GPU %d needs service, and had no XID twice", n)
	}
	if _, err := w.monitor.Clear(w.ctx, health.Command{GPU: gpu, Cause: needsService}); err != nil && w.ctx.Err() == nil {
		w.fail("GPU %d: clear: %w", n, err)
	}
}

// reserveAll requests every unit of both plugins.
func (w *oneAgent) reserveAll() {
	view := w.kubelet.view()
	for id := range w.expected.units() {
		if w.ctx.Err() != nil {
			return
		}
		if _, err := w.nomad.plugin.Reserve([]string{id}); err != nil {
			w.fail("without faults: Reserve(%s): %w", id, err)
		}
		if _, err := w.kubelet.allocate(w.ctx, view[id].of, id); err != nil {
			w.fail("without faults: Allocate(%s): %w", id, err)
		}
	}
}
