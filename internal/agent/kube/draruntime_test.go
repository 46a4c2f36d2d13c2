package kube

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/check"
)

const runtimeNode = "n1"

// runtimeRig is what publishes the devices of a driver for a node whose container runtime the test sets, in a bubble.
type runtimeRig struct {
	*testing.T
	api     *kubeapitest.Server
	desired *watch.Value[[]kubeapi.Device]
	evicted *watch.Value[map[gpu.DeviceID]bool]
	runtime atomic.Pointer[cdi.Runtime] // nil = it can't be asked
	stop    func()
}

func withRuntime(t *testing.T, test func(*runtimeRig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		devices := []kubeapi.Device{{Name: "gpu-a"}, {Name: "gpu-b", Taints: []kubeapi.DeviceTaint{
			{Key: "gpu.nvidia.com/xid", Value: "79", Effect: kubeapi.NoSchedule, TimeAdded: time.Now().UTC().Truncate(time.Second)},
		}}}
		r := &runtimeRig{T: t, api: kubeapitest.NewInMemory(), desired: watch.NewValue(devices), evicted: watch.NewValue(map[gpu.DeviceID]bool{})}
		r.node("containerd://2.4.2")
		r.start()
		defer r.api.Close()
		defer func() { r.stop() }()
		test(r)
	})
}

// node sets the container runtime that the Node has.
func (r *runtimeRig) node(runtime string) {
	n := kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: runtimeNode}}
	n.Status.NodeInfo.ContainerRuntimeVersion = runtime
	r.api.PutNode(n)
}

// start starts what a process has of it.
func (r *runtimeRig) start() {
	r.Helper()
	client, err := kubeapi.New(kubeapi.Options{Address: r.api.URL, Dial: r.api.Dial})
	check.NoError(r, err)
	d := &draDriver{
		desired: r.desired, devices: watch.NewValue[[]kubeapi.Device](nil), known: watch.NewValue(false), refused: watch.NewValue(""),
		folder: cdi.DefaultFolder, log: slog.New(slog.DiscardHandler), evicted: r.evicted,
	}
	d.runtime = func(context.Context) cdi.Runtime {
		if now := r.runtime.Load(); now != nil {
			return *now
		}
		return cdi.Runtime{}
	}
	d.publisher = publisher.New(publisher.Options{API: client, Node: runtimeNode, Driver: resourceslice.Driver, Devices: d.devices})
	ctx, cancel := context.WithCancel(r.Context())
	ended := make(chan error, 3)
	for _, task := range []func(context.Context) error{d.publisher.Run, d.followNode, d.publish} {
		go func() { ended <- task(ctx) }()
	}
	r.stop = func() {
		cancel()
		for range 3 {
			if err := <-ended; err != nil {
				r.Error(err)
			}
		}
		client.CloseIdleConnections()
	}
	r.after(time.Second)
}

func (r *runtimeRig) after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// want checks the taints of the two devices in the API: "withdrawn=... | xid=79"; "none" if there is no slice.
func (r *runtimeRig) want(when, want string) {
	r.Helper()
	got := "none"
	if all := r.api.Slices(); len(all) > 0 {
		var texts []string
		for _, d := range all[0].Spec.Devices {
			var taints []string
			for _, t := range d.Taints {
				taints = append(taints, strings.TrimPrefix(t.Key, "gpu.nvidia.com/")+"="+t.Value+":"+string(t.Effect))
			}
			texts = append(texts, strings.Join(taints, ","))
		}
		got = strings.Join(texts, " | ")
	}
	if got != want {
		r.Errorf("%s: %s\nwant %s", when, got, want)
	}
}

const (
	usual     = " | xid=79:NoSchedule"
	offValue  = "withdrawn=containerd-2.4.2-has-CDI-switched-off:NoSchedule"
	withdrawn = offValue + " | " + offValue + ",xid=79:NoSchedule"
)

// The pods of a broken GPU stay until its eviction is decided, and when that is over.
func TestEvictionIsPublished(t *testing.T) {
	withRuntime(t, func(r *runtimeRig) {
		id := "GPU-b"
		devices := r.desired.Load()
		broken := []kubeapi.Device{devices[0], devices[1]}
		broken[1].Attributes = map[string]kubeapi.DeviceAttribute{"uuid": {String: &id}}
		broken[1].Taints = []kubeapi.DeviceTaint{{Key: "gpu.nvidia.com/xid", Value: "79", Effect: kubeapi.NoExecute, TimeAdded: devices[1].Taints[0].TimeAdded}}
		r.desired.Store(broken)
		r.after(time.Minute)
		r.want("before the decision", usual)
		r.evicted.Store(map[gpu.DeviceID]bool{"GPU-b": true})
		r.after(10 * time.Millisecond)
		r.want("after it", " | xid=79:NoExecute")
		r.evicted.Store(map[gpu.DeviceID]bool{})
		r.after(time.Minute)
		r.want("when it is over", usual)
	})
}

// A runtime that can't give devices to containers any more is a taint at each device, with the reason. The devices stay, also when the
// kubelet deletes the slices and over a restart of the agent. The taint ends seconds after the runtime has CDI again. While the runtime
// does not answer, nothing changes.
func TestRuntimeLosesCDI(t *testing.T) {
	on, off := &cdi.Runtime{Name: "containerd", Version: "2.4.2", CDI: gpu.Enabled}, &cdi.Runtime{Name: "containerd", Version: "2.4.2", CDI: gpu.Disabled}
	withRuntime(t, func(r *runtimeRig) {
		r.want("at the start", usual)
		r.runtime.Store(off)
		r.after(runtimeEvery + time.Second)
		r.want("without CDI", withdrawn)
		since := r.api.Slices()[0].Spec.Devices[0].Taints[0].TimeAdded
		r.runtime.Store(nil)
		r.after(time.Minute)
		r.want("without an answer", withdrawn)
		r.api.Wipe(runtimeNode, "")
		r.after(time.Second)
		r.want("after a start of the kubelet", withdrawn)
		r.runtime.Store(off)
		r.stop()
		r.start()
		r.desired.Store(r.desired.Load()[:1])
		r.after(time.Second)
		r.want("after a restart of the agent", offValue)
		if again := r.api.Slices()[0].Spec.Devices[0].Taints[0].TimeAdded; since.IsZero() || !again.Equal(since) {
			t.Errorf("since %v, was %v", again, since)
		}
		r.runtime.Store(on)
		r.after(refusedEvery + time.Second)
		r.want("with CDI", "")
	})
}

// A node whose containers never got devices publishes none. What is known only from the Node is looked at each minute.
func TestRuntimeWithoutCDIAtTheStart(t *testing.T) {
	withRuntime(t, func(r *runtimeRig) {
		r.stop()
		r.api.Wipe(runtimeNode, "")
		r.node("containerd://1.6.20")
		r.start()
		r.after(time.Hour)
		r.want("with an old runtime", "none")
		r.node("containerd://2.4.2")
		r.after(nodeEvery + refusedEvery + time.Second)
		r.want("with a new one", usual)
		r.node("containerd://1.6.20")
		r.after(2*runtimeEvery + time.Second) // the Node is read every five minutes
		const old = "withdrawn=containerd-1.6.20-has-no-CDI:NoSchedule"
		r.want("with the old one again", old+" | "+old+",xid=79:NoSchedule")
	})
}
