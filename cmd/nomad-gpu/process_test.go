package main

import (
	"testing"
	"time"
)

// A process that is of no more use stays long enough to be no burden to Nomad, which starts the next at
// once.
func TestLinger(t *testing.T) {
	for age, want := range map[time.Duration]time.Duration{
		0:                time.Minute,
		20 * time.Second: 40 * time.Second,
		time.Minute:      5 * time.Second,
		time.Hour:        5 * time.Second,
	} {
		if got := linger(age); got != want {
			t.Errorf("aged %s: %s, want %s", age, got, want)
		}
	}
}
