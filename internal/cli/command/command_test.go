package command_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/tandem-gpu/tandem/internal/cli/command"
)

// An error may have the name of a tenant's process: the terminal shows it, and obeys nothing in it.
func TestErrorsArePrintable(t *testing.T) {
	var out bytes.Buffer
	err := errors.New("GPU-1 is open in \x1b]0;owned\a\x1b[2J (pid 7)\nanother problem\r")
	command.WriteError(&out, "k8s-gpu", err)
	if got, want := out.String(), "k8s-gpu: GPU-1 is open in ?]0;owned??[2J (pid 7)\nk8s-gpu: another problem?\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
