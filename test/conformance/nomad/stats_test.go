package nomad

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
)

// stats waits for statistics that are as wanted.
func (a *agent) stats(t testing.TB, what string, holds func(map[string]*device.DeviceStats) bool) map[string]*device.DeviceStats {
	t.Helper()
	var all map[string]*device.DeviceStats
	await(t, what, func() bool {
		all = map[string]*device.DeviceStats{}
		for _, g := range a.dm.AllStats() {
			for id, s := range g.InstanceStats {
				all[id] = s
			}
		}
		return holds(all)
	})
	return all
}

func Test16Stats(t *testing.T) {
	m := install(t, "a100-mig")
	begin := time.Now()
	a := startAgent(t, m, nil)
	offered := ids(a.first(t, m))
	some := func(s map[string]*device.DeviceStats) bool { return len(s) > 0 }
	stats := a.stats(t, "the first sample", some)
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("the first sample came after %s", d)
	}
	if len(stats) != len(offered) {
		t.Errorf("%d statistics of %d devices", len(stats), len(offered))
	}
	if _, err := json.Marshal(a.dm.AllStats()); err != nil {
		t.Error(err)
	}
	for _, id := range offered {
		s := stats[id]
		if s == nil || s.Stats == nil || s.Summary == nil || math.Abs(time.Since(s.Timestamp).Seconds()) > 60 {
			t.Errorf("%s: %+v", id, s)
			continue
		}
		if len(s.Stats.Attributes) != 12 || s.Stats.Attributes["Memory state"].IntDenominatorVal == nil ||
			!strings.HasPrefix(*s.Stats.Attributes["Health"].StringVal, "healthy") {
			t.Errorf("%s: %+v", id, s.Stats.Attributes)
		}
	}

	gpu0 := offered[0]
	m.ctl(t, "set", "0", "power_usage", "321 W")
	power := func(s *device.DeviceStats) int64 {
		if s == nil || s.Stats.Attributes["Power usage"].IntNumeratorVal == nil {
			return -1
		}
		return *s.Stats.Attributes["Power usage"].IntNumeratorVal
	}
	a.stats(t, "321 W", func(s map[string]*device.DeviceStats) bool { return power(s[gpu0]) == 321 })
	m.ctl(t, "unload")
	a.stats(t, "N/A", func(s map[string]*device.DeviceStats) bool { return len(s) == len(offered) && power(s[gpu0]) == -1 })
	m.ctl(t, "load")
	a.stats(t, "321 W again", func(s map[string]*device.DeviceStats) bool { return power(s[gpu0]) == 321 })
}
