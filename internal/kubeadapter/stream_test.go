package kubeadapter

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// stream is a ListAndWatch stream in a synctest bubble.
type stream struct {
	grpc.ServerStream // nil: other methods panic
	ctx               context.Context
	opened            time.Time
	lists             []sent
}

// sent is a response: when it was sent, and its number of healthy devices.
type sent struct {
	at      time.Duration
	healthy int
}

func (s *stream) Context() context.Context { return s.ctx }

func (s *stream) Send(r *v1beta1.ListAndWatchResponse) error {
	l := sent{at: time.Since(s.opened)}
	for _, d := range r.GetDevices() {
		if d.GetHealth() == v1beta1.Healthy {
			l.healthy++
		}
	}
	s.lists = append(s.lists, l)
	return nil
}

// lists opens a stream of eight GPUs with the default timings, runs play and returns the responses until then. play offers the GPUs,
// some of which are lost.
func lists(t *testing.T, play func(offer func(lost ...int))) (got []sent) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(GPUResource, buildInventory(coretest.GPUs(8), core.DefaultConfig()))
		offer := func(lost ...int) {
			s.tracker.setInventory(buildInventory(coretest.GPUs(8), core.DefaultConfig(), lost...))
			synctest.Wait()
		}
		ctx, cancel := context.WithCancel(t.Context())
		st := &stream{ctx: ctx, opened: time.Now()}
		done := make(chan error, 1)
		go func() { done <- s.ListAndWatch(nil, st) }()
		synctest.Wait()
		play(offer)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("ended with %v", err)
		}
		got = st.lists
	})
	return got
}

func expect(t *testing.T, got []sent, want ...sent) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("lists %v, want %v", got, want)
	}
}

// A change is sent without delay: after the stream has opened, and after a heartbeat.
func TestChangeIsSentImmediately(t *testing.T) {
	expect(t, lists(t, func(offer func(...int)) { offer(3) }), sent{0, 8}, sent{0, 7})

	got := lists(t, func(offer func(...int)) {
		time.Sleep(defaultTimings.heartbeat)
		synctest.Wait()
		offer(3)
		time.Sleep(defaultTimings.heartbeat - time.Millisecond)
		offer(3, 4)
	})
	expect(t, got, sent{0, 8}, sent{30 * time.Second, 8}, sent{30 * time.Second, 7}, sent{59999 * time.Millisecond, 6})
}

// Changes within listInterval after another one are sent at its end, in one response.
func TestChangesAreCoalesced(t *testing.T) {
	got := lists(t, func(offer func(...int)) {
		time.Sleep(5 * time.Second)
		offer(0)
		for i := range 99 {
			time.Sleep(10 * time.Millisecond)
			offer([]int{0, 1, 2, 3}[:1+(i+1)%4]...) // the last is the 99th: 4 are lost
		}
		time.Sleep(time.Second)
	})
	expect(t, got, sent{0, 8}, sent{5 * time.Second, 7}, sent{6 * time.Second, 4})
}

// A change that is reverted within listInterval is not sent.
func TestRevertedChange(t *testing.T) {
	got := lists(t, func(offer func(...int)) {
		offer(0)
		time.Sleep(100 * time.Millisecond)
		offer(0, 1)
		time.Sleep(100 * time.Millisecond)
		offer(0)
		time.Sleep(5 * time.Second)
	})
	expect(t, got, sent{0, 8}, sent{0, 7})
}

// The kubelet writes its checkpoint for each response, so there is at most one a second.
func TestRateOfResponses(t *testing.T) {
	got := lists(t, func(offer func(...int)) {
		for i := range 1000 { // 10 s
			offer([]int{0, 1}[:1+i%2]...)
			time.Sleep(10 * time.Millisecond)
		}
	})
	if n := len(got); n < 2 || n > 12 {
		t.Errorf("%d lists in 10 s", n)
	}
}

// A change that ListAndWatch can't express is not sent.
func TestReasonIsNotSent(t *testing.T) {
	c := core.DefaultConfig()
	lost := health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Lost}
	l := health.Ledger{}.Apply(c.Health, time.Unix(0, 0), lost)
	other := health.Ledger{}.Apply(c.Health, time.Unix(900, 0), lost)
	a, b := core.Build(coretest.GPUs(1), l, c), core.Build(coretest.GPUs(1), other, c)
	if a.Equal(b) || !slices.Equal(listDevices(a)[GPUResource], listDevices(b)[GPUResource]) {
		t.Error("want inventories that differ and equal lists")
	}
}

func TestHeartbeat(t *testing.T) {
	got := lists(t, func(func(...int)) { time.Sleep(2*defaultTimings.heartbeat + time.Second) })
	expect(t, got, sent{0, 8}, sent{30 * time.Second, 8}, sent{60 * time.Second, 8})
}

// Under ModeObserve a lost GPU is listed as healthy.
func TestModeObserve(t *testing.T) {
	c := core.DefaultConfig()
	c.Health.Mode = health.ModeObserve
	inv := buildInventory(coretest.GPUs(2), c, 1)
	u, _ := inv.Unit(inventory.UnitID(coretest.GPU(1)))
	if u.Health.State != health.GPULost {
		t.Fatalf("health %v: want lost", u.Health)
	}
	for _, d := range listResponse(listDevices(inv)[GPUResource]).GetDevices() {
		if d.GetHealth() != v1beta1.Healthy {
			t.Errorf("%s is %s", d.GetID(), d.GetHealth())
		}
	}
	if n := Resources(inv)[GPUResource][health.GPULost]; n != 1 {
		t.Errorf("%d lost in the count, want 1", n)
	}
}

// Reserved is called once for each Allocate with devices that succeeds.
func TestReserved(t *testing.T) {
	var calls [][]gpu.Device
	s := newTestServer(GPUResource, buildInventory(coretest.GPUs(4), core.DefaultConfig()))
	s.opts.Reserved = func(devices []gpu.Device) { calls = append(calls, devices) }
	for _, c := range []struct {
		containers [][]string
		refused    bool
	}{
		{[][]string{gpuIDs(2, 0), gpuIDs(3)}, false},
		{[][]string{gpuIDs(1), {"GPU-x"}}, true},
		{[][]string{nil}, false},
	} {
		if _, err := s.Allocate(t.Context(), allocateRequest(c.containers...)); (err != nil) != c.refused {
			t.Fatalf("%v: %v", c.containers, err)
		}
	}
	var ids []gpu.DeviceID
	for _, d := range slices.Concat(calls...) {
		ids = append(ids, d.ID)
	}
	if want := []gpu.DeviceID{coretest.GPU(0), coretest.GPU(2), coretest.GPU(3)}; len(calls) != 1 || !slices.Equal(ids, want) {
		t.Errorf("%d calls with %v, want one with %v", len(calls), ids, want)
	}
}
