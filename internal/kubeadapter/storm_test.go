package kubeadapter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/watch"
)

// TestStorm lets a kubelet come and go in every way that kubelets do, under three resources, with the times of
// production. After each incident every resource is registered once, with its units, and nothing is left of
// earlier incarnations.
//
//	TANDEM_STORM=1000     starts of the kubelet, instead of a few
//	TANDEM_STORM_SEED=7   the same incidents again
//	TANDEM_STORM_P99=1s   fail if coming back takes longer
func TestStorm(t *testing.T) {
	starts, err := strconv.Atoi(setting("TANDEM_STORM", "6"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name              string
		oneClient, events bool
	}{
		{"1.37", false, true},
		{"1.34 to 1.36", true, true},
		{"1.37 without file events", false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStorm(t, kubelettest.Behaviour{OneClientPerResource: c.oneClient}, c.events)
			s.rage(starts)
		})
	}
}

func setting(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}

// storm is a rig with a die, and what was seen.
type storm struct {
	*rig
	rnd    *rand.Rand
	well   kubelettest.Behaviour // of a kubelet that nothing is wrong with
	begin  func()                // starts the agent
	took   map[string][]time.Duration
	starts int
	deck   []incident // what is to come before anything comes again
}

// disturbed are the resources that an incident took from the kubelet: the socket that each had before.
type disturbed map[string]string

func newStorm(t *testing.T, well kubelettest.Behaviour, events bool) *storm {
	seed, err := strconv.ParseUint(setting("TANDEM_STORM_SEED", strconv.FormatInt(time.Now().UnixNano(), 10)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("TANDEM_STORM_SEED=%d", seed)
	s := &storm{
		rig: newRigFor(t, time.Hour), rnd: rand.New(rand.NewPCG(seed, 0)), well: well, took: map[string][]time.Duration{},
	}
	s.begin = func() {
		s.start(func(a *Adapter) {
			a.timings = defaultTimings
			if !events {
				a.kubelet.newWatcher = func() (*fsnotify.Watcher, error) { return nil, syscall.EMFILE }
			}
		})
	}
	s.kubelet.Behave(well)
	s.flip()
	s.startKubelet()
	s.begin()
	s.calm("start", nil)
	if events {
		var noise sync.WaitGroup
		done := make(chan struct{})
		noise.Go(func() { s.lateEvents(done, rand.New(rand.NewPCG(seed, 1))) })
		t.Cleanup(func() { close(done); noise.Wait() })
	}
	return s
}

// lateEvents makes file events of sockets that have not changed, as an event does that comes after the
// registration which it announces.
func (s *storm) lateEvents(done <-chan struct{}, rnd *rand.Rand) {
	for {
		select {
		case <-done:
			return
		case <-time.After(upTo(rnd, 10*time.Millisecond)):
		}
		names, _ := filepath.Glob(filepath.Join(s.dir, "*.sock"))
		for _, name := range names {
			_ = os.Chmod(name, 0o755)
		}
	}
}

// rage is one incident after another.
func (s *storm) rage(starts int) {
	s.calm("warm", nil)
	fds, goroutines := descriptors(s.T), runtime.NumGoroutine()
	for s.starts < starts {
		registered := len(s.kubelet.Registrations())
		if s.rnd.IntN(4) == 0 {
			s.sleep(20 * time.Millisecond)
		}
		if n := len(s.kubelet.Registrations()); n != registered {
			s.Fatalf("%d registrations without a cause", n-registered)
		}
		s.flip()
		i := s.draw()
		from, who := i.happens(s)
		s.calm(i.name, who)
		s.note(i.name, from)
	}
	assertFreshSockets(s.T, s.kubelet)
	// A kubelet of 1.34 to 1.36 leaks the connections that its books lose, until it ends.
	s.down()
	s.restarted()
	s.await("no more descriptors and goroutines than before", func() string {
		if f, g := descriptors(s.T), runtime.NumGoroutine(); f > fds || g > goroutines {
			return fmt.Sprintf("%d and %d, then %d and %d; the kubelet itself leaks %d; goroutines:\n%s",
				fds, goroutines, f, g, s.kubelet.Leaked(), stacks())
		}
		return ""
	})
	s.Logf("%d starts, %d of %d registrations accepted, %d descriptors and %d goroutines before, %d and %d after",
		s.starts, len(s.kubelet.Registrations()), len(s.kubelet.Attempts()), fds, goroutines, descriptors(s.T), runtime.NumGoroutine())
	s.report()
}

// stacks are the goroutines that there are, like ones counted.
func stacks() string {
	var b strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&b, 1)
	return b.String()
}

// draw takes the next incident.
func (s *storm) draw() incident {
	if len(s.deck) == 0 {
		s.deck = slices.Clone(incidents)
		s.rnd.Shuffle(len(s.deck), func(i, j int) { s.deck[i], s.deck[j] = s.deck[j], s.deck[i] })
	}
	i := s.deck[0]
	s.deck = s.deck[1:]
	return i
}

func descriptors(t *testing.T) int {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(open)
}

// calm waits until all is as it should be, and not with the sockets that were.
func (s *storm) calm(after string, who disturbed) {
	s.Helper()
	s.await("calm after "+after, func() string { return s.wrong(who) })
}

// await polls until nothing is wrong, for 30 s.
func (s *storm) await(what string, wrong func() string) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.ctx, 30*time.Second)
	defer cancel()
	for why := wrong(); why != ""; why = wrong() {
		if !watch.Sleep(ctx, time.Millisecond) {
			s.Fatalf("%s: not in 30 s: %s; stats %+v", what, why, s.adapter.Stats())
		}
	}
}

