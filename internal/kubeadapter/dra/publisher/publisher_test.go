package publisher_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// Nothing is published before devices are known; the same devices again are no write, also after a restart: case 26.
func TestSameDevicesAreNoWrite(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.after(time.Minute)
		a.wantWrites()
		a.wantProblem("not known yet")
		devices := gpus(8)
		devices[3] = tainted(devices[3], kubeapi.NoSchedule)
		devices[3].Taints[0].TimeAdded = faultTime.Add(300 * time.Millisecond) // stored in whole seconds
		devices[4].Capacity = map[string]kubeapi.DeviceCapacity{"memory": {Value: "81920Mi"}}
		a.set(devices...)
		a.wantWrites("create 0")
		other := gpus(8)
		other[3] = tainted(other[3], kubeapi.NoSchedule)
		a.set(other...) // equal: 80Gi is 81920Mi
		a.after(20 * time.Minute)
		a.restart()
		a.after(20 * time.Minute)
		a.wantWrites()
		a.wantProblem()
		if s := a.Published(); !s.LastWrite.IsZero() {
			t.Errorf("a process that wrote nothing has a last write: %+v", s)
		}
		if s := a.Published(); s.Slices != 1 || s.Devices != 8 || s.Generation != 1 || !s.Reachable || s.Since.IsZero() || s.LastSuccess.IsZero() {
			t.Errorf("status %+v", s)
		}
	})
}

// A taint without a time keeps the time of its first write, also over a restart.
func TestTimeOfTaintStays(t *testing.T) {
	inBubble(t, func(a *agent) {
		sick := tainted(gpu(0), kubeapi.NoSchedule)
		sick.Taints[0].TimeAdded = time.Time{}
		a.set(sick, gpu(1))
		first := a.published()[0].Taints[0].TimeAdded
		a.after(time.Hour)
		a.set(sick, tainted(gpu(1), kubeapi.NoEffect))
		a.restart()
		a.after(time.Minute)
		a.set(sick)
		if got := a.published()[0].Taints[0].TimeAdded; first.IsZero() || !got.Equal(first) {
			t.Errorf("time %v, first %v", got, first)
		}
	})
}

// The kubelet deletes all slices of the node when it starts. They are back at once, with the times of their taints: case 29.
func TestWipe(t *testing.T) {
	inBubble(t, func(a *agent) {
		devices := gpus(200)
		devices[150] = tainted(devices[150], kubeapi.NoSchedule)
		a.set(devices...)
		a.want(devices...)
		for range 20 {
			if n := a.api.Wipe(node, ""); n != 4 {
				t.Fatalf("%d slices deleted", n)
			}
			a.after(time.Millisecond)
			a.want(devices...)
			a.after(time.Minute)
		}
		if g := a.Published().Generation; g != 1 {
			t.Errorf("generation %d: nothing has changed", g)
		}
		a.api.ForgetRequests()
		a.api.DeleteSlice("n1-gpu.nvidia.com-2")
		a.after(time.Millisecond)
		a.wantWrites("create 2")
	})
}

// A server that takes 20 ms for each create, as with etcd on a disk, has the 25 slices of the largest node again in a part of the time of one
// after the other; and those of a node whose kubelet starts a hundred times in a row each time at once.
func TestWipeOfASlowServer(t *testing.T) {
	for _, c := range []struct {
		devices, wipes int
		within         time.Duration
	}{{1600, 4, 160 * time.Millisecond}, {8, 100, 30 * time.Millisecond}} {
		inBubble(t, func(a *agent) {
			a.set(gpus(c.devices)...)
			a.after(time.Hour)
			a.api.Delay("create", 20*time.Millisecond)
			count := a.api.Len()
			var longest time.Duration
			for range c.wipes {
				began := time.Now()
				a.api.Wipe(node, "")
				for a.api.Len() < count {
					a.after(time.Millisecond)
				}
				longest = max(longest, time.Since(began))
				a.after(200 * time.Millisecond)
			}
			t.Logf("%d slices, deleted %d times: back after %v at most", count, c.wipes, longest)
			if longest > c.within {
				t.Errorf("%d slices, deleted %d times: back after %v, want %v", count, c.wipes, longest, c.within)
			}
		})
	}
}

