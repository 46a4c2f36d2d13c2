package deviceplugin

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/check"
)

// incident is a fault of the kubelet, the node or the agent. run returns when the kubelet accepts registrations again, and the
// affected resources if not all are.
type incident struct {
	name    string
	restart bool // of the kubelet, without a delay
	run     func(*storm) (accepts time.Time, who affected)
}

var incidents = []incident{
	{"kubelet stops and starts", true, func(s *storm) (time.Time, affected) {
		s.kubelet.Stop()
		s.sleep(30 * time.Millisecond)
		return s.restarted()
	}},
	{"kubelet is killed and starts", true, func(s *storm) (time.Time, affected) {
		s.kubelet.Crash()
		s.sleep(30 * time.Millisecond)
		return s.restarted()
	}},
	{"kubelet is down for a while", true, func(s *storm) (time.Time, affected) {
		s.down()
		s.sleep(time.Second)
		return s.restarted()
	}},
	{"kubelet is killed several times", true, func(s *storm) (time.Time, affected) {
		for range 1 + s.rnd.IntN(5) {
			s.down()
			s.up()
			s.sleep(5 * time.Millisecond)
		}
		s.down()
		return s.restarted()
	}},
	{"kubelet is killed during Register", true, func(s *storm) (time.Time, affected) {
		s.down()
		faulty := s.normal
		faulty.Delay = time.Hour
		s.killAfter(faulty, func() int { return len(s.kubelet.Attempts()) })
		return s.restarted()
	}},
	{"kubelet is killed before the stream opens", true, func(s *storm) (time.Time, affected) {
		s.down()
		faulty := s.normal
		faulty.StreamDelay = time.Hour
		s.killAfter(faulty, func() int { return len(s.kubelet.Registrations()) })
		return s.restarted()
	}},
	{"kubelet refuses some resources for a while", true, func(s *storm) (time.Time, affected) {
		s.down()
		faulty := s.normal
		faulty.Refuse = errors.New("refused")
		for resource := range s.some() {
			s.kubelet.BehaveTo(resource, faulty)
		}
		before := len(s.kubelet.Registrations())
		s.up()
		s.sleep(600 * time.Millisecond)
		s.kubelet.Behave(s.normal)
		from := time.Now()
		s.awaitNormal("refusals", nil)
		s.assertOnce(before)
		return from, nil
	}},
	{"directory is replaced", true, func(s *storm) (time.Time, affected) {
		s.down()
		check.NoError(s, os.RemoveAll(s.dir))
		s.sleep(30 * time.Millisecond)
		return s.restarted()
	}},
	{"kubelet is slow", false, func(s *storm) (time.Time, affected) {
		s.down()
		slow := s.normal
		slow.Delay, slow.StreamDelay = s.upTo(200*time.Millisecond), s.upTo(200*time.Millisecond)
		s.kubelet.Behave(slow)
		from, _ := s.restarted()
		s.kubelet.Behave(s.normal)
		return from, nil
	}},
	{"kubelet ends streams", false, func(s *storm) (time.Time, affected) {
		slow := s.normal
		slow.Lag = s.upTo(200 * time.Millisecond) // twice this is less than the restart time
		s.kubelet.Behave(slow)
		before, from, who := len(s.kubelet.Registrations()), time.Now(), s.some()
		for resource := range who {
			s.kubelet.EndStream(resource)
		}
		s.awaitNormal("end of streams", who)
		s.assertOnce(before)
		s.kubelet.Behave(s.normal)
		return from, who
	}},
	{"plugin socket is removed", false, func(s *storm) (time.Time, affected) {
		from, who := time.Now(), s.some()
		for _, name := range who {
			check.NoError(s, os.Remove(filepath.Join(s.dir, name)))
		}
		return from, who
	}},
	{"agent restarts", false, func(s *storm) (time.Time, affected) {
		s.stop()
		s.await("the kubelet has disconnected the plugin", func() string { // else one up to 1.36 disconnects the next
			for _, r := range s.plugins.Stats() {
				if _, ok := s.kubelet.Devices(r.Resource); ok {
					return r.Resource
				}
			}
			return ""
		})
		from := time.Now()
		s.startAgent()
		return from, nil
	}},
}

// restarted starts the kubelet and waits until each resource has registered with it, once.
func (s *storm) restarted() (time.Time, affected) {
	s.Helper()
	before := len(s.kubelet.Registrations())
	from := s.up()
	s.awaitNormal("start", nil)
	s.assertOnce(before)
	return from, nil
}

// killAfter starts a faulty kubelet and kills it when count has increased.
func (s *storm) killAfter(faulty kubelettest.Behaviour, count func() int) {
	s.Helper()
	s.kubelet.Behave(faulty)
	before := count()
	s.up()
	check.NoError(s, s.kubelet.Await(s.ctx, "a registration", func() bool { return count() > before }))
	s.sleep(5 * time.Millisecond)
	s.kubelet.Crash()
	s.kubelet.Behave(s.normal)
	s.sleep(30 * time.Millisecond)
}

// record records the times from when the kubelet accepted registrations to the first list of each affected resource.
func (s *storm) record(incident string, from time.Time) {
	for _, r := range s.plugins.Stats() {
		if at := s.kubelet.Listed(r.Resource); at.After(from) {
			s.took[incident] = append(s.took[incident], at.Sub(from))
		}
	}
}

// logTimes logs the times, and fails if those of restarts exceed the limit.
func (s *storm) logTimes() {
	var restarts []time.Duration
	for _, i := range incidents {
		if i.restart {
			restarts = append(restarts, s.took[i.name]...)
		}
		s.Log(figures(i.name, s.took[i.name]))
	}
	s.Log(figures("all restarts", restarts))
	limit, err := time.ParseDuration(cmp.Or(os.Getenv("TANDEM_STORM_P99"), "0s"))
	if err != nil {
		s.Fatal(err)
	}
	if p99 := quantile(restarts, 0.99); limit > 0 && p99 > limit {
		s.Errorf("p99 %v, want no more than %v", p99, limit)
	}
}

func figures(name string, took []time.Duration) string {
	round := func(q float64) time.Duration { return quantile(took, q).Round(100 * time.Microsecond) }
	return fmt.Sprintf("%-42s n %5d  p50 %8v  p99 %8v  max %8v", name, len(took), round(0.5), round(0.99), round(1))
}

// quantile returns the q-quantile of times; zero if there are none.
func quantile(of []time.Duration, q float64) time.Duration {
	if len(of) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(of))
	return sorted[min(int(q*float64(len(of))), len(of)-1)]
}
