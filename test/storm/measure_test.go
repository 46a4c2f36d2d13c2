package storm

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
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

// setSize is what the simulated driver never frees of each event set, as it recognises a set by its address.
const setSize = 8400

// measure returns the footprint in a quiet period, after goroutines and files that are about to end.
func (w *oneAgent) measure() footprint {
	f := w.footprint()
	for range 5 {
		w.rest(50 * time.Millisecond)
		g := w.footprint()
		f.heap, f.rss = min(f.heap, g.heap), min(f.rss, g.rss)
		f.descriptors, f.goroutines, f.threads = min(f.descriptors, g.descriptors), min(f.goroutines, g.goroutines), min(f.threads, g.threads)
	}
	return f
}

func (w *oneAgent) footprint() footprint {
	debug.FreeOSMemory() // collects, too
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	calls, err := w.CallsOf(os.Getpid())
	must(w.t, err)
	sets, rss := calls["nvmlEventSetCreate"]+calls["nvmlSystemEventSetCreate"], residentBytes(w.t)
	return footprint{
		heap: m.HeapAlloc, rss: rss - min(sets*setSize, rss),
		descriptors: len(files(w.t, "/proc/self/fd")), goroutines: runtime.NumGoroutine(), threads: len(files(w.t, "/proc/self/task")), sets: sets,
	}
}

// files are those in a directory.
func files(t testing.TB, dir string) []os.DirEntry {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	return entries
}

// residentBytes is the memory that the process has (proc_pid_statm(5)).
func residentBytes(t testing.TB) uint64 {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	must(t, err)
	var size, resident uint64
	_, err = fmt.Sscan(string(text), &size, &resident)
	must(t, err)
	return resident * uint64(os.Getpagesize())
}

// compare fails the test if the process has grown. What is about to end may take seconds.
func (w *oneAgent) compare(early footprint) (end footprint) {
	w.until(recovery, func() bool { end = w.measure(); return end.growth(early) == "" })
	if grown := end.growth(early); grown != "" && w.ctx.Err() == nil {
		w.fail("%s\n%s", grown, openFiles(w.t))
	}
	return end
}

// growth describes what has grown by more than chance; "" if nothing has. The Go runtime keeps each thread; how many calls hung at the
// same time is random. The race detector keeps memory for every goroutine, so that only the heap counts with it.
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
		if c.end > c.early+c.may && (!raceDetector() || c.what != "RSS") {
			return fmt.Sprintf("%s grew from %d to %d", c.what, c.early, c.end)
		}
	}
	return ""
}

// raceDetector reports whether the test was built with -race.
func raceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.ContainsFunc(info.Settings, func(s debug.BuildSetting) bool { return s.Key == "-race" && s.Value == "true" })
}

// openFiles are the open files by kind.
func openFiles(t testing.TB) string {
	count := map[string]int{}
	for _, f := range files(t, "/proc/self/fd") {
		to, _ := os.Readlink("/proc/self/fd/" + f.Name())
		kind, _, _ := strings.Cut(to, ":[") // "socket:[1234]"
		count[kind]++
	}
	return fmt.Sprint(count)
}
