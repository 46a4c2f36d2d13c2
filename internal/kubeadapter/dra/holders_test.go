package dra

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// The errors that become events of a pod do not name the work of others; the log has it.
func TestErrorsDoNotNameHolders(t *testing.T) {
	err := fmt.Errorf("claim: %w", join([]error{
		&HeldError{"gpu-1", "pod secret/a"}, ErrNoDevices, &SharesError{Device: "gpu-2", Want: 1, Held: 4, All: 4, Holders: []string{"claim secret/b", "claim secret/c"}},
	}))
	if strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
	if got, want := holdersOf(err), []string{"pod secret/a", "claim secret/b", "claim secret/c"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
