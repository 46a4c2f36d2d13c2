package process

import (
	"os"
	"os/exec"
	"testing"
)

// Two processes differ, and one process is the same each time.
func TestIncarnation(t *testing.T) {
	other := exec.CommandContext(t.Context(), "sleep", "60")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	mine, others := Incarnation(os.Getpid()), Incarnation(other.Process.Pid)
	if mine == "" || others == "" || mine == others || mine != Incarnation(os.Getpid()) {
		t.Errorf("%q, %q", mine, others)
	}
	_ = other.Process.Kill()
	_ = other.Wait() // killed
	if ended := Incarnation(other.Process.Pid); ended != "" {
		t.Errorf("a process that ended has the incarnation %q", ended)
	}
}
