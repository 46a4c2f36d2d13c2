package eviction

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// Record is the eviction of a GPU.
type Record struct {
	GPU   gpu.DeviceID `json:"gpu"`
	Cause string       `json:"cause"` // a taint: "gpu.nvidia.com/xid=79"
	At    time.Time    `json:"at"`
	Ended bool         `json:"ended,omitempty"` // it is not broken any more
}

// state is what is known of broken GPUs. It is a value.
type state struct {
	records []Record // of the last hour, and of GPUs that are evicted now
	saved   []Record // the same, as on disk
	broken  map[gpu.DeviceID]firstSeen
}

// firstSeen is when a GPU was first seen broken.
type firstSeen struct {
	at     time.Time
	checks uint64 // made until then
}

// evicted returns the GPUs that are evicted now.
func (s state) evicted() map[gpu.DeviceID]bool {
	all := map[gpu.DeviceID]bool{}
	for _, r := range s.records {
		if !r.Ended {
			all[r.GPU] = true
		}
	}
	return all
}

// confirmed reports whether a GPU has been broken for long enough, and later checks have agreed.
func (s state) confirmed(id gpu.DeviceID, now time.Time, checks uint64) bool {
	first, ok := s.broken[id]
	return ok && now.Sub(first.at) >= brokenFor && checks >= first.checks+confirmations
}

// next returns what follows from the GPUs that are broken now, and when to look again. Of several GPUs the one that is broken for the longest
// time is evicted first.
func (s state) next(now time.Time, checks uint64, broken map[gpu.DeviceID]fault, perHour int) (state, time.Duration) {
	n := state{records: s.kept(now, broken), saved: s.saved, broken: map[gpu.DeviceID]firstSeen{}}
	for id := range broken {
		first, ok := s.broken[id]
		if !ok {
			first = firstSeen{now, checks}
		}
		n.broken[id] = first
	}
	wait, evicted := window, n.evicted()
	for _, id := range slices.SortedFunc(maps.Keys(broken), func(a, b gpu.DeviceID) int {
		return cmp.Or(n.broken[a].at.Compare(n.broken[b].at), cmp.Compare(a, b))
	}) {
		switch {
		case evicted[id] || !broken[id].held:
		case !n.confirmed(id, now, checks):
			wait = min(wait, pollEvery)
		case n.inLastHour(now) >= perHour:
			wait = min(wait, n.untilAllowed(now, perHour))
		default:
			n.records = append(n.records, Record{GPU: id, Cause: broken[id].cause, At: now.UTC().Truncate(time.Second)})
		}
	}
	return n, wait
}

// kept returns the records that still count. One from the future, before the clock was set back, is of now.
func (s state) kept(now time.Time, broken map[gpu.DeviceID]fault) []Record {
	var all []Record
	for _, r := range s.records {
		if _, still := broken[r.GPU]; !still {
			r.Ended = true
		}
		if r.At.After(now) {
			r.At = now.UTC().Truncate(time.Second)
		}
		if !r.Ended || now.Sub(r.At) < window {
			all = append(all, r)
		}
	}
	return all
}

// inLastHour is how many GPUs were evicted in the hour before now.
func (s state) inLastHour(now time.Time) (n int) {
	for _, r := range s.records {
		if now.Sub(r.At) < window {
			n++
		}
	}
	return n
}

// untilAllowed is how long it takes until fewer GPUs than perHour were evicted within an hour.
func (s state) untilAllowed(now time.Time, perHour int) time.Duration {
	var ends []time.Time
	for _, r := range s.records {
		if end := r.At.Add(window); end.After(now) {
			ends = append(ends, end)
		}
	}
	slices.SortFunc(ends, time.Time.Compare)
	return ends[len(ends)-perHour].Sub(now)
}

const (
	version = 1       // of the format
	maxFile = 1 << 20 // bytes
)

// content is that of the file.
type content struct {
	Version int      `json:"version"`
	Records []Record `json:"evictions"`
}

// read returns the records in a file, which may be missing. One without meaning counts as if as many GPUs as allowed were evicted now.
func read(path string, now time.Time, perHour int) ([]Record, error) {
	text, err := statefile.Read(path, maxFile, 0)
	var c content
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil && !statefile.IsContent(err):
		return nil, err
	case err == nil && json.Unmarshal(text, &c) == nil && c.Version == version:
		return c.Records, nil
	}
	unknown := Record{Cause: "unknown", At: now.UTC().Truncate(time.Second), Ended: true}
	return slices.Repeat([]Record{unknown}, min(perHour, 100)), nil
}

func write(path string, records []Record) error {
	text, err := json.MarshalIndent(content{version, records}, "", "  ")
	if err != nil {
		return err
	}
	return statefile.Write(path, append(text, '\n'))
}
