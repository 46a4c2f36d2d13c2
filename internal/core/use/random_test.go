package use_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

// Random readings: whatever happens, nothing is withheld without a process that was seen there at two readings, times never run backwards
// or ahead, holders are distinct and of the record or of a process that runs, and the table that follows from nothing has nothing.
func TestRandomReadings(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	inv := gpus(t, coretest.GPUs(4))
	owners := []holders.Work{{}, group(one), group(two), task}
	for round := range 200 {
		var table use.Table
		r := reading{inv: inv, owners: map[int]holders.Work{}}
		seen := map[int]int{} // number of readings in a row by PID
		for range 30 {
			r.at += time.Duration(random.IntN(20000)) * time.Millisecond
			r.percent, r.record, r.unknown = map[int]uint64{}, nil, random.IntN(5) == 0
			for n := range 4 {
				if random.IntN(6) > 0 {
					r.percent[n] = uint64(random.IntN(2))
				}
			}
			if random.IntN(4) > 0 {
				r.record = record()
				for n := range 4 {
					if o := random.IntN(4); o < 2 {
						r.record.Holders = append(r.record.Holders, hold([]holders.Work{one, two}[o], n))
					}
				}
				r.record.Complete, r.record.AllWork = random.IntN(3) > 0, random.IntN(3) > 0
			}
			if random.IntN(3) == 0 {
				r.procs = map[int]int{}
				for range random.IntN(4) {
					pid := 1 + random.IntN(6)
					r.procs[pid], r.owners[pid] = random.IntN(4), owners[pid%4]
				}
			}
			for pid := range 7 {
				if _, ok := r.procs[pid]; !ok {
					seen[pid] = 0
				} else {
					seen[pid]++
				}
			}
			table = table.Next(r.input())
			if err := check(table, r, seen); err != nil {
				t.Fatalf("seed %d, round %d, at %v: %v\n%+v\n%+v", seed, round, r.at, err, r, table)
			}
		}
		for range 2 {
			r.at, r.record, r.procs, r.percent = r.at+2*time.Minute, nil, nil, map[int]uint64{0: 0, 1: 0, 2: 0, 3: 0}
			table = table.Next(r.input())
		}
		for _, d := range table.Devices {
			if len(d.Holders)+len(d.Processes) > 0 || !d.HeldSince.IsZero() || !d.IdleSince.IsZero() {
				t.Fatalf("seed %d: something is left: %+v", seed, d)
			}
		}
	}
}

func check(table use.Table, r reading, seen map[int]int) error {
	for _, o := range table.Occupied(r.inv) {
		d, _ := table.Device(o.Device)
		if !slices.ContainsFunc(d.Processes, func(p use.Process) bool { return p.Unreserved && seen[p.PID] >= 2 }) {
			return fmt.Errorf("%s is withheld without a process: %+v", o.Device, d)
		}
	}
	for i, d := range table.Devices {
		for j, h := range d.Holders {
			running := slices.ContainsFunc(d.Processes, func(p use.Process) bool { return p.Owner == h.Work })
			if h.Observed && !running || j > 0 && d.Holders[j-1] == h {
				return fmt.Errorf("holder %+v of %d", h, i)
			}
		}
		if d.HeldSince.IsZero() != (len(d.Holders) == 0) || d.HeldSince.After(table.At) || d.IdleSince.After(table.At) {
			return fmt.Errorf("times of %+v", d)
		}
		for _, p := range d.Processes {
			if p.Unreserved && (p.Since.IsZero() || r.unknown || p.Owner.Orchestrator == holders.Nomad) {
				return fmt.Errorf("unreserved: %+v", p)
			}
			if _, runs := r.procs[p.PID]; !runs {
				return fmt.Errorf("it has ended: %+v", p)
			}
		}
	}
	return nil
}
