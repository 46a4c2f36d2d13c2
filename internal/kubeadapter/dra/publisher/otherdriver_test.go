package publisher_test

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

func foreign(name string) kubeapi.ResourceSlice {
	return kubeapi.ResourceSlice{
		Metadata: kubeapi.ObjectMeta{Name: name},
		Spec: kubeapi.ResourceSliceSpec{Driver: resourceslice.Driver, NodeName: node, Devices: []kubeapi.Device{{Name: "gpu-0"}},
			Pool: kubeapi.ResourcePool{Name: node, Generation: 7, ResourceSliceCount: 1}},
	}
}

// What NVIDIA's driver left behind is deleted; slices of other drivers and nodes stay: case 32.
func TestLeftoverSlicesOfTheSameDriver(t *testing.T) {
	inBubble(t, func(a *agent) {
		other, far := foreign("other-driver"), foreign("other-node")
		other.Spec.Driver, far.Spec.NodeName = "dra.cpu", "n2"
		a.api.PutSlice(other)
		a.api.PutSlice(far)
		a.api.PutSlice(foreign("0123-gpu.nvidia.com-n1-abcde"))
		a.api.PutSlice(foreign("0123-gpu.nvidia.com-n1-fghij"))
		a.after(time.Second)
		a.set(gpu(0))
		a.wantWrites("create 0", "delete 0123-gpu.nvidia.com-n1-abcde", "delete 0123-gpu.nvidia.com-n1-fghij")
		if all := a.api.Slices(); len(all) != 3 || all[0].Spec.Pool.Generation != 8 {
			t.Errorf("slices %+v", all)
		}
		a.wantProblem()
	})
}

// Slices of another driver that can't be deleted are named, and keep nothing from being published: nothing shows that it is there.
func TestForeignSliceCanNotBeDeleted(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpu(0))
		a.api.Fail("delete", -1, kubeapitest.Failure{Code: 403, Message: "no right"})
		a.api.PutSlice(foreign("0123-gpu.nvidia.com-n1-abcde"))
		a.after(time.Hour)
		a.set(gpus(100)...)
		a.after(5 * time.Second)
		devices := 0
		for _, s := range a.api.Slices()[1:] {
			devices += len(s.Spec.Devices)
		}
		if devices != 100 || a.Published().Conflicts {
			t.Errorf("%d devices, contested %t: %s", devices, a.Published().Conflicts, a.Published().Problem)
		}
		a.wantProblem("no right", "0123-gpu.nvidia.com-n1-abcde")
		a.wantLog("no right", 1)
		a.api.Resume()
		a.after(time.Minute)
		a.want(gpus(100)...)
		a.wantProblem()
	})
}

// A driver that publishes its slices again and again is reported, and not fought for ever: case 32.
func TestOtherDriver(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpu(0))
		a.api.ForgetRequests()
		deletes := func() int {
			return len(slices.DeleteFunc(a.api.Writes(), func(r kubeapitest.Request) bool { return r.Verb != "delete" }))
		}
		for range 60 * 4 { // each 15 s for an hour, as with the library's 30 s
			if len(a.api.Slices()) == 1 {
				a.api.PutSlice(foreign("0123-gpu.nvidia.com-n1-abcde"))
			}
			a.after(15 * time.Second)
		}
		if n := deletes(); n < 3 || n > 9 {
			t.Errorf("%d deletes in an hour", n)
		}
		a.wantProblem("another driver gpu.nvidia.com publishes for this node")
		if s := a.Published(); !s.Conflicts || len(s.OtherSlices) != 1 || a.Ready() == nil {
			t.Errorf("status %+v", s)
		}
		a.devices.Store([]kubeapi.Device{tainted(gpu(0), kubeapi.NoSchedule)})
		a.after(time.Second)
		if own := a.api.Slices()[1]; len(own.Spec.Devices[0].Taints) != 1 {
			t.Errorf("the taint is not published: %+v", own.Spec)
		}
		a.api.DeleteSlice("0123-gpu.nvidia.com-n1-abcde") // the other driver was removed
		a.after(time.Second)
		a.want(tainted(gpu(0), kubeapi.NoSchedule))
		a.wantProblem()
	})
}

// A Node that is deleted and created again takes the slices with it; they are back with its new UID. A wrong name is a clear text: case 33.
func TestNodeIsCreatedAnew(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(100)...)
		a.api.DeleteNode(node)
		if n := a.api.CollectGarbage(); n != 2 {
			t.Fatalf("%d slices collected", n)
		}
		a.after(5 * time.Minute)
		a.wantProblem(`is "n1" the name of this node's object?`, "404")
		a.wantLog("the Node does not exist", 1)
		a.api.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: node}})
		a.after(46 * time.Second)
		a.want(gpus(100)...)
		a.api.DeleteNode(node) // and at once another one, before the collector runs
		a.api.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: node}})
		a.api.CollectGarbage()
		a.after(time.Millisecond)
		a.want(gpus(100)...)
		if a.Node().Load().Metadata.UID == "" {
			t.Error("no Node")
		}
	})
}

// A server that deletes a slice again and again is not a loop without a pause.
func TestDeletedAgainAndAgain(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpu(0))
		a.api.ForgetRequests()
		for range 600 {
			a.api.Wipe(node, "")
			a.after(100 * time.Millisecond)
		}
		if n := len(a.api.Writes()); n > 100+61 || n < 20 {
			t.Errorf("%d creates in a minute", n)
		}
		a.api.ForgetRequests()
		for range 600 {
			a.api.Wipe(node, "")
			a.after(100 * time.Millisecond)
		}
		if n := len(a.api.Writes()); n > 61 || n < 50 {
			t.Errorf("%d creates in the minute after it", n)
		}
	})
}

// The same with the slices of the largest node: in the long run each is created every five seconds.
func TestManyDeletedAgainAndAgain(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(25 * 64)...)
		for range 600 {
			a.api.Wipe(node, "")
			a.after(100 * time.Millisecond)
		}
		a.api.ForgetRequests()
		for range 600 {
			a.api.Wipe(node, "")
			a.after(100 * time.Millisecond)
		}
		if n := len(a.api.Writes()); n > 5*60+5 || n < 4*60 {
			t.Errorf("%d creates in a minute", n)
		}
		a.after(6 * time.Second)
		a.want(gpus(25 * 64)...)
	})
}

// An agent that offers GPUs by the device plugin deletes its own slices, and no others.
func TestRemove(t *testing.T) {
	inBubble(t, func(a *agent) {
		a.set(gpus(130)...)
		a.stop()
		if n := len(a.api.Slices()); n != 3 {
			t.Errorf("%d slices after the end of the publisher, want all", n)
		}
		a.api.PutSlice(foreign("n1-gpu.nvidia.com-x"))
		n, err := publisher.Remove(a.t.Context(), a.client, node, resourceslice.Driver)
		if left := a.api.Slices(); n != 3 || err != nil || len(left) != 1 {
			t.Errorf("%d deleted, %v, left %+v", n, err, left)
		}
		a.client.CloseIdleConnections()
		a.start()
	})
}