// A change that moves devices between slices, or their number, gets a new generation in all slices; another one only changes slices that
// differ.
func TestGenerations(t *testing.T) {
	inBubble(t, func(a *agent) {
		devices := gpus(130)
		a.set(devices...)
		a.wantWrites("create 0", "create 1", "create 2")
		sick := gpus(130)
		sick[1], sick[129] = tainted(sick[1], kubeapi.NoEffect), tainted(sick[129], kubeapi.NoSchedule)
		a.set(sick...)
		a.wantWrites("update 2", "update 0") // what keeps pods away is first
		a.want(sick...)
		if g := a.Published().Generation; g != 1 {
			t.Errorf("generation %d for taints", g)
		}
		a.set(devices[1:]...)
		a.wantWrites("update 0", "update 1", "update 2")
		a.want(devices[1:]...)
		a.set(devices[1:100]...)
		a.wantWrites("update 0", "update 1", "delete 2")
		a.want(devices[1:100]...)
		a.set(devices...)
		a.wantWrites("update 0", "update 1", "create 2")
		a.want(devices...)
		a.set(devices[0])
		a.wantWrites("update 0", "delete 1", "delete 2")
		a.want(devices[0])
		if g := a.Published().Generation; g != 5 {
			t.Errorf("generation %d", g)
		}
	})
}

// Changes are collected for 200 ms, but a taint that keeps pods away is written at once.
func TestTaintsAreWrittenAtOnce(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpu(0))
		a.api.ForgetRequests()
		a.devices.Store([]kubeapi.Device{tainted(gpu(0), kubeapi.NoSchedule)})
		a.after(time.Millisecond)
		a.wantWrites("update 0")
		a.devices.Store([]kubeapi.Device{gpu(0)})
		a.after(199 * time.Millisecond)
		a.wantWrites()
		a.devices.Store([]kubeapi.Device{gpu(0), gpu(1)})
		a.after(2 * time.Millisecond)
		a.wantWrites("update 0")
		a.want(gpu(0), gpu(1))
		if since := time.Since(a.Published().LastWrite); since > 10*time.Millisecond {
			t.Errorf("last write %v ago", since)
		}
	})
}

// A taint that flaps 20 times a second for ten minutes is a bounded number of writes; at the end the API has the last state.
func TestFlappingTaint(t *testing.T) {
	for effect, most := range map[kubeapi.TaintEffect]int{kubeapi.NoSchedule: 260, kubeapi.NoEffect: 130} {
		inBubble(t, func(a *agent) {
			a.set(gpu(0))
			a.api.ForgetRequests()
			for i := range 10 * 60 * 20 {
				if i%2 == 0 {
					sick := tainted(gpu(0), effect)
					sick.Taints[0].TimeAdded = faultTime.Add(time.Duration(i) * time.Second)
					a.devices.Store([]kubeapi.Device{sick})
				} else {
					a.devices.Store([]kubeapi.Device{gpu(0)})
				}
				time.Sleep(50 * time.Millisecond)
			}
			n := len(a.api.Writes())
			t.Logf("%s: %d writes", effect, n)
			if n > most || n < 2 {
				t.Errorf("%s: %d writes, want at most %d", effect, n, most)
			}
			a.devices.Store([]kubeapi.Device{gpu(0)})
			a.after(10 * time.Second)
			a.want(gpu(0))
		})
	}
}

// What fails and when it works: case 30.
func TestFailuresOfTheServer(t *testing.T) {
	for name, c := range map[string]struct {
		fail    kubeapitest.Failure
		times   int
		writes  []string
		within  time.Duration
		problem string
	}{
		"lost answer to a create":   {kubeapitest.Failure{Applied: true}, 1, []string{"create 0"}, 3 * time.Second, ""},
		"cut before it was created": {kubeapitest.Failure{}, 1, []string{"create 0", "create 0"}, 3 * time.Second, ""},
		"too many requests":         {kubeapitest.Failure{Code: 429, Reason: "TooManyRequests", RetryAfter: 7}, 1, []string{"create 0", "create 0"}, 7*time.Second*3/2 + time.Second, ""},
		"server error":              {kubeapitest.Failure{Code: 500, Message: "etcd is gone"}, 3, []string{"create 0", "create 0", "create 0", "create 0"}, 15 * time.Second, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(a *agent) {
				a.api.Fail("create", c.times, c.fail)
				a.devices.Store(gpus(2))
				a.after(500 * time.Millisecond)
				a.after(c.within)
				a.wantWrites(c.writes...)
				a.want(gpus(2)...)
				a.wantProblem()
			})
		})
	}
}
