package storm

import (
	"strings"
	"sync"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// checkEvery is the interval at which the views of both orchestrators are checked, also without a message: a missing one is wrong, too.
const checkEvery = 25 * time.Millisecond

// stopGap is from when on a goroutine that is late, or a file that is written slowly, means that this process did not run.
const stopGap = 300 * time.Millisecond

// unit is a unit as an orchestrator sees it.
type unit struct {
	healthy bool
	of      string // resource or group
}

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
		if u.healthy || w.kubelet.undisturbed(now) { // when a stream ends a kubelet marks all devices unhealthy
			w.check("the kubelet has", id, u.healthy, now)
		}
	}
	for id, u := range nomad {
		w.check("Nomad has", id, u.healthy, now)
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
func (v *views) compare(w *oneAgent, nomad, kubelet map[string]unit, now time.Time) {
	if v.differ == nil || !w.kubelet.undisturbed(now) {
		v.differ = map[string]time.Time{}
	}
	for _, units := range []map[string]unit{nomad, kubelet} {
		for id := range units {
			if _, ok := v.differ[id]; !ok {
				v.differ[id] = now
			}
		}
	}
	for id, since := range v.differ {
		n, inNomad := nomad[id]
		k, inKubelet := kubelet[id]
		if inNomad == inKubelet && n.healthy == k.healthy {
			delete(v.differ, id)
		} else if now.Sub(since) > w.expected.bound {
			w.fail("%s: Nomad has it %v and healthy %v, the kubelet %v and %v, for %v", id, inNomad, n.healthy, inKubelet, k.healthy, now.Sub(since))
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
func (w *oneAgent) checkShares(who string, view map[string]unit, now time.Time) {
	healthy := map[string]bool{}
	for id, u := range view {
		device, _, shared := strings.Cut(id, "::")
		if w.expected.inTransition(id, now) {
			continue
		}
		if other, ok := healthy[device]; shared && ok && other != u.healthy {
			w.fail("%s: shares of %s differ", who, device)
		}
		healthy[device] = u.healthy
	}
}

// inTransition reports whether a unit no longer exists, though it may be listed for a while, or exists again only since a moment ago.
func (t *expectedState) inTransition(id string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	returned, again := t.returned[id]
	return !t.gone[id].IsZero() || again && now.Sub(returned) <= t.bound
}
