package core_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// arrival is one report of a fault: when it arrives, and what it is.
type arrival struct {
	at time.Duration
	o  health.Observation
}

// nvmlEvents are the reports of NVML's events, so late. From six seconds on the event set knows how old they may be.
func nvmlEvents(faults []time.Duration, late time.Duration) (all []arrival) {
	for _, f := range faults {
		o := xidEvent(a, 109)
		if late > 6*time.Second {
			o.Age.Most = late
		}
		all = append(all, arrival{f + late, o})
	}
	return all
}

func operationalEvents(faults []time.Duration, late time.Duration) (all []arrival) {
	for _, f := range faults {
		o := xidEvent(a, 109)
		o.FromOperational = true
		all = append(all, arrival{f + late, o})
	}
	return all
}

const lineHeld = 2 * time.Second // in package kmsg

// deviceLines are the reports of /dev/kmsg, which is read at once. Lines within two seconds are one.
func deviceLines(faults []time.Duration) (all []arrival) {
	for _, f := range lines(faults) {
		o := xidEvent(a, 109)
		o.FromKernelLog, o.Age = true, health.Age{Least: lineHeld, Most: lineHeld}
		all = append(all, arrival{f + lineHeld, o})
	}
	return all
}

// lines returns the faults without those that package kmsg leaves out as repeated.
func lines(faults []time.Duration) (kept []time.Duration) {
	for _, f := range faults {
		if len(kept) == 0 || f-kept[len(kept)-1] >= lineHeld {
			kept = append(kept, f)
		}
	}
	return kept
}

// ringLines are the reports of syslog(2), which is read at an interval and at first at a time after the first fault.
// exact means that the clock of the log agrees with that of the machine to two seconds; otherwise a line is known to
// be newer than the read before.
func ringLines(faults []time.Duration, first, every time.Duration, exact bool) (all []arrival) {
	for _, f := range lines(faults) {
		read := first
		for read < f {
			read += every
		}
		reported := read + lineHeld
		o := xidEvent(a, 109)
		o.FromKernelLog, o.Age = true, health.Age{Least: lineHeld, Most: lineHeld + every}
		if age := reported - f; exact {
			o.Age = health.Age{Least: max(o.Age.Least, age-2*time.Second), Most: min(o.Age.Most, age+2*time.Second)}
		}
		all = append(all, arrival{reported, o})
	}
	return all
}

// backlogLines are lines of faults that an agent reads when it starts.
func backlogLines(faults []time.Duration, started time.Duration) (all []arrival) {
	for _, f := range lines(faults) {
		o := xidEvent(a, 109)
		o.FromKernelLog, o.Backlog = true, true
		o.Age = health.Age{Least: max(0, started-f-2*time.Second), Most: started - f + 2*time.Second}
		all = append(all, arrival{started, o})
	}
	return all
}

// expectArrivals applies reports in the order of their arrival and compares how often the XID was counted, and whether
// it is repeated.
func expectArrivals(t *testing.T, name string, want int, all []arrival, restartAt ...time.Duration) {
	t.Helper()
	s := guest(t)
	begin := s.now
	slices.SortStableFunc(all, func(x, y arrival) int { return int(x.at - y.at) })
	for _, r := range all {
		for len(restartAt) > 0 && restartAt[0] <= r.at {
			restartAt = restartAt[1:]
			text, err := json.Marshal(s.ledger.Checkpoint())
			if err != nil {
				t.Fatal(err)
			}
			var c health.Checkpoint
			if err := json.Unmarshal(text, &c); err != nil {
				t.Fatal(err)
			}
			s.ledger = health.Restore(s.policy, c, false)
		}
		s.now = begin.Add(r.at)
		s.observe(r.o)
	}
	counts := s.history().FaultCounts
	if len(counts) != 1 || counts[0].Count != uint64(want) {
		t.Errorf("%s: counted %d, want %d", name, counts[0].Count, want)
	}
	repeated := slices.ContainsFunc(s.ledger.Conditions(), func(c health.Condition) bool { return c.Repeated })
	if repeated != (want > 1) {
		t.Errorf("%s: repeated %t: %+v", name, repeated, s.ledger.Conditions())
	}
}

