package dra

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
)

const restarts = 100

// restored is how long the slices of a node were incomplete after the kubelet deleted them: events are those since its start.
func restored(events []sliceEvent, devices int) (took time.Duration, ok bool) {
	var wiped time.Time
	listed := map[string]int{}
	for _, e := range events {
		if e.kind == "DELETED" {
			if wiped.IsZero() {
				wiped = e.at
			}
			clear(listed)
			continue
		}
		listed[e.slice.Name] = len(e.slice.Spec.Devices)
		sum := 0
		for count := range maps.Values(listed) {
			sum += count
		}
		if !wiped.IsZero() && sum == devices {
			return e.at.Sub(wiped), true
		}
	}
	return 0, false
}

// The kubelet deletes all slices of its node when it starts, at any time in or after the registration of drivers.
//
//	kubelet   exec ......... DELETE slices
//	kubelet   exec ... GetInfo, Notify         (the order changes from start to start)
//	agent                                  watch: DELETED, create
//
// An agent creates slices that it lost a hundred times in a row at once, later once a second.
func TestCase02And29KubeletRestarts(t *testing.T) {
	const nodes = 5
	var mu sync.Mutex
	var back, registered spread
	t.Run("nodes", func(t *testing.T) {
		for i := range nodes {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				b, r := restartKubelets(t, restarts/nodes)
				mu.Lock()
				defer mu.Unlock()
				back, registered = append(back, b...), append(registered, r...)
			})
		}
	})
	t.Logf("slices back after the wipe, %d nodes at once: %v", nodes, back)
	t.Logf("registered after the start of the kubelet: %v", registered)
	if back.quantile(0.5) > time.Second {
		t.Error("half of the times the slices were away for more than a second")
	}
}

// restartKubelets restarts the kubelet of a node, and returns how long its slices were away, and how long registrations took.
func restartKubelets(t *testing.T, count int) (back, registered spread) {
	n, _ := newReady(t, "h100x8", 8)
	gpu := deviceName(n.UUIDs()[7])
	n.Sim("xid", "7", "79")
	n.awaitTaint(gpu, true)
	added := n.taints(gpu)[0].TimeAdded
	p := n.pod("held", claim("held", result("gpu", deviceName(n.UUIDs()[0]))))
	names := n.run(p)
	for range count {
		sleep(t, rand.N(30*time.Millisecond)) // the order of events is what is tested
		n.kubelet.stop()
		_, before, _ := n.api.state()
		k := n.startKubelet()
		registered = append(registered, k.awaitRegistered(t).at.Sub(k.started))
		var took time.Duration
		n.api.await("slices after the wipe", func([]*resourceapi.ResourceSlice) (ok bool) {
			_, events, _ := n.api.state()
			took, ok = restored(events[len(before):], 8)
			return ok
		})
		back = append(back, took)
		if now := n.taints(gpu)[0].TimeAdded; !now.Equal(added) {
			t.Errorf("timeAdded %v, before %v", now, added)
		}
		if got := k.registry.succeeded(); len(got) != 1 {
			t.Errorf("%d registrations with one kubelet", len(got))
		}
	}
	n.awaitDevices(8)
	if got := n.cdi(p); !slices.Equal(got, names) {
		t.Errorf("%v, before the restarts %v", got, names)
	}
	n.Must(n.finish(p))
	if got := n.ownSockets(); len(got) != 1 {
		t.Errorf("sockets %v", got)
	}
	return back, registered
}

// Several nodes at once, so that the kubelet's second between two looks at its folder passes for all of them.
func TestCase29AgentRestarts(t *testing.T) {
	const nodes = 10
	var mu sync.Mutex
	var registered spread
	t.Run("nodes", func(t *testing.T) {
		for i := range nodes {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				n, a := newReady(t, "h100x8", 8)
				p := n.pod("held", claim("held", result("gpu", deviceName(n.UUIDs()[0]))))
				names := n.run(p)
				_, before, _ := n.api.state()
				for j := range restarts / nodes {
					n.End(a, []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM}[j%2])
					began := time.Now()
					a = n.startAgent()
					all := n.kubelet.awaitRegistrations(t, j+2)
					if len(all) != j+2 {
						t.Errorf("%d registrations after %d starts", len(all), j+2)
					}
					mu.Lock()
					registered = append(registered, all[len(all)-1].at.Sub(began))
					mu.Unlock()
				}
				n.Must(n.finish(p))
				n.run(n.pod("again", claim("again", result("gpu", deviceName(n.UUIDs()[0])))))
				n.mustResolve(names)
				_, after, _ := n.api.state()
				for _, e := range after[len(before):] {
					if e.kind == "DELETED" {
						t.Error("a slice was deleted")
					}
				}
				n.awaitDevices(8)
				if got := n.ownSockets(); len(got) != 1 {
					t.Errorf("sockets %v", got)
				}
				if len(n.api.refused) > 0 {
					t.Errorf("the API server refused %v", n.api.refused)
				}
			})
		}
	})
	if len(registered) > 0 {
		t.Logf("registered after the start of the agent, six of %d nodes at once: %v", nodes, registered)
	}
}
