package publisher_test

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// RBAC that lacks a rule is named once in the log and tried each minute: case 37.
func TestMissingRuleIsNamed(t *testing.T) {
	for verb, resource := range map[string]string{"create": "resourceslices", "list": "resourceslices", "get": "nodes"} {
		inBubble(t, func(a *agent) {
			a.stop()
			a.api.Deny(verb, resource)
			a.start()
			a.set(gpu(0))
			a.after(3 * time.Minute)
			group := map[string]string{"nodes": `""`, "resourceslices": `"resource.k8s.io"`}[resource]
			a.wantProblem("403", `{apiGroups: [`+group+`], resources: ["`+resource+`"], verbs: ["`+verb+`"]}`)
			a.wantLog("resource slices not published", 1)
			if n := len(a.api.Requests()); n > 20 {
				t.Errorf("%s: %d requests in three minutes", verb, n)
			}
			if err := a.Ready(); err == nil {
				t.Error("ready")
			}
			a.api.Allow(verb, resource)
			a.after(time.Minute + time.Second)
			a.want(gpu(0))
			a.wantProblem()
			if err := a.Ready(); err != nil {
				t.Error(err)
			}
		})
	}
}

// Another client changes or deletes slices: the own state is restored without a second slice: case 30, 409.
func TestConflicts(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(2)...)
		a.api.SilenceWatches() // the publisher does not see what happens
		a.after(time.Second)
		changed := a.api.Slices()[0]
		changed.Metadata.Labels = map[string]string{"team": "x"}
		changed.Metadata.Finalizers = []string{"example.com/keep"}
		changed.Spec.Devices = changed.Spec.Devices[:1]
		a.api.PutSlice(changed)
		a.api.ForgetRequests()
		a.set(gpus(3)...)
		a.wantWrites("update 0", "update 0")
		a.want(gpus(3)...)
		if m := a.api.Slices()[0].Metadata; m.Labels["team"] != "x" || len(m.Finalizers) != 1 {
			t.Errorf("labels and finalizers of others are gone: %+v", m)
		}
		a.api.Wipe(node, "")
		a.api.ForgetRequests()
		a.set(gpus(4)...)
		a.wantWrites("update 0", "create 0")
		a.want(gpus(4)...)
	})
	inBubble(t, func(a *agent) { // fields that this agent does not have
		a.set(gpu(0))
		a.api.PutRaw("n1-gpu.nvidia.com-0", []byte(`{"metadata":{},"spec":{"driver":"gpu.nvidia.com","nodeName":"n1",
			"pool":{"name":"n1","generation":1,"resourceSliceCount":1},"sharedCounters":[{"name":"x"}]}}`))
		a.after(time.Second)
		a.want(gpu(0))
		if u := a.api.Slices()[0].Spec.Unknown; u != "" {
			t.Errorf("%s is still there", u)
		}
	})
}

// The watch that is cut, ends, gets too old or is dead without a sign: changes are found again. Case 30.
func TestWatchFailures(t *testing.T) {
	for name, c := range map[string]struct {
		fail   func(*kubeapitest.Server)
		within time.Duration
	}{
		"cut":     {(*kubeapitest.Server).CutWatches, 11 * time.Second},
		"ended":   {(*kubeapitest.Server).EndWatches, 3 * time.Second},
		"expired": {(*kubeapitest.Server).ExpireWatches, 11 * time.Second},
		"silent":  {(*kubeapitest.Server).SilenceWatches, 7 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(a *agent) {
				a.set(gpu(0))
				a.after(time.Minute)
				c.fail(a.api)
				a.api.Wipe(node, "")
				if name == "silent" {
					a.after(time.Minute)
					if len(a.api.Slices()) != 0 {
						t.Fatal("the watch was not silent")
					}
					time.AfterFunc(6*time.Minute, a.api.Resume)
				}
				a.after(c.within)
				a.want(gpu(0))
				if n := a.api.OpenWatches(); n != 1 && name != "silent" {
					t.Errorf("%d watches", n)
				}
			})
		})
	}
}

// A hundred breaks of the connection leave one watch, and neither connections nor goroutines behind: case 53.
func TestReconnects(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpu(0))
		before := runtime.NumGoroutine()
		for i := range 100 {
			[]func(){a.api.CutWatches, a.api.EndWatches, a.api.ExpireWatches, func() { a.api.SetDown(true); a.api.SetDown(false) }}[i%4]()
			a.after(time.Minute)
		}
		a.api.Wipe(node, "")
		a.after(time.Minute)
		a.want(gpu(0))
		if w, c, g := a.api.OpenWatches(), a.api.Connections(), runtime.NumGoroutine(); w != 1 || c > 3 || g > before+8 { // a connection has four
			t.Errorf("%d watches, %d connections, %d goroutines, before %d", w, c, g, before)
		}
	})
}

// The API server is away for ten minutes while a fault happens. When it is back, the taint is there within seconds, with the time of the
// fault, and the agent was ready all the time: case 39.
func TestOutage(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(8)...)
		a.api.SetDown(true)
		a.after(time.Minute)
		sick := gpus(8)
		sick[2] = tainted(sick[2], kubeapi.NoSchedule)
		a.set(sick...)
		a.after(9 * time.Minute)
		s := a.Published()
		if s.Reachable || time.Since(s.UnreachableSince) < 9*time.Minute || !strings.Contains(s.LastError, "connection refused") {
			t.Errorf("status %+v", s)
		}
		if err := a.Ready(); err != nil {
			t.Errorf("not ready without the API server: %v", err)
		}
		a.wantProblem("connection refused")
		a.api.ForgetRequests()
		a.api.SetDown(false)
		a.after(5100 * time.Millisecond) // the longest wait between tries
		a.want(sick...)
		a.wantProblem()
		if s := a.Published(); !s.Reachable || !s.UnreachableSince.IsZero() {
			t.Errorf("status %+v", s)
		}
	})
}

// A server without consumable capacity: shares have to be devices. One without taints: a warning. Neither is asked by a real write, and
// each is in the log once: case 31.
func TestDroppedFields(t *testing.T) {
	shared := gpu(0)
	shared.AllowMultipleAllocations = true
	shared.Capacity = map[string]kubeapi.DeviceCapacity{"shares": {Value: "4", RequestPolicy: &kubeapi.CapacityRequestPolicy{Default: "1"}}}
	inBubble(t, func(a *agent) {
		a.stop()
		a.api.DropFields(true, true)
		a.start()
		a.set(shared)
		a.wantWrites()
		a.wantProblem("each share as a device of its own")
		if s := a.Published(); !a.DropsShares() || !s.DropsShares || !s.DropsTaints {
			t.Errorf("status %+v", s)
		}
		a.set(tainted(gpu(0), kubeapi.NoSchedule), gpu(1))
		a.wantWrites("create 0")
		a.want(gpu(1))
		a.after(20 * time.Minute)
		a.wantWrites()
		a.wantProblem()
		a.wantLog("DRADeviceTaints", 1)
		a.wantLog("DRAConsumableCapacity", 1)
	})
	inBubble(t, func(a *agent) { // dropped later, without a break of the watch
		a.set(gpu(0))
		a.api.DropFields(true, true)
		a.set(shared)
		if !a.DropsShares() {
			t.Error("not seen in the answer to a write")
		}
	})
}
