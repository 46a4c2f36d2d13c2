//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// consumer is a running agent whose use of memory, CPU and descriptors is sampled.
type consumer struct {
	name, socket string
	pid          int
	samples      []consumption
}

// consumption is what an agent has and has used at one moment.
type consumption struct {
	after                                    time.Duration // since the test began
	rss, pss, anonymous, private, shared     int           // KiB
	cpu                                      time.Duration // since the process began
	goroutines, threads, descriptors, heapKB int
}

const consumptionHead = "| %-9s | after | RSS | PSS | private | shared | anonymous | heap | CPU | goroutines | threads | descriptors |\n"

func (c consumption) row(name string) string {
	mib := func(kib int) string { return fmt.Sprintf("%.1f", float64(kib)/1024) }
	return fmt.Sprintf("| %-9s | %v | %s | %s | %s | %s | %s | %s | %.2f s | %d | %d | %d |\n", name, c.after.Round(time.Minute), mib(c.rss),
		mib(c.pss), mib(c.private), mib(c.shared), mib(c.anonymous), mib(c.heapKB), c.cpu.Seconds(), c.goroutines, c.threads, c.descriptors)
}

func newConsumer(t *testing.T, name, socket string) *consumer {
	t.Helper()
	all := running(name)
	if len(all) != 1 {
		t.Fatalf("processes of %s (and their parents): %v, want one", name, all)
	}
	c := &consumer{name: name, socket: socket}
	for pid := range all {
		c.pid = pid
	}
	return c
}

// sample records the agent. It fails if its process is gone.
func (c *consumer) sample(t *testing.T, began time.Time) {
	t.Helper()
	now := consumption{after: time.Since(began)}
	memory, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", c.pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(memory)) {
		fields := strings.Fields(line)
		size, _ := strconv.Atoi(fields[1]) // the first line is no size
		switch fields[0] {
		case "Rss:":
			now.rss = size
		case "Pss:":
			now.pss = size
		case "Anonymous:":
			now.anonymous = size
		case "Private_Clean:", "Private_Dirty:":
			now.private += size
		case "Shared_Clean:", "Shared_Dirty:":
			now.shared += size
		}
	}
	now.cpu = cpuTime(t, c.pid)
	var d report.Debug
	if err := askAgent(c.socket, "/v1/debug", &d); err != nil {
		t.Error(err)
		return
	}
	now.goroutines, now.threads, now.descriptors, now.heapKB = d.Goroutines, d.Threads, d.FileDescriptors, int(d.HeapBytes>>10)
	c.samples = append(c.samples, now)
	file, err := os.OpenFile(logPath("hour"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	_, _ = file.WriteString(now.row(c.name))
}

// cpuTime is the user and system time of a process, in ticks of 10 ms (proc(5), stat).
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	user, err := strconv.Atoi(fields[11])
	if err != nil {
		t.Fatal(err)
	}
	system, err := strconv.Atoi(fields[12])
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(user+system) * 10 * time.Millisecond
}

// report prints the samples of minutes 1, 10, 30, 60 and of the last one, and fails if counts have grown.
func (c *consumer) report(t *testing.T, minutes int) {
	t.Helper()
	text := fmt.Sprintf(consumptionHead, "agent")
	for number, s := range c.samples {
		if number > 0 && slices.Contains([]int{1, 10, 30, 60, minutes}, int(s.after.Round(time.Minute)/time.Minute)) {
			text += s.row(c.name)
		}
	}
	first, last := c.samples[0], c.samples[len(c.samples)-1]
	t.Logf("resident memory in MiB, CPU time since the process began:\n%sCPU time per minute: %v", text,
		time.Duration(float64(last.cpu-first.cpu)/(last.after-first.after).Minutes()).Round(time.Millisecond))
	for name, count := range map[string]func(consumption) int{
		"goroutines":  func(s consumption) int { return s.goroutines },
		"descriptors": func(s consumption) int { return s.descriptors },
	} {
		var counts []int
		for _, s := range c.samples[1:] { // the first has not served work yet
			counts = append(counts, count(s))
		}
		if grown(counts) {
			t.Errorf("%s of %s grow: %v", name, c.name, counts)
		}
	}
}

// grown reports whether all of the last third are greater than all of the first, by more than two requests take.
func grown(counts []int) bool {
	third := len(counts) / 3
	return third > 1 && slices.Min(counts[len(counts)-third:]) > slices.Max(counts[:third])+4
}
