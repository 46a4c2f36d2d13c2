package statuspage

import (
	"math"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

const (
	step   = 10 * time.Second // between two points of a history; a point is the mean of the readings in it
	points = 360              // of a history: one hour

	// maxDevices bounds the memory of all histories. MIG instances get new UUIDs whenever a layout changes, and a history
	// is kept for an hour after its device is gone.
	maxDevices = 256
)

// point is what a device did in one step: 8 bytes, so a history takes 3 kB for each device. The largest value of a field means
// that nothing was read.
type point struct {
	memory      uint32 // MiB used
	power       uint16 // watts
	utilization uint8  // percent
	temperature uint8  // degrees Celsius
}

var noPoint = point{math.MaxUint32, math.MaxUint16, math.MaxUint8, math.MaxUint8}

// mean is that of the readings of one step.
type mean struct {
	sum   uint64
	count uint64
}

func (m *mean) add(n gpu.OptionalUint64) {
	if n.OK {
		m.sum, m.count = m.sum+n.Value, m.count+1
	}
}

// in returns the mean in the unit, and unread if there is none. A larger mean is cut off below unread.
func (m *mean) in(unit, unread uint64) uint64 {
	if m.count == 0 {
		return unread
	}
	return min((m.sum/m.count+unit/2)/unit, unread-1)
}

// series is the history of one device. Steps are numbered from 0, the first one of the history.
type series struct {
	last   int           // step of the latest reading
	failed bool          // a reading after it failed
	ring   [points]point // the point of step n is at n modulo points
	means  struct{ memory, power, utilization, temperature mean }
}

// add adds a reading. The steps since the previous one have no point, apart from a single one in which none was due: while nothing
// uses the devices, readings are more than a step apart (node/usage). It has the point before it.
func (s *series) add(n int, u gpu.Usage) {
	between := noPoint
	if n == s.last+2 && !s.failed {
		between = s.at(s.last)
	}
	for missed := max(s.last+1, n-points+1, 0); missed <= n; missed++ {
		s.ring[missed%points] = between
	}
	if n != s.last {
		clear := series{}
		s.last, s.means = n, clear.means
	}
	s.failed = false
	m := &s.means
	m.memory.add(u.MemoryUsed)
	m.power.add(u.Power)
	m.utilization.add(u.GPU)
	m.temperature.add(u.Temperature)
	s.ring[n%points] = point{
		memory:      uint32(m.memory.in(1<<20, math.MaxUint32)),
		power:       uint16(m.power.in(1000, math.MaxUint16)),
		utilization: uint8(m.utilization.in(1, math.MaxUint8)),
		temperature: uint8(m.temperature.in(1, math.MaxUint8)),
	}
}

// at returns the point of a step.
func (s *series) at(n int) point {
	if n < 0 || n > s.last || n <= s.last-points {
		return noPoint
	}
	return s.ring[n%points]
}

// history is what the devices did in the last hour. The zero value is empty. It is not safe for concurrent use.
type history struct {
	last    int // the latest step
	devices map[gpu.DeviceID]*series
}

// add adds what is known of a step, which is not before the latest one.
func (h *history) add(n int, t use.Table) {
	if h.devices == nil {
		h.devices = map[gpu.DeviceID]*series{}
	}
	h.last = n
	for id, s := range h.devices {
		if s.last <= n-points {
			delete(h.devices, id)
		}
	}
	for _, d := range t.Devices {
		s := h.devices[d.ID]
		if d.Usage.At.IsZero() {
			if s != nil {
				s.failed = true
			}
			continue
		}
		if s == nil {
			if len(h.devices) >= maxDevices && !h.forgetOldest() {
				continue
			}
			s = &series{last: n - points}
			h.devices[d.ID] = s
		}
		s.add(n, d.Usage)
	}
}

// forgetOldest removes the history without a reading for the longest time, unless all have one of the latest step.
func (h *history) forgetOldest() bool {
	oldest, found := h.last, gpu.DeviceID("")
	for id, s := range h.devices {
		if s.last < oldest {
			oldest, found = s.last, id
		}
	}
	delete(h.devices, found)
	return found != ""
}
