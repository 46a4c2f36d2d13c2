package live

import (
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// scene is a machine that changes while both orchestrators use it.
type scene struct{ *inprocess.Rig }

// shortIntervals is a configuration with short intervals.
func shortIntervals(c *core.Config) {
	c.Probe, c.Rescan = 100*time.Millisecond, 500*time.Millisecond
	p := &c.Health
	p.SettleTime, p.RecoveryDwell, p.MaxRecoveryDwell, p.MaxRecoveries = 200*time.Millisecond, 200*time.Millisecond, 200*time.Millisecond, 100
}

// startScene starts a machine. At the end of the test the invariants are checked.
func startScene(t testing.TB, m *simdriver.Machine, change ...func(*core.Config)) *scene {
	t.Helper()
	s := &scene{inprocess.Start(t, m, change...)}
	t.Cleanup(s.checkInvariants)
	if len(s.Config.Policy.Rules) == 0 {
		s.AwaitOnly("start", s.Units())
	}
	return s
}

// change is a change of the machine or the policy, with its effect.
type change struct {
	what      string
	do        func() error
	units     []string // afterwards; nil = those of the machine
	unhealthy []string // of units
	unchanged []string // units that are listed as healthy all the time
	silent    []string // resources without an update
}

// change makes a change, checks its effect, and returns how long it took to reach both orchestrators. Former units may still be listed as
// unhealthy afterwards: some seconds after their last Allocate they are removed, which must not be taken for an effect of the next change.
func (s *scene) change(c change) time.Duration {
	s.T.Helper()
	s.eventually(c.what+": former units are removed before", func() bool {
		for _, v := range s.KubeletDevices() {
			if !v.Healthy && slices.Contains(c.silent, v.Name) {
				return false
			}
		}
		return true
	})
	since, began := s.mark(), time.Now()
	must(s.T, c.do())
	if c.units == nil {
		c.units = s.Units()
	}
	took := s.Await(c.what, began, func(devices map[string]rig.View) bool {
		for id, v := range devices {
			if v.Healthy && !slices.Contains(c.units, id) {
				return false
			}
		}
		return !slices.ContainsFunc(c.units, func(id string) bool {
			v, listed := devices[id]
			return !listed || v.Healthy == slices.Contains(c.unhealthy, id)
		})
	})
	s.checkUndisturbed(c.what, since, c.unchanged)
	s.checkNoUpdate(c.what, since, c.silent...)
	s.checkAllocatable(c.what, without(c.units, c.unhealthy...)...)
	return took
}

// rewrite replaces machine.conf atomically, for changes that no control function makes.
func (s *scene) rewrite(change func(text string) string) error {
	path := s.Root + "/machine.conf"
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	changed := change(string(text))
	if changed == string(text) {
		return errors.New("machine.conf has another format")
	}
	return errors.Join(os.WriteFile(path+".edited", []byte(changed), 0o644), os.Rename(path+".edited", path), s.Sync())
}
