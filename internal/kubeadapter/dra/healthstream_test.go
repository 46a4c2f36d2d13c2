package dra

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	"k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// faulty is an inventory of n GPUs, some of which have XID 95.
func faulty(n int, with ...int) health.Ledger {
	var obs []health.Observation
	for _, i := range with {
		obs = append(obs, health.Observation{At: gpu.WholeGPU(coretest.GPU(i)), Kind: health.XID, Code: 95})
	}
	return health.Ledger{}.Apply(health.DefaultPolicy(), time0, obs...)
}

// line is a device of a message, as "0 HEALTHY text".
func line(d *healthv1.DeviceHealth) string {
	n := strings.TrimLeft(d.GetDevice().GetDeviceName()[len("gpu-00000000-0000-4000-8000-"):], "0")
	return strings.TrimSpace(fmt.Sprintf("%s %s %s", n, d.GetHealth(), d.GetMessage()))
}

func lines(m *healthv1.NodeWatchResourcesResponse) (all []string) {
	for _, d := range m.GetDevices() {
		all = append(all, line(d))
	}
	return all
}

// The first message has all devices, later ones those that differ, and all again at an interval. Streams of both versions work at once.
func TestHealthStream(t *testing.T) {
	r := newRig(t, build(coretest.GPUs(3), faulty(3, 1), config()), func(a *Adapter) { a.limits.resend = time.Hour })
	sick := "1 UNHEALTHY unhealthy: XID 95 uncontained memory error since 2026-11-20T10:00Z"
	var streams []interface {
		Recv() (*healthv1.NodeWatchResourcesResponse, error)
	}
	for range 2 {
		s, err := healthv1.NewDRAResourceHealthClient(r.conn).NodeWatchResources(r.ctx, &healthv1.NodeWatchResourcesRequest{})
		r.must(err)
		streams = append(streams, s)
	}
	old, err := healthv1.V1Alpha1ClientWrapper{Client: v1alpha1.NewDRAResourceHealthClient(r.conn)}.NodeWatchResources(r.ctx, &healthv1.NodeWatchResourcesRequest{})
	r.must(err)
	streams = append(streams, old)
	expect := func(want ...string) {
		t.Helper()
		for i, s := range streams {
			m, err := s.Recv()
			r.must(err)
			got := lines(m)
			if len(got) != len(want) {
				t.Fatalf("stream %d: %q, want %q", i, got, want)
			}
			for j := range got {
				if !strings.HasPrefix(got[j], want[j]) {
					t.Errorf("stream %d: %q, want %q", i, got[j], want[j])
				}
			}
			for _, d := range m.GetDevices() {
				if d.GetDevice().GetPoolName() != node || d.GetHealthCheckTimeoutSeconds() != 30 || len(d.GetMessage()) > 1024 {
					t.Errorf("stream %d: %v", i, d)
				}
			}
		}
	}
	expect(" HEALTHY"[1:], sick, "2 HEALTHY")
	r.await("three streams", func() bool { return r.adapter.Stats().HealthStreams == 3 })
	r.src.Set(build(coretest.GPUs(3), faulty(3, 1, 2), config()))
	expect("2" + sick[1:])
	r.src.Set(build(coretest.GPUs(3), faulty(3), config()))
	expect("1 HEALTHY", "2 HEALTHY")
	r.src.Set(build(coretest.GPUs(2), faulty(3), config()))
	expect("2 UNKNOWN the device is no longer there")
}

// All devices are sent again at an interval, because the kubelet forgets them when the stream of another agent ends.
func TestHealthIsResent(t *testing.T) {
	r := newRig(t, build(coretest.GPUs(2), health.Ledger{}, config()), func(a *Adapter) { a.limits.resend = 10 * time.Millisecond })
	s, err := healthv1.NewDRAResourceHealthClient(r.conn).NodeWatchResources(r.ctx, &healthv1.NodeWatchResourcesRequest{})
	r.must(err)
	for range 5 {
		m, err := s.Recv()
		r.must(err)
		if len(m.GetDevices()) != 2 {
			t.Errorf("%q", lines(m))
		}
	}
	if defaultLimits.resend > 10*time.Second || defaultLimits.healthAge <= 2*defaultLimits.resend {
		t.Errorf("%+v", defaultLimits)
	}
}

// A reader that never reads delays nothing: neither the health of others, nor Prepare, nor the end of the agent.
func TestHealthOfASlowReader(t *testing.T) {
	r := newRig(t, build(coretest.GPUs(64), health.Ledger{}, config()), func(a *Adapter) { a.limits.resend = time.Millisecond })
	slow := &stalled{ctx: r.ctx, sent: make(chan struct{}), release: make(chan struct{})}
	ended := make(chan error, 1)
	go func() { ended <- (&healthServer{Adapter: r.adapter}).NodeWatchResources(nil, slow) }()
	<-slow.sent
	s, err := healthv1.NewDRAResourceHealthClient(r.conn).NodeWatchResources(r.ctx, &healthv1.NodeWatchResourcesRequest{})
	r.must(err)
	r.src.Set(build(coretest.GPUs(64), faulty(64, 3), config()))
	for sick := false; !sick; {
		m, err := s.Recv()
		r.must(err)
		sick = slices.ContainsFunc(lines(m), func(l string) bool { return strings.HasPrefix(l, "3 UNHEALTHY") })
	}
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	r.mustPrepare("a")
	r.stop()
	close(slow.release)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// stalled is a stream whose first message is not sent until release is closed.
type stalled struct {
	grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]
	ctx           context.Context
	once          sync.Once
	sent, release chan struct{}
}

func (s *stalled) Context() context.Context { return s.ctx }

func (s *stalled) Send(*healthv1.NodeWatchResourcesResponse) error {
	s.once.Do(func() { close(s.sent) })
	<-s.release
	return nil
}
