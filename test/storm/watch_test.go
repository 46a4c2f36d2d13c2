package storm

import (
	"sync"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// lookEvery is how often what both orchestrators have is looked at, also when nobody has told them anything: that
// they were not told is as wrong.
const lookEvery = 25 * time.Millisecond

// stall is from when on a goroutine that is late, or a file that is written slowly, means that the machine under the
// test stands still.
const stall = 300 * time.Millisecond

// watch judges what both orchestrators have until the storm ends.
func (w *storm) watch() {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for last := time.Now(); ; last = time.Now() {
		select {
		case <-tick.C:
			if gap := time.Since(last); gap > stall {
				w.stood.Add(int64(gap))
				w.truth.stall(gap)
				w.eyes.forget()
			}
			w.eyes.look(w)
		case <-w.ctx.Done():
			return
		}
	}
}

// eyes are what is seen of both orchestrators.
type eyes struct {
	mu      sync.Mutex
	differs map[string]time.Time // units on which the two disagree, since when
}

func (e *eyes) look(w *storm) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	for _, d := range w.kubelet.news() {
		w.judge("the kubelet is told", d.GetID(), d.GetHealth() == v1beta1.Healthy, now)
	}
	fromNomad, fromKubelet := w.nomad.view(), w.kubelet.view()
	for id, u := range fromKubelet {
		if u.healthy || w.kubelet.steady(now) { // a stream that ends makes a kubelet think the worst
			w.judge("the kubelet has", id, u.healthy, now)
		}
	}
	for id, u := range fromNomad {
		w.judge("Nomad has", id, u.healthy, now)
	}
	w.whole("Nomad", fromNomad, now)
	w.whole("the kubelet", fromKubelet, now)
	e.compare(w, fromNomad, fromKubelet, now)
}

// forget begins anew to look for differences.
func (e *eyes) forget() {
	e.mu.Lock()
	defer e.mu.Unlock()
	clear(e.differs)
}

// compare holds the two against each other. They may disagree for a while, and while the kubelet has none.
func (e *eyes) compare(w *storm, nomad, kubelet map[string]unit, now time.Time) {
	if e.differs == nil || !w.kubelet.steady(now) {
		e.differs = map[string]time.Time{}
	}
	differ := func(id string) {
		n, inNomad := nomad[id]
		k, inKubelet := kubelet[id]
		switch since := e.differs[id]; {
		case inNomad == inKubelet && n.healthy == k.healthy:
			delete(e.differs, id)
		case since.IsZero():
			e.differs[id] = now
		case now.Sub(since) > w.truth.bound:
			w.wrong("%s: Nomad has it %v and healthy %v, the kubelet %v and %v, for %v", id, inNomad, n.healthy, inKubelet, k.healthy, now.Sub(since))
		}
	}
	for id := range nomad {
		differ(id)
	}
	for id := range kubelet {
		differ(id)
	}
	for id := range e.differs {
		differ(id)
	}
}

// judge ends the storm if an orchestrator has what it must not have.
func (w *storm) judge(who, id string, healthy bool, at time.Time) {
	if err := w.truth.judge(id, healthy, at); err != nil {
		w.wrong("%s: %w", who, err)
	}
}

// reunion is how long a kubelet may be without its plugins after it was disturbed: one that registers and
// never opens the stream is waited for for ten.
const reunion = 20 * time.Second

// steady reports whether the kubelet has been left in peace for so long that it must have its plugins.
func (k *kubelet) steady(now time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.running != nil && now.Sub(k.since) > k.w.o.patient(reunion)
}
