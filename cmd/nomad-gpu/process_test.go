package main

import (
	"testing"
	"time"
)

// A process that is of no more use goes at once, unless it is so young that the next may well be of none.
func TestLinger(t *testing.T) {
	for age, want := range map[time.Duration]time.Duration{
		0:               5 * time.Second,
		2 * time.Second: 3 * time.Second,
		5 * time.Second: 0,
		time.Hour:       0,
	} {
		if got := linger(age); got != want {
			t.Errorf("aged %s: %s, want %s", age, got, want)
		}
	}
}
