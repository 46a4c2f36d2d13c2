package kubeadapter

import (
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
)

// incident is something that kubelets, or a node, do to plugins. It says from when on the kubelet takes
// registrations, and whom it was done to if not to all.
type incident struct {
	name    string
	restart bool // another kubelet came, and nothing held it up
	happens func(*storm) (from time.Time, who disturbed)
}

var incidents = []incident{
	{"kubelet stops and starts", true, func(s *storm) (time.Time, disturbed) {
		s.kubelet.Stop()
		s.sleep(30 * time.Millisecond)
		return s.restarted()
	}},
	{"kubelet is killed and starts", true, func(s *storm) (time.Time, disturbed) {
		s.kubelet.Crash()
		s.sleep(30 * time.Millisecond)
		return s.restarted()
	}},
	{"kubelet stays away for a while", true, func(s *storm) (time.Time, disturbed) {
		s.down()
		s.sleep(time.Second)
		return s.restarted()
	}},
	{"kubelet starts and dies over and over", true, func(s *storm) (time.Time, disturbed) {
		for range 1 + s.rnd.IntN(5) {
			s.down()
			s.up()
			s.sleep(5 * time.Millisecond)
		}
		s.down()
		return s.restarted()
	}},
	{"kubelet dies while Register is in flight", true, func(s *storm) (time.Time, disturbed) {
		s.down()
		sick := s.well
		sick.Delay = time.Hour
		s.dies(sick, func() int { return len(s.kubelet.Attempts()) })
		return s.restarted()
	}},
	{"kubelet dies before the stream opens", true, func(s *storm) (time.Time, disturbed) {
		s.down()
		sick := s.well
		sick.StreamDelay = time.Hour
		s.dies(sick, func() int { return len(s.kubelet.Registrations()) })
		return s.restarted()
	}},
	{"kubelet refuses some for a while", true, func(s *storm) (time.Time, disturbed) {
		s.down()
		sick := s.well
		sick.Refuse = errors.New("not now")
		for resource := range s.some() {
			s.kubelet.BehaveTo(resource, sick)
		}
		before := len(s.kubelet.Registrations())
		s.up()
		s.sleep(600 * time.Millisecond)
		s.kubelet.Behave(s.well)
		from := time.Now()
		s.calm("a refusal", nil)
		s.once(before)
		return from, nil
	}},
	{"folder is made anew", true, func(s *storm) (time.Time, disturbed) {
		s.down()
		s.must(os.RemoveAll(s.dir))
		s.sleep(30 * time.Millisecond)
		return s.restarted()
	}},
	{"kubelet is slow", false, func(s *storm) (time.Time, disturbed) {
		s.down()
		slow := s.well
		slow.Delay, slow.StreamDelay = s.upTo(200*time.Millisecond), s.upTo(200*time.Millisecond)
		s.kubelet.Behave(slow)
		from, _ := s.restarted()
		s.kubelet.Behave(s.well)
		return from, nil
	}},
	{"kubelet hangs up", false, func(s *storm) (time.Time, disturbed) {
		slow := s.well
		slow.Lag = s.upTo(200 * time.Millisecond) // twice of it is within the settling time
		s.kubelet.Behave(slow)
		before, from, who := len(s.kubelet.Registrations()), time.Now(), s.some()
		for resource := range who {
			s.kubelet.EndStream(resource)
		}
		s.calm("a hang-up", who)
		s.once(before)
		s.kubelet.Behave(s.well)
		return from, who
	}},
	{"somebody removes a plugin's socket", false, func(s *storm) (time.Time, disturbed) {
		from, who := time.Now(), s.some()
		for _, name := range who {
			s.must(os.Remove(filepath.Join(s.dir, name)))
		}
		return from, who
	}},
	{"agent restarts", false, func(s *storm) (time.Time, disturbed) {
		s.stop()
		s.await("the kubelet has noticed", func() string { // until then one up to 1.36 takes the next for the last
			for _, r := range s.adapter.Stats() {
				if _, ok := s.kubelet.Devices(r.Resource); ok {
					return r.Resource
				}
			}
			return ""
		})
		from := time.Now()
		s.begin()
		return from, nil
	}},
}

// restarted starts the kubelet and waits until each resource has registered with it, once.
func (s *storm) restarted() (time.Time, disturbed) {
	s.Helper()
	before := len(s.kubelet.Registrations())
	from := s.up()
	s.calm("a start", nil)
	s.once(before)
	return from, nil
}

// dies starts a sick kubelet and kills it as soon as the count has grown.
func (s *storm) dies(sick kubelettest.Behaviour, count func() int) {
	s.Helper()
	s.kubelet.Behave(sick)
	before := count()
	s.up()
	s.must(s.kubelet.Await(s.ctx, "a registration", func() bool { return count() > before }))
	s.sleep(5 * time.Millisecond)
	s.kubelet.Crash()
	s.kubelet.Behave(s.well)
	s.sleep(30 * time.Millisecond)
}
