package agentapi

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
)

// A list is read to its end, or fails. Of an allocation that has ended the job is not kept.
func TestReadAllocations(t *testing.T) {
	live, dead := alloc("a", "train", "running", "null"), alloc("b", "train", "complete", "null")
	for text, c := range map[string]struct {
		n   int
		err string
	}{
		"null":                        {},
		"[]":                          {},
		"[" + live + "]":              {n: 1},
		"[" + live + "," + dead + "]": {n: 2},
		"[" + live + ",":              {err: "EOF"},
		"[" + live:                    {err: "EOF"},
		"":                            {err: "EOF"},
		live:                          {err: "want a list of allocations"},
		"[7]":                         {err: "cannot unmarshal number"},
	} {
		all, _, err := readAllocations(t.Context(), json.NewDecoder(strings.NewReader(text)))
		if (c.err == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.err) || err == nil && len(all) != c.n {
			t.Errorf("%q: %d, %v; want %d, %q", text, len(all), err, c.n, c.err)
		}
		for _, a := range all {
			if (a.Job != nil) != (a.ID == "a") {
				t.Errorf("allocation %s: job %v", a.ID, a.Job)
			}
		}
	}
}

// The pause after an answer grows with the time that it took to read, so that the agent's CPU time does not grow with the allocations that the servers keep.
func TestPauseAfterLongAnswers(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{0: minPause, 10 * time.Millisecond: minPause, 200 * time.Millisecond: 1800 * time.Millisecond, time.Minute: maxPause} {
		f := follower{took: took}
		if got := f.pause(nil); got != want {
			t.Errorf("%v: %v, want %v", took, got, want)
		}
	}
}

// BenchmarkManyAllocations reads the list of a node on which 1,000 short jobs have ended, on one CPU. It reports how much too late another goroutine of the process
// ran at worst, which waits for a millisecond each time.
func BenchmarkManyAllocations(b *testing.B) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	all := make([]string, 1000)
	for i := range all { // with as much beside it as Nomad 1.11 has
		all[i] = strings.TrimSuffix(alloc(fmt.Sprint(i), "train", "complete", "null"), "}") + `,"Metrics":[` + strings.Repeat(`{"Name":"a metric of the scheduler","Value":0.1234},`, 110) + `{}]}`
	}
	text := "[" + strings.Join(all, ",") + "]"
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	worst, end := time.Duration(0), make(chan struct{})
	go func() {
		for {
			select {
			case <-end:
				return
			default:
			}
			began := time.Now()
			time.Sleep(time.Millisecond)
			worst = max(worst, time.Since(began)-time.Millisecond)
		}
	}()
	for b.Loop() {
		if _, _, err := readAllocations(b.Context(), json.NewDecoder(strings.NewReader(text))); err != nil {
			b.Fatal(err)
		}
	}
	end <- struct{}{}
	b.ReportMetric(float64(worst.Microseconds())/1000, "ms-late")
}
