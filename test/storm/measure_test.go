package storm

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
)

// footprint is what the process needs.
type footprint struct {
	heap, rss   uint64 // bytes; of rss without what the simulated driver keeps
	descriptors int
	goroutines  int
	threads     int
	sets        uint64 // event sets made so far
}

func (f footprint) String() string {
	const mib = 1 << 20
	return fmt.Sprintf("heap %.1f MiB, RSS %.1f MiB, %d descriptors, %d goroutines, %d threads (%d event sets made)",
		float64(f.heap)/mib, float64(f.rss)/mib, f.descriptors, f.goroutines, f.threads, f.sets)
}

// setSize is what the simulated driver keeps for ever of each event set: it is recognised by its address.
const setSize = 8400

// measure takes the footprint in a calm, when what is on its way out has left: that takes a moment.
func (w *storm) measure() footprint {
	f := w.footprint()
	for range 5 {
		w.rest(50 * time.Millisecond)
		g := w.footprint()
		f.heap, f.rss = min(f.heap, g.heap), min(f.rss, g.rss)
		f.descriptors, f.goroutines, f.threads = min(f.descriptors, g.descriptors), min(f.goroutines, g.goroutines), min(f.threads, g.threads)
	}
	return f
}

func (w *storm) footprint() footprint {
	debug.FreeOSMemory() // collects, too
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	open, err := os.ReadDir("/proc/self/fd")
	must(w.t, err)
	calls, err := w.CallsOf(os.Getpid())
	must(w.t, err)
	sets := calls["nvmlEventSetCreate"] + calls["nvmlSystemEventSetCreate"]
	return footprint{
		heap: m.HeapAlloc, rss: kernelSays(w, "VmRSS")<<10 - min(sets*setSize, kernelSays(w, "VmRSS")<<10),
		descriptors: len(open), goroutines: runtime.NumGoroutine(), threads: int(kernelSays(w, "Threads")), sets: sets,
	}
}

// kernelSays is a number of /proc/self/status.
func kernelSays(w *storm, key string) uint64 {
	text, err := os.ReadFile("/proc/self/status")
	must(w.t, err)
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == key+":" {
			n, err := strconv.ParseUint(words[1], 10, 64)
			must(w.t, err)
			return n
		}
	}
	w.t.Fatalf("no %s in /proc/self/status", key)
	return 0
}

// compare fails if the process has grown, and takes its time about it: what is on its way out may take seconds.
func (w *storm) compare(early footprint) (end footprint) {
	w.until(recovery, func() bool { end = w.measure(); return end.growth(early) == "" })
	if grown := end.growth(early); grown != "" && w.ctx.Err() == nil {
		w.wrong("%s\n%s", grown, openFiles())
	}
	return end
}

// growth says what is more than chance. A thread, once made, stays with the Go runtime; how many calls hung at
// once is up to chance.
func (f footprint) growth(early footprint) string {
	const mib = 1 << 20
	for _, c := range []struct {
		what            string
		early, end, may uint64
	}{
		{"heap", early.heap, f.heap, early.heap/2 + 8*mib},
		{"RSS", early.rss, f.rss, early.rss/2 + 32*mib},
		{"descriptors", uint64(early.descriptors), uint64(f.descriptors), 4},
		{"goroutines", uint64(early.goroutines), uint64(f.goroutines), 12},
		{"threads", uint64(early.threads), uint64(f.threads), 24},
	} {
		if c.end > c.early+c.may && (!raced || c.what != "RSS") {
			return fmt.Sprintf("%s grew from %d to %d", c.what, c.early, c.end)
		}
	}
	return ""
}

// openFiles says what is open, and how often.
func openFiles() string {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err.Error()
	}
	count := map[string]int{}
	for _, e := range entries {
		to, _ := os.Readlink("/proc/self/fd/" + e.Name())
		kind, _, _ := strings.Cut(to, ":[") // "socket:[1234]"
		count[kind]++
	}
	return fmt.Sprint(count)
}
