//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// belowAtMost is how long a node may show less capacity than is allocated.
const belowAtMost = time.Second

// capacityTrace records how many GPUs the node shows, by each change that the API server sends, and how many healthy ones kubelet has,
// every lookEvery.
type capacityTrace struct {
	began     time.Time
	allocated int
	strict    bool // of the allocatable GPUs, and of the healthy ones that kubelet has, there may not be less for long either

	// A kubelet that starts writes the status of the node 0.1 s after it has begun to accept plugins. With a plugin that registers later the
	// capacity is 0 until it writes the next one.
	restarted bool

	node    *view // "capacity 8, allocatable 8"
	kubelet *view // "8 healthy"
}

const noAnswer = "no answer"

func traceCapacity(t *testing.T, n *kubeNode, allocated int) *capacityTrace {
	t.Helper()
	return &capacityTrace{
		began: time.Now(), allocated: allocated, node: watchNode(t, n),
		kubelet: follow(t, "kubelet of "+n.name, func() (string, error) {
			ids, err := n.healthy(gpuResource)
			text := fmt.Sprintf("%d healthy", len(ids))
			if err != nil {
				text = noAnswer
			}
			return text, nil
		}),
	}
}

// watchNode records what the node shows, from the watch of the API server until the end of the test.
func watchNode(t *testing.T, n *kubeNode) *view {
	t.Helper()
	v := &view{name: n.name}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
		kubeAPI+"/api/v1/nodes?watch=true&fieldSelector=metadata.name="+n.name, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer admin")
	ended := make(chan struct{})
	t.Cleanup(func() { <-ended })
	go func() {
		defer close(ended)
		answer, err := client.Do(request)
		if err != nil {
			v.note("", err)
			return
		}
		defer func() { _ = answer.Body.Close() }()
		for events := json.NewDecoder(answer.Body); ; {
			var event struct {
				Object struct {
					Status struct{ Capacity, Allocatable map[string]string }
				}
			}
			if err := events.Decode(&event); err != nil {
				v.note("", err) // the test is over, or the watch has ended
				return
			}
			status := event.Object.Status
			v.note(fmt.Sprintf("capacity %s, allocatable %s", status.Capacity[gpuResource], status.Allocatable[gpuResource]), nil)
		}
	}()
	await(t, "the watch of "+n.name, 10*time.Second, func() error {
		v.mu.Lock()
		defer v.mu.Unlock()
		if len(v.shown) == 0 {
			return errors.Join(errors.New("it shows nothing"), v.err)
		}
		return nil
	})
	return v
}

// period is how long a view showed something.
type period struct {
	from time.Time
	took time.Duration
	what string
}

// periods returns what the view showed between two times.
func (v *view) periods(from, to time.Time) (all []period) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, s := range v.shown {
		begin, end := s.at, to
		if begin.Before(from) {
			begin = from
		}
		if i+1 < len(v.shown) && v.shown[i+1].at.Before(to) {
			end = v.shown[i+1].at
		}
		if !end.Before(begin) {
			all = append(all, period{begin, end.Sub(begin), s.what})
		}
	}
	return all
}

// during does something, and checks and writes the trace of that time.
func (c *capacityTrace) during(t *testing.T, what string, do func()) {
	t.Helper()
	from := time.Now()
	do()
	time.Sleep(lookEvery) // kubelet is looked at once more
	to := time.Now()
	recordTrace(t, what, fmt.Sprintf("longest below %d: %s", c.allocated, c.check(t, from, to)), c.began, from, to, c.node, c.kubelet)
}

// recordTrace writes what views showed between two times to the log and to capacity.txt in the folder of the logs.
func recordTrace(t *testing.T, what, summary string, began, from, to time.Time, views ...*view) {
	t.Helper()
	var text strings.Builder
	for _, v := range views {
		for _, p := range v.periods(from, to) {
			fmt.Fprintf(&text, "%8.2f s  %-16s %-28s for %6.2f s\n", p.from.Sub(began).Seconds(), v.name, p.what, p.took.Seconds())
		}
	}
	fmt.Fprintln(&text, summary)
	t.Logf("%s:\n%s", what, &text)
	file, err := os.OpenFile(logDir()+"/capacity.txt", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if _, err := fmt.Fprintf(file, "== %s\n%s", what, &text); err != nil {
		t.Fatal(err)
	}
}

// check fails if there was too little for too long, and returns for how long there was.
func (c *capacityTrace) check(t *testing.T, from, to time.Time) string {
	t.Helper()
	node, kubelet := c.node.periods(from, to), c.kubelet.periods(from, to)
	capacity, allocatable := c.below(node, "capacity %d"), c.below(node, "capacity %d, allocatable %d")
	healthy, shown := c.below(kubelet, "%d healthy"), c.below(answered(kubelet), "%d healthy")
	text := fmt.Sprintf("capacity for %.2f s, allocatable for %.2f s, healthy in kubelet for %.2f s (in its answers for %.2f s)",
		capacity.Seconds(), allocatable.Seconds(), healthy.Seconds(), shown.Seconds())
	c.node.mu.Lock()
	watch := c.node.err
	c.node.mu.Unlock()
	if watch != nil {
		t.Fatalf("the watch of %s has ended: %v", c.node.name, watch)
	}
	atMost := belowAtMost
	if c.restarted {
		atMost += statusPeriod
	}
	if capacity > atMost || c.strict && max(allocatable, healthy) > belowAtMost || c.restarted && shown > belowAtMost {
		t.Errorf("%d GPUs are allocated, and there was less: %s", c.allocated, text)
	}
	return text
}

// below is the longest time for which a view showed less than is allocated. Of the numbers that the format has the last one counts.
func (c *capacityTrace) below(all []period, format string) time.Duration {
	return longest(all, func(what string) bool {
		var numbers [2]int
		read, _ := fmt.Sscanf(what, format, []any{&numbers[0], &numbers[1]}[:strings.Count(format, "%d")]...)
		return read < strings.Count(format, "%d") || numbers[read-1] < c.allocated
	})
}

// answered are the periods in which a program answered, so that what it showed before and after it did not is one time without a gap.
func answered(all []period) []period {
	return slices.DeleteFunc(slices.Clone(all), func(p period) bool { return p.what == noAnswer })
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
