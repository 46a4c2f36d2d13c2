package statuspage

import (
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// historyDocument is /history.json. The charts of the page are made from it.
type historyDocument struct {
	Agent       string          `json:"agent"`
	Version     string          `json:"version"`
	Node        string          `json:"node"`
	At          time.Time       `json:"at"` // when the document was made: the end of the last point
	StepSeconds int             `json:"stepSeconds"`
	Devices     []deviceHistory `json:"devices"`
}

// deviceHistory has one value for each step, the oldest first; null = nothing was read.
type deviceHistory struct {
	ID          gpu.DeviceID `json:"id"`
	Utilization values       `json:"utilizationPercent"`
	Memory      values       `json:"memoryUsedMiB"`
	Power       values       `json:"powerWatts"`
	Temperature values       `json:"temperatureCelsius"`
}

// values marshals as an array of numbers and nulls.
type values []uint32

const noValue = math.MaxUint32

// MarshalJSON implements json.Marshaler.
func (v values) MarshalJSON() ([]byte, error) {
	text := append(make([]byte, 0, 5*len(v)+2), '[')
	for i, n := range v {
		if i > 0 {
			text = append(text, ',')
		}
		if n == noValue {
			text = append(text, "null"...)
		} else {
			text = strconv.AppendUint(text, uint64(n), 10)
		}
	}
	return append(text, ']'), nil
}

// describe returns the histories of all devices by ID. They are equally long: from the first step on, at most an hour.
func (h *history) describe() []deviceHistory {
	all := make([]deviceHistory, 0, len(h.devices))
	first := max(0, h.last-points+1)
	for _, id := range slices.Sorted(maps.Keys(h.devices)) {
		room := func() values { return make(values, 0, h.last-first+1) }
		d := deviceHistory{id, room(), room(), room(), room()}
		for n := first; n <= h.last; n++ {
			p := h.devices[id].at(n)
			d.Utilization = append(d.Utilization, widen(uint32(p.utilization), math.MaxUint8))
			d.Memory = append(d.Memory, p.memory)
			d.Power = append(d.Power, widen(uint32(p.power), math.MaxUint16))
			d.Temperature = append(d.Temperature, widen(uint32(p.temperature), math.MaxUint8))
		}
		all = append(all, d)
	}
	return all
}

func widen(n, unread uint32) uint32 {
	if n == unread {
		return noValue
	}
	return n
}
