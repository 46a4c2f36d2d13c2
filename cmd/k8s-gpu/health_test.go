package main

import (
	"os/exec"
	"strings"
	"testing"
	"time"
)

// ask runs a verb beside the agents of a state directory.
func ask(t *testing.T, stateDir string, args ...string) (string, error) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), binary(t), append(args, "--state-dir="+stateDir)...).CombinedOutput()
	return string(out), err
}

// says fails unless a verb succeeds and says all of want.
func says(t *testing.T, stateDir, want string, args ...string) {
	t.Helper()
	out, err := ask(t, stateDir, args...)
	if err != nil || !strings.Contains(out, want) {
		t.Errorf("%v: %v, want %q:\n%s", args, err, want, out)
	}
}

// metrics waits until /metrics has every line.
func (a *testAgent) metrics(lines ...string) {
	a.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		_, page := a.get("/metrics")
		missing := ""
		for _, line := range lines {
			if !strings.Contains(page, line) {
				missing = line
			}
		}
		if missing == "" {
			return
		}
		select {
		case <-tick.C:
		case <-a.ctx.Done():
			a.Fatalf("/metrics never has %s:\n%s", missing, page)
		}
	}
}
