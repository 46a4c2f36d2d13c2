//go:build e2e

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// rescueRounds is the variable with how often TestRescue measures each of its times; the default is once, and 56 are the most: a budget has 64 GPUs of a
// node an hour at most.
const rescueRounds = "E2E_RESCUE_ROUNDS"

// measure has one workload of each orchestrator moved again and again: by hand, which is what the orchestrator itself takes, and by a fault and gpu-fleet.
func (r *teamRescue) measure(t *testing.T) {
	rounds := roundsOf(rescueRounds, 1)
	table := "| orchestrator | from | p50 | p99 | most | times |\n|---|---|---|---|---|---|\n"
	for _, w := range []workload{nomadWork("train"), r.kube.kubeWork("train")} {
		byHand := r.times(t, w, rounds, func(at place) {
			if err := w.stop(at); err != nil {
				t.Fatal(err)
			}
		})
		r.newLedger(t, settings(nil))
		byFault := r.times(t, w, rounds, func(at place) { r.fail(t, at) })
		table += row(w.orchestrator, w.byHand, byHand) + row(w.orchestrator, "XID 95", byFault)
	}
	t.Logf("until the replacement ran elsewhere:\n%s", table)
	write(t, "../logs/rescue-times.md", []byte(table))
}

func row(orchestrator, from string, took []time.Duration) string {
	sorted := slices.Sorted(slices.Values(took))
	at := func(percent int) string {
		return fmt.Sprintf("%.2f s", sorted[(len(sorted)-1)*percent/100].Seconds())
	}
	return "| " + strings.Join([]string{orchestrator, from, at(50), at(99), at(100), fmt.Sprint(len(sorted))}, " | ") + " |\n"
}

// times moves a workload again and again, and returns how long after the beginning of each move it ran elsewhere.
func (r *teamRescue) times(t *testing.T, w workload, rounds int, begin func(place)) (took []time.Duration) {
	t.Helper()
	at := awaitPlaces(t, w, 1)[0]
	for range rounds {
		time.Sleep(time.Second)
		began := time.Now()
		begin(at)
		next, one := w.awaitElsewhere(t, at, began)
		took = append(took, one)
		at = next
	}
	return took
}