// Each fault counts once, in whatever order and how late its reports arrive: NVML's event, the operational event, the
// line of /dev/kmsg or of syslog(2), and the line that the next agent reads. Two faults are two, also if one of them
// lacks a report.
func TestOrdersOfArrival(t *testing.T) {
	const s = time.Second
	eachSecond := make([]time.Duration, 60)
	for i := range eachSecond {
		eachSecond[i] = time.Duration(i) * s
	}
	for _, faults := range [][]time.Duration{{0}, {0, 11 * s}, {0, 11 * s, 22 * s}, {0, 25 * s}, eachSecond} {
		n := len(faults)
		for _, nvmlLate := range []time.Duration{0, s, 6 * s, 7 * s, 30 * s, 62 * s, time.Hour} {
			name := fmt.Sprintf("%d faults, NVML %v late, ", n, nvmlLate)
			event := nvmlEvents(faults, nvmlLate)
			expectArrivals(t, name+"/dev/kmsg", n, slices.Concat(event, deviceLines(faults)))
			if nvmlLate <= 6*s { // an operational event is read with NVML's
				for _, late := range []time.Duration{nvmlLate, nvmlLate + 2*s} {
					operational := operationalEvents(faults, late)
					expectArrivals(t, name+"operational", n, slices.Concat(event, operational))
					expectArrivals(t, name+"operational first", n, slices.Concat(operational, event))
					expectArrivals(t, name+"operational, /dev/kmsg", n, slices.Concat(event, operational, deviceLines(faults)))
				}
			}
			for _, every := range []time.Duration{10 * s, 60 * s} {
				for first := time.Duration(0); first <= every; first += s {
					for _, exact := range []bool{true, false} {
						name := fmt.Sprintf("%ssyslog each %v from %v on, exact %t", name, every, first, exact)
						expectArrivals(t, name, n, slices.Concat(event, ringLines(faults, first, every, exact)))
					}
				}
			}
		}
	}
	for _, exact := range []bool{true, false} {
		for first := time.Duration(0); first <= 60*s; first += s {
			two := []time.Duration{0, 11 * s}
			name := fmt.Sprintf("syslog from %v on, exact %t, ", first, exact)
			ring := ringLines(two, first, 60*s, exact)
			expectArrivals(t, name+"alone", 2, ring)
			expectArrivals(t, name+"no event of the second", 2, slices.Concat(nvmlEvents(two[:1], 0), ring))
			expectArrivals(t, name+"no event of the first", 2, slices.Concat(nvmlEvents(two[1:], 0), ring))
			expectArrivals(t, name+"no line of the second", 2, slices.Concat(nvmlEvents(two, 0), ring[:1]))
		}
	}
}

// The line of an XID that NVML reported for a MIG instance is no fault of the others, however late it is read.
func TestLateLineOfAnInstance(t *testing.T) {
	for _, r := range ringLines([]time.Duration{0}, 60*time.Second, 60*time.Second, false) {
		s := guest(t)
		s.observe(xidEvent(gi(1), 109))
		s.wait(r.at)
		s.observe(r.o)
		s.expectAt("the instance", gi(1), health.Degraded, "XID_109")
		s.expectAt("another one", gi(2), health.Healthy, "")
	}
}

// The next agent reads the line of an event that an earlier one has handled, and lines of faults of the time without
// an agent.
func TestArrivalsOverARestart(t *testing.T) {
	const s = time.Second
	for _, absent := range []time.Duration{s, 3 * s, 13 * s, time.Minute, time.Hour, 9 * time.Minute} {
		ended := s // before the line of the fault at 0 has been handled
		started := ended + absent
		restart := []time.Duration{ended}
		event := nvmlEvents([]time.Duration{0}, 0)
		name := fmt.Sprintf("absent for %v, ", absent)
		expectArrivals(t, name+"its line", 1, slices.Concat(event, backlogLines([]time.Duration{0}, started)), restart...)
		expectArrivals(t, name+"operational", 1,
			slices.Concat(event, operationalEvents([]time.Duration{0}, 0), backlogLines([]time.Duration{0}, started)), restart...)
		again := min(started, 9*time.Minute) // within the time for a repetition
		if again < 13*s {
			continue
		}
		expectArrivals(t, name+"its line and another one", 2, slices.Concat(event, backlogLines([]time.Duration{0, again}, started)), restart...)
		expectArrivals(t, name+"another one only", 2, slices.Concat(event, backlogLines([]time.Duration{again}, started)), restart...)
		read := slices.Concat(event, deviceLines([]time.Duration{0}))
		expectArrivals(t, name+"its line was read, another one", 2, slices.Concat(read, backlogLines([]time.Duration{again}, started)), 3*s)
	}
	// NVML's event and the line in the log both come while the next agent starts.
	for late := time.Duration(0); late <= 6*s; late += s {
		expectArrivals(t, "while it starts", 1, slices.Concat(backlogLines([]time.Duration{0}, s), nvmlEvents([]time.Duration{0}, late)))
	}
}
