package publisher_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

const taintWithin = 2 * time.Second // case 38

// A taint that keeps pods away waits for nothing but its own write: not for the Node, nor for slices of others, what can't be created, the
// list, the watch, or a request that hangs.
func TestTaintWaitsForNothingElse(t *testing.T) {
	for name, fail := range map[string]func(*agent){
		"the Node can't be read": func(a *agent) { a.api.Deny("get", "nodes") },
		"the Node's read fails":  func(a *agent) { a.api.Fail("get", -1, kubeapitest.Failure{Code: 500}) },
		"the Node's read hangs":  func(a *agent) { a.api.Delay("get", 14*time.Second) },
		"no foreign slice is deleted": func(a *agent) {
			a.api.PutSlice(foreign("left-over"))
			a.api.Fail("delete", -1, kubeapitest.Failure{Code: 503})
		},
		"a foreign delete hangs": func(a *agent) {
			a.api.PutSlice(foreign("left-over-1"))
			a.api.PutSlice(foreign("left-over-2"))
			a.api.Delay("delete", time.Minute)
		},
		"nothing can be created": func(a *agent) {
			a.api.Deny("create", "resourceslices")
			a.api.DeleteSlice("n1-gpu.nvidia.com-1")
		},
		"a create hangs": func(a *agent) {
			a.api.Delay("create", time.Minute)
			a.api.DeleteSlice("n1-gpu.nvidia.com-1")
		},
		"no list, no watch": func(a *agent) {
			a.api.Deny("list", "resourceslices")
			a.api.Deny("watch", "resourceslices")
			a.api.CutWatches()
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(a *agent) {
				a.set(gpus(100)...)
				fail(a)
				for i, after := range []time.Duration{time.Minute, 7 * time.Minute, 3 * time.Hour, time.Millisecond} {
					a.after(after)
					sick := gpus(100)
					for j := range i + 1 {
						sick[j] = tainted(sick[j], kubeapi.NoSchedule)
					}
					a.devices.Store(sick)
					a.after(taintWithin)
					for _, s := range a.api.Slices() {
						if s.Metadata.Name == "n1-gpu.nvidia.com-0" && len(s.Spec.Devices[i].Taints) != 1 {
							t.Errorf("fault %d: no taint after %v: %s", i, taintWithin, a.Published().Problem)
						}
					}
				}
			})
		})
	}
}

// The same after a restart of the agent: the slices are there, and the Node can't be read.
func TestTaintAfterARestartWithoutTheNode(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(8)...)
		a.stop()
		a.api.Deny("get", "nodes")
		a.api.Deny("create", "resourceslices")
		sick := gpus(8)
		sick[7] = tainted(sick[7], kubeapi.NoSchedule)
		a.devices.Store(sick)
		a.start()
		a.after(taintWithin)
		a.want(sick...)
	})
}

// A fault while the Node can't be read for a day, with changes that wait for nothing else: devices that leave or come are published under the
// owner that the slices have.
func TestDevicesWithoutTheNode(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(8)...)
		a.api.Deny("get", "nodes")
		a.after(24 * time.Hour)
		a.set(gpus(9)[1:]...)
		a.want(gpus(9)[1:]...)
		a.wantProblem("403", `resources: ["nodes"]`)
		a.api.Allow("get", "nodes")
		a.after(time.Minute)
		a.wantProblem()
	})
}

// A server that can't be reached is asked no more often because of a taint.
func TestTaintDuringAnOutageIsTriedWithPauses(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpu(0))
		busy := kubeapitest.Failure{Code: 429, Reason: "TooManyRequests", RetryAfter: 25}
		a.api.Fail("update", -1, busy)
		a.api.ForgetRequests()
		for i := range 600 { // a condition that comes and goes
			if i%2 == 0 {
				a.devices.Store([]kubeapi.Device{tainted(gpu(0), kubeapi.NoSchedule)})
			} else {
				a.devices.Store([]kubeapi.Device{gpu(0)})
			}
			a.after(time.Second)
		}
		if n := len(a.api.Requests()); n > 10*60/25+2*3 { // the watch and the Node, too
			t.Errorf("%d requests in ten minutes", n)
		}
	})
}