// wrong says what is not as it should be.
func (s *storm) wrong(who disturbed) string {
	inv := s.src.Current()
	var sockets []string
	stats := s.adapter.Stats()
	for _, r := range stats {
		socket := filepath.Base(r.Socket)
		sockets = append(sockets, socket)
		want := listDevices(inv)[r.Resource]
		healthy := 0
		for _, l := range want {
			if l.healthy {
				healthy++
			}
		}
		capacity, allocatable := s.kubelet.Capacity(r.Resource)
		switch connected := s.kubelet.Connected(r.Resource); {
		case !slices.Equal(connected, []string{socket}) || socket == who[r.Resource]:
			return fmt.Sprintf("%s: connected %v, before %q", r.Resource, connected, who[r.Resource])
		case !r.Connected:
			return r.Resource + ": " + r.Reason
		case s.kubelet.Listed(r.Resource).IsZero() || capacity != len(want) || allocatable != healthy:
			return fmt.Sprintf("%s: capacity %d, allocatable %d, want %d and %d", r.Resource, capacity, allocatable, len(want), healthy)
		}
	}
	slices.Sort(sockets)
	if have := s.sockets(); len(stats) != 3 || !slices.Equal(have, sockets) {
		return fmt.Sprintf("sockets %v of %v", have, sockets)
	}
	return ""
}

func (s *storm) sleep(most time.Duration) { watch.Sleep(s.ctx, s.upTo(most)) }

func (s *storm) upTo(most time.Duration) time.Duration { return upTo(s.rnd, most) }

func upTo(rnd *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(rnd.Int64N(int64(most)))
}

// flip makes another GPU sick, or none.
func (s *storm) flip() {
	var sick []int
	if n := s.rnd.IntN(3); n < 2 {
		sick = append(sick, n)
	}
	s.src.Set(buildInventory(migGPU(), mixedConfig(), sick...))
}

// up starts the kubelet and says when.
func (s *storm) up() time.Time {
	s.Helper()
	s.startKubelet()
	s.starts++
	return time.Now()
}

// down ends it, one way or the other.
func (s *storm) down() {
	if s.rnd.IntN(2) == 0 {
		s.kubelet.Stop()
	} else {
		s.kubelet.Crash()
	}
}

// some are one resource or more of those that there are, with their sockets.
func (s *storm) some() disturbed {
	who := disturbed{}
	stats := s.adapter.Stats()
	s.rnd.Shuffle(len(stats), func(i, j int) { stats[i], stats[j] = stats[j], stats[i] })
	for _, r := range stats[:1+s.rnd.IntN(len(stats))] {
		who[r.Resource] = filepath.Base(r.Socket)
	}
	return who
}

// once fails if a resource registered more than once with the kubelet that came last.
func (s *storm) once(before int) {
	s.Helper()
	seen := map[string]int{}
	for _, r := range s.kubelet.Registrations()[before:] {
		if seen[r.Resource]++; seen[r.Resource] > 1 {
			s.Errorf("%s registered more than once: %v", r.Resource, s.kubelet.Registrations()[before:])
		}
	}
}
