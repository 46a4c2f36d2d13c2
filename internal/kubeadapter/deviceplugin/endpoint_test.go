package deviceplugin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/check"
)

// One resource is refused, one gets no answer, and the third is registered once with each kubelet.
func TestResourcesAreIndependent(t *testing.T) {
	const refused, hanging = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-1g.10gb.me"
	r := newRig(t)
	r.kubelet.BehaveTo(refused, kubelettest.Behaviour{Refuse: errors.New("refused")})
	r.kubelet.BehaveTo(hanging, kubelettest.Behaviour{Delay: time.Hour})
	r.startKubelet()
	r.start(migGPU())
	for i := range 3 {
		attempts := len(r.kubelet.Attempts())
		if i > 0 {
			r.restartKubelet(true)
		}
		r.awaitHealthy(kubeadapter.GPUResource, 1)
		check.Until(r, "refusals, and one that waits", func() bool {
			count := map[string]int{}
			for _, a := range r.kubelet.Attempts()[attempts:] {
				count[a.Resource]++
			}
			return count[refused] >= 3 && (count[hanging] >= 1 || i == 0)
		})
		accepted := r.kubelet.Registrations()
		if len(accepted) != i+1 || accepted[i].Resource != kubeadapter.GPUResource {
			t.Fatalf("kubelet %d: accepted %v", i, accepted)
		}
	}
	for _, s := range r.plugins.Stats() {
		if s.Connected != (s.Resource == kubeadapter.GPUResource) || s.Resource == refused && s.LastError == "" {
			t.Errorf("%+v", s)
		}
	}
	r.kubelet.Behave(kubelettest.Behaviour{})
	r.awaitHealthy(refused, 2) // the other one still waits for an answer
	if n := len(r.kubelet.Registrations()); n != 4 {
		t.Errorf("%d registrations, want one of gpu for each of three kubelets and one that was refused before", n)
	}
}

// A refused registration is finished in the kubelet. A canceled one may not be.
func TestAnswered(t *testing.T) {
	for code, want := range map[codes.Code]bool{
		codes.Unknown: true, codes.Unavailable: true, codes.DeadlineExceeded: false, codes.Canceled: false,
	} {
		if got := answered(fmt.Errorf("wrapped: %w", &registerError{"a.sock", status.New(code, "")})); got != want {
			t.Errorf("%v: %v", code, got)
		}
	}
}

// Kubelets up to 1.36 disconnect the plugin that registered last some time after a stream has ended, or a socket was removed.
// The next registration registers after that.
func TestNextRegistrationWaits(t *testing.T) {
	r := newRig(t)
	r.kubelet.Behave(kubelettest.Behaviour{OneClientPerResource: true, Lag: 50 * time.Millisecond})
	r.startKubelet()
	r.start(gpus(1), func(p *Plugins) { p.timings.restart = 500 * time.Millisecond })
	r.awaitReady()
	for i := range 2 {
		from := time.Now()
		if i == 0 {
			r.kubelet.EndStream(kubeadapter.GPUResource)
		} else {
			check.NoError(r, os.Remove(r.stats().Socket))
		}
		r.awaitRegistrations(i + 2)
		if took := time.Since(from); took < 500*time.Millisecond {
			t.Errorf("registered again after %v, before the kubelet has disconnected the previous one", took)
		}
		r.awaitHealthy(kubeadapter.GPUResource, 1)
		r.awaitReady()
	}
	if c := r.kubelet.Connected(kubeadapter.GPUResource); len(c) != 1 || len(r.kubelet.Attempts()) != 3 || len(r.sockets()) != 1 {
		t.Errorf("connected %v after %v; sockets %v", c, r.kubelet.Attempts(), r.sockets())
	}
	assertFreshSockets(t, r.kubelet)
}

// The wait before the next registration ends when another kubelet starts, whenever the previous one ended: during Register,
// immediately after it, or later.
func TestWaitEndsWithAnotherKubelet(t *testing.T) {
	r := startRig(t, migGPU(), func(p *Plugins) { p.timings.restart = time.Hour })
	check.Until(r, "three resources", func() bool { return len(r.plugins.Stats()) == 3 })
	for i := range 100 {
		registered := len(r.kubelet.Registrations())
		r.restartKubelet(i%2 == 1)
		r.awaitRegistrations(registered + i%3 + 1)
	}
	r.awaitReady()
	assertFreshSockets(t, r.kubelet)
}

