//go:build e2e

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// rescueRounds is the variable with how often TestRescue measures each of its times; none is the default, and 40 are the most: so many GPUs does one
// ledger have for both.
const rescueRounds = "E2E_RESCUE_ROUNDS"

// measure has one workload of each orchestrator moved again and again: by hand, which is what the orchestrator itself takes, and by a fault and gpu-fleet.
func (r *teamRescue) measure(t *testing.T, rounds int) {
	works := []workload{nomadWork("train"), r.kube.kubeWork("train")}
	byHand, byFault := make([][]time.Duration, len(works)), make([][]time.Duration, len(works))
	for range rounds {
		for i, w := range works {
			byHand[i] = append(byHand[i], w.moved(t, func(at place) {
				if err := w.stop(at); err != nil {
					t.Fatal(err)
				}
			}))
		}
	}
	r.newLedger(t, settings(nil))
	for range rounds {
		for i, w := range works {
			byFault[i] = append(byFault[i], w.moved(t, func(at place) { r.fail(t, at) }))
		}
	}
	table := "| orchestrator | from | p50 | p99 | most | times |\n|---|---|---|---|---|---|\n"
	for i, w := range works {
		table += row(w.orchestrator, w.byHand, byHand[i]) + row(w.orchestrator, "XID 95", byFault[i])
	}
	t.Logf("until the replacement ran elsewhere:\n%s", table)
	write(t, "../logs/rescue-times.md", []byte(table))
}

// moved moves the workload, and returns how long after the beginning it ran elsewhere.
func (w workload) moved(t *testing.T, begin func(place)) time.Duration {
	t.Helper()
	at := awaitPlaces(t, w, 1)[0]
	time.Sleep(time.Second)
	began := time.Now()
	begin(at)
	_, took := w.awaitElsewhere(t, at, began)
	return took
}

func row(orchestrator, from string, took []time.Duration) string {
	sorted := slices.Sorted(slices.Values(took))
	at := func(percent int) string {
		return fmt.Sprintf("%.2f s", sorted[(len(sorted)-1)*percent/100].Seconds())
	}
	return "| " + strings.Join([]string{orchestrator, from, at(50), at(99), at(100), fmt.Sprint(len(sorted))}, " | ") + " |\n"
}
