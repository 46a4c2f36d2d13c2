package dra

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// BenchmarkPrepare measures calls with one claim each, so many at once, as the kubelet makes them for pods that start together: each time
// is that of one call over the socket. The API server answers immediately.
func BenchmarkPrepare(b *testing.B) {
	for _, n := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("%d claims", n), func(b *testing.B) {
			r := newRigB(b, 64)
			names := make([]string, n)
			for i := range names {
				names[i] = fmt.Sprintf("c%d", i)
				r.api.put(newClaim(names[i], result(coretest.GPU(i))))
			}
			var prepare, unprepare []time.Duration
			for b.Loop() {
				prepare = append(prepare, r.atOnce(names, func(name string) error { return r.prepareQuietly(r.conn, name) })...)
				unprepare = append(unprepare, r.atOnce(names, func(name string) error { return r.unprepareQuietly(r.conn, name) })...)
			}
			for what, times := range map[string][]time.Duration{"prepare": prepare, "unprepare": unprepare} {
				slices.Sort(times)
				b.ReportMetric(float64(times[len(times)/2].Microseconds())/1000, what+"-p50-ms")
				b.ReportMetric(float64(times[len(times)*99/100].Microseconds())/1000, what+"-p99-ms")
			}
		})
	}
}

// BenchmarkRepeatedPrepare measures the answer from a record.
func BenchmarkRepeatedPrepare(b *testing.B) {
	r := newRigB(b, 8)
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	for b.Loop() {
		if err := r.prepareQuietly(r.conn, "a"); err != nil {
			b.Fatal(err)
		}
	}
}

// atOnce makes a call for each claim and returns how long each took.
func (r *rig) atOnce(names []string, call func(string) error) []time.Duration {
	took := make([]time.Duration, len(names))
	var running sync.WaitGroup
	for i, name := range names {
		running.Go(func() {
			began := time.Now()
			if err := call(name); err != nil {
				r.Error(err)
			}
			took[i] = time.Since(began)
		})
	}
	running.Wait()
	return took
}

// newRigB returns a rig of n GPUs for a benchmark, with the state on the disk of the current directory.
func newRigB(b *testing.B, n int) *rig {
	b.Helper()
	state, err := os.MkdirTemp(".", ".bench")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = os.RemoveAll(state) })
	r := newRig(b, build(coretest.GPUs(n), health.Ledger{}, config()), func(a *Adapter) { a.opts.StateDir = state })
	return r
}
