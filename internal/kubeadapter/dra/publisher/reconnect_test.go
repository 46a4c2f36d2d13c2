package publisher_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// An API server that restarts gets from each node one watch, from where the last one was, at a random time: no list, no dry run, no Node, as long
// as there is nothing to write.
func TestRestartOfTheServerCostsAWatch(t *testing.T) {
	const nodes, step = 60, 500 * time.Millisecond
	watches := map[time.Duration]int{}
	for range nodes {
		inBubble(t, func(a *agent) {
			a.set(gpu(0))
			a.after(2 * time.Minute)
			a.api.ForgetRequests()
			a.api.SetDown(true)
			a.api.SetDown(false)
			cut := time.Now()
			a.after(time.Minute)
			for _, r := range a.api.Requests() {
				if r.Verb != "watch" {
					t.Errorf("%s %s, dry run %t", r.Verb, r.Resource, r.DryRun)
				}
				watches[r.At.Sub(cut)/step]++
			}
			if n := len(a.api.Requests()); n != 1 {
				t.Errorf("%d requests", n)
			}
			a.api.Wipe(node, "") // the watch works
			a.after(time.Second)
			a.want(gpu(0))
		})
	}
	for at, n := range watches {
		if n > nodes/3 || at*step > 10*time.Second {
			t.Errorf("%d of %d nodes came back %v after the restart", n, nodes, at*step)
		}
	}
}

// What changed while the watch was away is found when it continues.
func TestWatchContinues(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(100)...)
		a.api.CutWatches()
		a.api.DeleteSlice("n1-gpu.nvidia.com-1")
		a.after(11 * time.Second)
		a.want(gpus(100)...)
		a.api.ForgetRequests()
		a.api.CutWatches()
		a.api.ExpireWatches() // what happened is not known any more: a list
		a.api.Wipe(node, "")
		a.after(22 * time.Second)
		a.want(gpus(100)...)
	})
}

// A server that came back with other feature gates is asked which fields it drops before the next write, and within an hour, or at the comparison after it, without one.
func TestServerWithOtherGates(t *testing.T) {
	shared := gpu(0)
	shared.AllowMultipleAllocations = true
	inBubble(t, func(a *agent) {
		a.set(gpu(0))
		for range 5 {
			a.api.DropFields(true, true)
			a.api.CutWatches()
			a.after(time.Minute)
			a.api.ForgetRequests()
			a.set(shared)
			a.wantWrites() // not even for a moment
			if !a.DropsShares() || !a.Published().DropsTaints {
				t.Error("not asked before the write")
			}
			a.set(gpu(0))
			a.api.DropFields(false, false)
			a.api.CutWatches()
			a.after(66 * time.Minute)
			if a.DropsShares() || a.Published().DropsTaints {
				t.Error("not asked within an hour")
			}
		}
	})
}

// The log of a long outage has each reason once, also while several requests fail in turns.
func TestOutageIsInTheLogOnce(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(100)...)
		a.api.Fail("", -1, kubeapitest.Failure{Code: 503, Message: "etcd is gone"})
		a.api.CutWatches()
		a.api.DeleteSlice("n1-gpu.nvidia.com-1")
		a.devices.Store([]kubeapi.Device{tainted(gpu(0), kubeapi.NoSchedule)})
		a.after(24 * time.Hour)
		if n := strings.Count(a.log.String(), "etcd is gone"); n > 4 {
			t.Errorf("%d lines:\n%s", n, a.log.String())
		}
	})
}

// The first failure after an outage is followed by a short wait, also if the watch went on all the time.
func TestShortWaitAfterASuccess(t *testing.T) {
	busy := kubeapitest.Failure{Code: 503, Message: "etcd is gone"}
	inBubble(t, func(a *agent) {
		devices := gpus(130)
		a.set(devices...)
		for range 20 {
			a.api.Fail("update", -1, busy)
			devices = append([]kubeapi.Device{}, devices...)
			for _, i := range []int{0, 70, 129} {
				devices[i] = toggled(devices[i])
			}
			a.set(devices...)
			a.after(10 * time.Minute)
			a.api.Resume()
			a.api.Delay("update", 100*time.Millisecond)
			var written atomic.Bool
			a.api.OnChange(func([]kubeapi.ResourceSlice) { written.Store(true) })
			for !written.Load() {
				a.after(10 * time.Millisecond)
			}
			a.api.Fail("update", 1, busy) // after the first success
			failed := time.Now()
			a.after(3 * time.Second)
			if a.Published().Problem != "" {
				t.Errorf("%v after one failure: %s", time.Since(failed), a.Published().Problem)
				a.after(time.Minute)
			}
			a.after(time.Minute) // the limit of changes
		}
	})
}

// toggled returns a device with another attribute.
func toggled(d kubeapi.Device) kubeapi.Device {
	model := "A"
	if p := d.Attributes["productName"].String; p != nil && *p == model {
		model = "B"
	}
	d.Attributes = map[string]kubeapi.DeviceAttribute{"productName": {String: &model}}
	return d
}
