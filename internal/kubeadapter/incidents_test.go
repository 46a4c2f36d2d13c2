package kubeadapter

import (
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
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
		s.must(os.RemoveAll(s.dir))
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
			s.must(os.Remove(filepath.Join(s.dir, name)))
		}
		return from, who
	}},
	{"agent restarts", false, func(s *storm) (time.Time, affected) {
		s.stop()
		s.await("the kubelet has disconnected the plugin", func() string { // else one up to 1.36 disconnects the next
			for _, r := range s.adapter.Stats() {
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
	s.must(s.kubelet.Await(s.ctx, "a registration", func() bool { return count() > before }))
	s.sleep(5 * time.Millisecond)
	s.kubelet.Crash()
	s.kubelet.Behave(s.normal)
	s.sleep(30 * time.Millisecond)
}
