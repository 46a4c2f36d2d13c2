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
)

// stream is a kubelet's end of ListAndWatch in a bubble, where the clock is the test's.
type stream struct {
	grpc.ServerStream // panics for everything but what is below
	ctx               context.Context
	began             time.Time
	lists             []sent
}

// sent is a list: when it came, and how many units it calls healthy.
type sent struct {
	at      time.Duration
	healthy int
}

func (s *stream) Context() context.Context { return s.ctx }

func (s *stream) Send(r *v1beta1.ListAndWatchResponse) error {
	l := sent{at: time.Since(s.began)}
	for _, d := range r.GetDevices() {
		if d.GetHealth() == v1beta1.Healthy {
			l.healthy++
		}
	}
	s.lists = append(s.lists, l)
	return nil
}

// lists opens a stream over eight GPUs under the times of production, runs play and returns the lists that
// came until then. play offers which of the GPUs are sick.
func lists(t *testing.T, play func(offer func(sick ...int))) (got []sent) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(GPUResource, buildInventory(coretest.GPUs(8), core.DefaultConfig()))
		offer := func(sick ...int) {
			s.tracker.setInventory(buildInventory(coretest.GPUs(8), core.DefaultConfig(), sick...))
			synctest.Wait()
		}
		ctx, cancel := context.WithCancel(t.Context())
		st := &stream{ctx: ctx, began: time.Now()}
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

// No time passes between a change and its list: not right after the stream opened, not right after a
// heartbeat, not after a quiet hour.
func TestAChangeGoesOutAtOnce(t *testing.T) {
	expect(t, lists(t, func(offer func(...int)) { offer(3) }), sent{0, 8}, sent{0, 7})

	got := lists(t, func(offer func(...int)) {
		time.Sleep(defaultTimings.heartbeat) // of the bubble
		synctest.Wait()
		offer(3)
		time.Sleep(defaultTimings.heartbeat - time.Millisecond)
		offer(3, 4)
	})
	expect(t, got, sent{0, 8}, sent{30 * time.Second, 8}, sent{30 * time.Second, 7}, sent{59999 * time.Millisecond, 6})
}

// A change within the quiet time waits for its end and no longer; of several only what holds by then is told.
func TestChangesAreCoalesced(t *testing.T) {
	got := lists(t, func(offer func(...int)) {
		time.Sleep(5 * time.Second)
		offer(0)
		for i := range 99 {
			time.Sleep(10 * time.Millisecond)
			offer([]int{0, 1, 2, 3}[:1+(i+1)%4]...) // the last is the 99th: 4 sick
		}
		time.Sleep(time.Second)
	})
	expect(t, got, sent{0, 8}, sent{5 * time.Second, 7}, sent{6 * time.Second, 4})
}

func TestWhatIsTakenBackWithinTheQuietTimeIsNotTold(t *testing.T) {
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

// The kubelet writes a file for each list: a storm is one list a second.
func TestAStormIsOneListASecond(t *testing.T) {
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

// Words that change are no news to the kubelet, which has no place for them.
func TestWordsAreNoNews(t *testing.T) {
	c := core.DefaultConfig()
	lost := core.Observation{At: core.WholeGPU(coretest.GPU(0)), Kind: core.Lost}
	l := core.Ledger{}.Apply(c.Health, time.Unix(0, 0), lost)
	other := core.Ledger{}.Apply(c.Health, time.Unix(900, 0), lost)
	a, b := core.Build(coretest.GPUs(1), l, c), core.Build(coretest.GPUs(1), other, c)
	if a.Equal(b) || !slices.Equal(listDevices(a)[GPUResource], listDevices(b)[GPUResource]) {
		t.Error("want inventories that differ and equal lists")
	}
}

func TestHeartbeat(t *testing.T) {
	got := lists(t, func(func(...int)) { time.Sleep(2*defaultTimings.heartbeat + time.Second) })
	expect(t, got, sent{0, 8}, sent{30 * time.Second, 8}, sent{60 * time.Second, 8})
}

// Under ModeObserve nothing is withdrawn: what would be unhealthy is listed as healthy.
func TestObservedIsHealthyToTheKubelet(t *testing.T) {
	c := core.DefaultConfig()
	c.Health.Mode = core.ModeObserve
	inv := buildInventory(coretest.GPUs(2), c, 1)
	u, _ := inv.Unit(core.UnitID(coretest.GPU(1)))
	if u.Health.State != core.GPULost {
		t.Fatalf("health %v: want it lost, and observed only", u.Health)
	}
	for _, d := range listResponse(listDevices(inv)[GPUResource]).GetDevices() {
		if d.GetHealth() != v1beta1.Healthy {
			t.Errorf("%s is %s", d.GetID(), d.GetHealth())
		}
	}
	if n := Resources(inv)[GPUResource][core.GPULost]; n != 1 {
		t.Errorf("%d lost in the count, want 1", n)
	}
}

// Who asks learns of work that was handed out, once a request, and of nothing that was refused.
func TestReservedIsTold(t *testing.T) {
	var told [][]core.Device
	s := benchServer(4)
	s.opts.Reserved = func(devices []core.Device) { told = append(told, devices) }
	ask := func(ids ...[]string) error {
		r := &v1beta1.AllocateRequest{}
		for _, of := range ids {
			r.ContainerRequests = append(r.ContainerRequests, &v1beta1.ContainerAllocateRequest{DevicesIds: of})
		}
		_, err := s.Allocate(t.Context(), r)
		return err
	}
	if err := ask(gpuIDs(2, 0), gpuIDs(3)); err != nil {
		t.Fatal(err)
	}
	if err := ask(gpuIDs(1), []string{"GPU-x"}); err == nil {
		t.Fatal("an unknown device was allocated")
	}
	if err := ask(nil); err != nil {
		t.Fatal(err)
	}
	var ids []core.DeviceID
	for _, d := range slices.Concat(told...) {
		ids = append(ids, d.ID)
	}
	if want := []core.DeviceID{coretest.GPU(0), coretest.GPU(2), coretest.GPU(3)}; len(told) != 1 || !slices.Equal(ids, want) {
		t.Errorf("told %d times of %v, want once of %v", len(told), ids, want)
	}
}
