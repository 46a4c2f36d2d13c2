package storm

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/rig"
)

// checkEvery is the interval at which the views of both orchestrators are checked, also without a message: a missing one is wrong, too.
const checkEvery = 25 * time.Millisecond

// stopGap is from when on a goroutine that is late, or a file that is written slowly, means that this process did not run.
const stopGap = 300 * time.Millisecond

// views compares the units of both orchestrators.
type views struct {
	mu     sync.Mutex
	differ map[string]time.Time // units in which they differ, and since when
}

// checkViews checks what both orchestrators have until the test ends.
func (w *oneAgent) checkViews() {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for last := time.Now(); ; last = time.Now() {
		select {
		case <-tick.C:
			if gap := time.Since(last); gap > stopGap {
				w.stopped.Add(int64(gap))
				w.expected.stopped(gap)
				w.views.forget()
			}
			w.views.check(w)
		case <-w.ctx.Done():
			return
		}
	}
}

func (v *views) check(w *oneAgent) {
	v.mu.Lock()
	defer v.mu.Unlock()
	now := time.Now()
	for _, d := range w.kubelet.newLists() {
		w.check("the kubelet received", d.GetID(), d.GetHealth() == v1beta1.Healthy, now)
	}
	nomad, kubelet := w.nomad.view(), w.kubelet.view()
	for id, u := range kubelet {
		if u.Healthy || w.kubelet.undisturbed(now) { // when a stream ends a kubelet marks all devices unhealthy
			w.check("the kubelet has", id, u.Healthy, now)
		}
	}
	for id, u := range nomad {
		w.check("Nomad has", id, u.Healthy, now)
	}
	w.checkShares("Nomad", nomad, now)
	w.checkShares("the kubelet", kubelet, now)
	v.compare(w, nomad, kubelet, now)
}

func (v *views) forget() {
	v.mu.Lock()
	defer v.mu.Unlock()
	clear(v.differ)
}

// compare fails the test if the two differ for too long. Differences do not count while the kubelet has no plugin.
func (v *views) compare(w *oneAgent, nomad, kubelet map[string]rig.View, now time.Time) {
	if v.differ == nil || !w.kubelet.undisturbed(now) {
		v.differ = map[string]time.Time{}
	}
	for _, units := range []map[string]rig.View{nomad, kubelet} {
		for id := range units {
			if _, ok := v.differ[id]; !ok {
				v.differ[id] = now
			}
		}
	}
	for id, since := range v.differ {
		n, inNomad := nomad[id]
		k, inKubelet := kubelet[id]
		if inNomad == inKubelet && n.Healthy == k.Healthy {
			delete(v.differ, id)
		} else if now.Sub(since) > w.expected.bound {
			w.fail("%s: Nomad has it %v and healthy %v, the kubelet %v and %v, for %v", id, inNomad, n.Healthy, inKubelet, k.Healthy, now.Sub(since))
		}
	}
}

// check fails the test if an orchestrator has a unit as it must not be.
func (w *oneAgent) check(who, id string, healthy bool, at time.Time) {
	if err := w.expected.check(id, healthy, at); err != nil {
		w.fail("%s: %w", who, err)
	}
}

// checkShares fails the test if an orchestrator has shares of a device with different health.
func (w *oneAgent) checkShares(who string, view map[string]rig.View, now time.Time) {
	healthy := map[string]bool{}
	for id, u := range view {
		device, _, shared := strings.Cut(id, "::")
		if w.expected.inTransition(id, now) {
			continue
		}
		if other, ok := healthy[device]; shared && ok && other != u.Healthy {
			w.fail("%s: shares of %s differ", who, device)
		}
		healthy[device] = u.Healthy
	}
}

// inTransition reports whether a unit no longer exists, though it may be listed for a while, or exists again only since a moment ago.
func (t *expectedState) inTransition(id string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	returned, again := t.returned[id]
	return !t.gone[id].IsZero() || again && now.Sub(returned) <= t.bound
}

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
	checks := w.monitor.Stats().Checks // the effect of the latest fault may not have been read so far: the second one begins after it
	w.until(limit, func() bool { return w.monitor.Stats().Checks >= checks+2 })
	w.await("what recovers by itself", limit, func(_ string, n int) bool { return w.needsReset[n] })
	if w.ctx.Err() == nil {
		w.resetGPUs()
	}
	w.await("everything", limit, func(string, int) bool { return false })
	w.checkCounts()
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
		if inNomad && inKubelet && (a.Healthy && b.Healthy || a.Healthy == b.Healthy && excused(id, n)) {
			continue
		}
		u, _ := w.monitor.Current().Unit(inventory.UnitID(id))
		lines = append(lines, fmt.Sprintf("GPU %d (%s): Nomad has it %v, healthy %v; kubelet %v, %v; %s", n, id, inNomad, a.Healthy, inKubelet, b.Healthy, u.Health))
	}
	for _, view := range []map[string]rig.View{nomad, kubelet} {
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
		for range operatorOnly {
			if !w.until(recovery, func() bool { return w.cause(gpu) == "" || slices.Contains(operatorOnly, w.cause(gpu)) }) && w.ctx.Err() == nil {
				w.fail("GPU %d was reset, and still is %s", n, w.cause(gpu))
			}
			if cause := w.cause(gpu); cause != "" {
				w.clear(n, gpu, cause)
			}
		}
	}
}

// needsService is the cause of a GPU that an operator must check.
const needsService = "NEEDS_SERVICE"

// operatorOnly are the causes that only an operator clears.
var operatorOnly = []string{needsService, "ROW_REMAP_FAILED"}

// cause is why a GPU is not offered; "" if it is.
func (w *oneAgent) cause(id gpu.DeviceID) string {
	if h := w.monitor.State().Ledger.Health(gpu.WholeGPU(id)); !h.Schedulable() {
		return h.Cause()
	}
	return ""
}

// clear is an operator's command that a fault of a GPU is over. Only a GPU that had the same XID again after a reset may need service.
func (w *oneAgent) clear(n int, gpu gpu.DeviceID, cause string) {
	again := false
	for xid, times := range w.xids {
		again = again || xid.slot == n && times > 1
	}
	if !again && cause == needsService {
		w.fail("GPU %d needs service, and had no XID twice", n)
	}
	if _, err := w.monitor.Clear(w.ctx, health.Command{GPU: gpu, Cause: cause}); err != nil && w.ctx.Err() == nil {
		w.fail("GPU %d: clear: %w", n, err)
	}
}

// checkCounts fails the test if the agent has counted an XID more often than it was raised: an event can be in two event sets. An XID that was
// raised while no process waits for events is not counted.
func (w *oneAgent) checkCounts() {
	ledger := w.monitor.State().Ledger
	for _, d := range w.monitor.State().Snapshot.Devices {
		history, _ := ledger.History(d.At.GPU)
		for _, c := range history.FaultCounts {
			if sent := w.sent[sentXID{d.At.GPU, c.Code}]; c.Reason == health.ReasonXID && c.Count > sent {
				w.fail("%s: XID %d was counted %d times, and raised %d times", d.At.GPU, c.Code, c.Count, sent)
			}
		}
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
		if _, err := w.kubelet.allocate(w.ctx, view[id].Name, id); err != nil {
			w.fail("without faults: Allocate(%s): %w", id, err)
		}
	}
}