// A kubelet that restarts before it opens the stream is noticed without its end.
func TestKubeletRestartsBeforeTheStreamOpens(t *testing.T) {
	r := newRig(t)
	r.kubelet.Behave(kubelettest.Behaviour{StreamDelay: time.Hour})
	r.startKubelet()
	r.start(gpus(1), func(p *Plugins) { p.timings.openStream = time.Hour })
	check.Until(r, "an answer", func() bool { return r.stats().Registrations == 1 })
	r.kubelet.Crash()
	r.kubelet.Behave(kubelettest.Behaviour{})
	r.startKubelet()
	r.awaitHealthy(kubeadapter.GPUResource, 1)
	r.awaitReady()
}

// A kubelet that starts may remove a socket immediately after its creation. Then it is not registered.
func TestSocketIsRemovedDuringListen(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	var stop atomic.Bool
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for !stop.Load() && r.ctx.Err() == nil {
			for _, name := range r.sockets() {
				_ = os.Remove(filepath.Join(r.dir, name))
			}
		}
	}()
	r.start(gpus(1), func(p *Plugins) { p.timings.retryMax = p.timings.retry })
	check.Until(r, "registrations", func() bool { return r.stats().Sockets > 20 })
	stop.Store(true)
	<-stopped
	began := time.Now()
	r.awaitReady()
	r.awaitHealthy(kubeadapter.GPUResource, 1)
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("took %v: a kubelet waited for a removed socket", took)
	}
}

func TestStatsHaveTheLastError(t *testing.T) {
	began := time.Now()
	r := newRunning(t, 1)
	s := r.stats()
	if s.LastError != "" || !s.LastErrorAt.IsZero() || !s.Connected || s.Reason != "" || s.Sockets != 1 || s.Since.Before(began) {
		t.Errorf("first registration: %+v", s)
	}
	if _, err := os.Stat(s.Socket); err != nil {
		t.Error(err)
	}
	r.kubelet.EndStream(kubeadapter.GPUResource)
	r.awaitRegistrations(2)
	r.awaitReady()
	next := r.stats()
	if next.LastError != errStreamEnded.Error() || next.LastErrorAt.Before(s.Since) || next.Since.Before(next.LastErrorAt) ||
		next.Sockets != 2 || next.Socket == s.Socket {
		t.Errorf("second registration: %+v", next)
	}
	r.kubelet.Crash()
	check.Until(r, "a reason", func() bool { return !r.stats().Connected })
	if s := r.stats(); s.Reason == "" || s.Socket != "" {
		t.Errorf("without a kubelet: %+v", s)
	}
}

// Run returns when its context ends, whatever it waits for, and leaves no socket.
func TestStopWhileWaiting(t *testing.T) {
	for name, c := range map[string]struct {
		kubelet kubelettest.Behaviour
		waits   func(ResourceStats) bool
	}{
		"for a kubelet":    {waits: func(s ResourceStats) bool { return s.Reason != "" && s.Reason != "starting" }},
		"for an answer":    {kubelettest.Behaviour{Delay: time.Hour}, func(s ResourceStats) bool { return s.Reason == "registering" }},
		"for the stream":   {kubelettest.Behaviour{NoStream: true}, func(s ResourceStats) bool { return s.Registrations == 1 }},
		"for the next try": {kubelettest.Behaviour{Refuse: errors.New("no")}, func(s ResourceStats) bool { return s.LastError != "" }},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			if r.kubelet.Behave(c.kubelet); name != "for a kubelet" {
				r.startKubelet()
			}
			r.start(gpus(1), func(p *Plugins) {
				p.timings.openStream, p.timings.retry, p.timings.retryMax = time.Hour, time.Hour, time.Hour
			})
			check.Until(r, "it waits", func() bool { return c.waits(r.stats()) })
			r.stopInTime()
		})
	}
	t.Run("for a stream that is not read", func(t *testing.T) {
		r := newRig(t)
		defer r.block()()
		r.stopInTime()
	})
}
