//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// belowAtMost is how long a node may show less capacity than is allocated.
const belowAtMost = time.Second

// capacityTrace records how many GPUs the node shows, and how many healthy ones kubelet has.
type capacityTrace struct {
	allocated int
	strict    bool // of the allocatable GPUs, and of the healthy ones that kubelet has, there may not be less for long either

	// A kubelet that starts writes the status of the node 0.1 s after it has begun to accept plugins. With a plugin that registers later the
	// capacity is 0 until it writes the next one. Of the healthy GPUs the time counts from when kubelet accepts plugins: it lists its
	// resources before.
	restarted bool
	accepts   string // kubelet's registration socket

	node, kubelet *view
}

func traceCapacity(t *testing.T, c *cluster, allocated int) *capacityTrace {
	t.Helper()
	return &capacityTrace{allocated: allocated, accepts: c.path(registration), node: followNode(t, c), kubelet: followKubelet(t, c)}
}

// period is how long a view showed something.
type period struct {
	took time.Duration
	what string
}

func (p period) String() string { return fmt.Sprintf("%q for %.2f s", p.what, p.took.Seconds()) }

// periods returns what the view showed between two times. What it showed ends when it was asked for what it shows next: an answer may take as long as
// a machine with other work lets it, and is about any moment since.
func (v *view) periods(from, to time.Time) (all []period) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, s := range v.shown {
		begin, end := s.at, to
		if begin.Before(from) {
			begin = from
		}
		if i+1 < len(v.shown) && v.shown[i+1].at.Before(to) {
			end = v.shown[i+1].asked
		}
		if !end.Before(begin) {
			all = append(all, period{end.Sub(begin), s.what})
		}
	}
	return all
}

// longest is the longest time for which periods without a gap match.
func longest(all []period, matches func(string) bool) (most time.Duration) {
	var now time.Duration
	for _, p := range all {
		if now += p.took; !matches(p.what) {
			now = 0
		}
		most = max(most, now)
	}
	return most
}

// during does something, and fails if there was too little for too long meanwhile.
func (c *capacityTrace) during(t *testing.T, do func()) {
	t.Helper()
	from := time.Now()
	do()
	time.Sleep(lookEvery) // kubelet is looked at once more
	to := time.Now()
	capacity := longest(c.node.periods(from, to), func(what string) bool { return c.below(what, "%d of %d") })
	allocatable := longest(c.node.periods(from, to), func(what string) bool { return c.below(what, "%d") })
	accepts := from
	if c.restarted {
		info, err := os.Stat(c.accepts)
		if err != nil {
			t.Fatal(err)
		}
		accepts = info.ModTime() // it is created with each start
	}
	healthy := longest(c.kubelet.periods(accepts, to), func(what string) bool { return c.below(what, "%d healthy") })
	text := fmt.Sprintf("longest below %d: capacity for %.2f s, allocatable for %.2f s, healthy in kubelet for %.2f s (from %.2f s on)",
		c.allocated, capacity.Seconds(), allocatable.Seconds(), healthy.Seconds(), accepts.Sub(from).Seconds())
	t.Logf("%s; node %v, kubelet %v", text, c.node.periods(from, to), c.kubelet.periods(from, to))
	atMost := belowAtMost
	if c.restarted {
		atMost += statusPeriod
	}
	if capacity > atMost || c.strict && max(allocatable, healthy) > belowAtMost || c.restarted && healthy > belowAtMost {
		t.Error(text)
	}
}

// below reports whether what a view shows is less than is allocated. Of the numbers that the format has the last one counts.
func (c *capacityTrace) below(what, format string) bool {
	var numbers [2]int
	read, _ := fmt.Sscanf(what, format, &numbers[0], &numbers[1]) // a format with one number leaves the other
	return read < strings.Count(format, "%d") || numbers[read-1] < c.allocated
}
