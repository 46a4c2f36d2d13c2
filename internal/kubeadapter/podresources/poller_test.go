package podresources_test

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/test/check"
)

func newPoller(t *testing.T, change func(*podresources.Options)) (*podresources.Poller, *kubelettest.PodResources) {
	t.Helper()
	o := podresources.Options{Socket: filepath.Join(coretest.ShortDir(t), "kubelet.sock"), Log: slog.New(slog.DiscardHandler)}
	change(&o)
	p, err := kubelettest.ServePodResources(o.Socket)
	check.NoError(t, err)
	t.Cleanup(p.Close)
	fast := podresources.DefaultTimings
	fast.MinInterval, fast.MaxInterval, fast.Active = time.Millisecond, 5*time.Millisecond, time.Nanosecond
	return podresources.NewWithTimings(o, fast), p
}

// A kubelet that does not list the pod of the agent has not received its pods from the API server, however long it has been running; and one
// that lists no pod at all has not, if the agent is in a pod. A tenant's pod of the same name, which ends, makes no answer incomplete.
func TestCompleteAnswers(t *testing.T) {
	host, err := os.Hostname()
	check.NoError(t, err)
	for name, c := range map[string]struct {
		inPod    bool
		pods     []string
		complete bool
	}{
		"its own and others":          {true, []string{"gpu/" + host, "default/a"}, true},
		"others only":                 {true, []string{"default/a"}, false},
		"none":                        {true, nil, false},
		"none, outside of pods":       {false, nil, true}, // the pod was a tenant's, with the name of the node
		"its name, another namespace": {true, []string{"other/" + host}, true},
	} {
		t.Run(name, func(t *testing.T) {
			p, api := newPoller(t, func(o *podresources.Options) { o.InPod = c.inPod })
			api.Hold("gpu/"+host, "nvidia.com/gpu")
			if r := p.Read(t.Context()); !r.Complete {
				t.Fatalf("%+v", r)
			}
			api.Forget("gpu/"+host, "kube-system/agent")
			for _, pod := range c.pods {
				api.Hold(pod, "nvidia.com/gpu")
			}
			if r := p.Read(t.Context()); r.Complete != c.complete {
				t.Errorf("complete: %t", r.Complete)
			}
		})
	}
	p, api := newPoller(t, func(*podresources.Options) {})
	api.Forget("kube-system/agent")
	if r := p.Read(t.Context()); !r.Complete {
		t.Error("an empty node, and an agent outside of pods: not complete")
	}
}

// An answer is not complete if the kubelet was replaced while it was awaited: it may be the new one's, which does not know all pods.
func TestKubeletRestartsDuringAList(t *testing.T) {
	var socket string
	p, api := newPoller(t, func(o *podresources.Options) { socket = o.Socket })
	if r := p.Read(t.Context()); !r.Complete {
		t.Fatalf("%+v", r)
	}
	api.BeforeAnswers(func() { // the socket is that of another kubelet, which has run for a while
		before := time.Now().Add(-time.Hour)
		if err := os.Chtimes(socket, before, before); err != nil {
			t.Error(err)
		}
	})
	if r := p.Read(t.Context()); r.Err != nil || r.Complete {
		t.Errorf("%+v", r)
	}
	api.BeforeAnswers(nil)
	if r := p.Read(t.Context()); !r.Complete {
		t.Errorf("the next answer: %+v", r)
	}
}

// While the kubelet does not answer it is asked again and again, also without a request: that it does must be noticed. Claims that were listed
// are not forgotten meanwhile.
func TestPollerTriesAgain(t *testing.T) {
	p, api := newPoller(t, func(*podresources.Options) {})
	api.Claim("default/a", "train", "gpu.nvidia.com", "gpu-1")
	go p.Run(t.Context(), func() bool { return false }, nil)
	await := func(what string, ok func(podresources.Reading) bool) {
		t.Helper()
		check.Until(t, what, func() bool { return ok(p.Latest()) })
	}
	p.Request()
	await("an answer", func(r podresources.Reading) bool { return r.Complete })
	api.Fail(errors.New("too many requests"))
	p.Request()
	await("an error", func(r podresources.Reading) bool { return r.Err != nil && len(r.Claims) == 1 })
	if _, err := p.Has(t.Context(), []string{"default/a"}); err == nil {
		t.Error("a pod is asked for, although the kubelet did not answer last")
	}
	api.Fail(nil)
	await("an answer again", func(r podresources.Reading) bool { return r.Complete })
	lists := api.Lists()
	time.Sleep(50 * time.Millisecond)
	if n := api.Lists() - lists; n > 1 {
		t.Errorf("%d lists without a reason", n)
	}
}

// Get shows what pods have now. A pod that is not there any more has nothing.
func TestHas(t *testing.T) {
	p, api := newPoller(t, func(*podresources.Options) {})
	api.Hold("default/a", "nvidia.com/gpu", "GPU-1", "GPU-2")
	has, err := p.Has(t.Context(), []string{"default/a", "default/gone"})
	if err != nil || len(has) != 2 || has[podresources.Key{Resource: "nvidia.com/gpu", ID: "GPU-2"}] != "default/a" {
		t.Errorf("%v, %v", has, err)
	}
	if api.Lists() > 0 {
		t.Error("pods were listed")
	}
}

// The log has each change of whether the kubelet answers once.
func TestPollerLogsChanges(t *testing.T) {
	var log strings.Builder
	p, api := newPoller(t, func(o *podresources.Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	for _, err := range []error{nil, nil, errors.New("no"), errors.New("no"), nil} {
		api.Fail(err)
		p.Read(t.Context())
	}
	var unavailable []bool
	for line := range strings.Lines(log.String()) {
		unavailable = append(unavailable, strings.Contains(line, "API unavailable"))
	}
	if want := []bool{false, true, false}; !slices.Equal(unavailable, want) {
		t.Errorf("%v, want %v:\n%s", unavailable, want, &log)
	}
}

// Within a call of the kubelet pods are listed only if it is the only one: the kubelet may have marked devices for another one.
func TestReadWithinACall(t *testing.T) {
	p, api := newPoller(t, func(*podresources.Options) {})
	preferred, allocate := p.BeginCall(t.Context()), p.BeginCall(t.Context())
	if preferred.Read(t.Context()); api.Lists() != 0 {
		t.Error("pods were listed during another call")
	}
	allocate.End()
	if r := preferred.Read(t.Context()); api.Lists() != 1 || !r.Complete {
		t.Errorf("%d lists, %+v", api.Lists(), r)
	}
	preferred.End()
}
