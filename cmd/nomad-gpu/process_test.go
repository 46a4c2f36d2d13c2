package main

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

// A process that is of no more use goes at once, unless it is so young that the next may well be of none.
func TestExitDelay(t *testing.T) {
	for age, want := range map[time.Duration]time.Duration{
		0:               5 * time.Second,
		2 * time.Second: 3 * time.Second,
		5 * time.Second: 0,
		time.Hour:       0,
	} {
		if got := exitDelay(age); got != want {
			t.Errorf("aged %s: %s, want %s", age, got, want)
		}
	}
}

// A process is told from another one, and from itself never.
func TestIncarnation(t *testing.T) {
	other := exec.CommandContext(t.Context(), "sleep", "60")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	mine, its := incarnation(os.Getpid()), incarnation(other.Process.Pid)
	if mine == "" || its == "" || mine == its || mine != incarnation(os.Getpid()) {
		t.Errorf("%q, %q", mine, its)
	}
	_ = other.Process.Kill()
	_ = other.Wait() // killed
	if gone := incarnation(other.Process.Pid); gone != "" {
		t.Errorf("a process that ended has the incarnation %q", gone)
	}
}
