package main

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// What reaches the agent's whole process group from its terminal is not the plugin's business; nor is a log
// that nobody reads.
func TestSignalsThatDoNotEndIt(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	a := run(t, m, shortDir(t), nil)
	a.healthy(8, 8)
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE} {
		for range 20 {
			if err := a.cmd.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
		}
	}
	a.said("[INFO]", "SIGHUP", "needs an agent restart")
	if err := m.XID(2, 95); err != nil {
		t.Fatal(err)
	}
	a.healthy(8, 7)
	if _, err := a.Reserve([]string{m.UUID(0)}); err != nil {
		t.Error(err)
	}
	if a.client.Exited() {
		t.Error("it ended")
	}
}

// A GPU that is plugged in raises no event: the next reading finds it, and SIGHUP brings that forward.
func TestHangupReadsTheMachine(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	a := run(t, m, shortDir(t), nil)
	a.healthy(8, 8)
	if err := m.Add(8, "uuid = GPU-00000000-0000-0000-0000-000000000008", "pci = 0000:ef:00.0", "minor = 8"); err != nil {
		t.Fatal(err)
	}
	if err := a.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	a.healthy(9, 9)
}

// Nothing of the driver is held between the two signals, and Nomad is told why.
func TestQuiesceBySignal(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	a := run(t, m, shortDir(t), nil)
	a.healthy(8, 8)
	order := func(s os.Signal) {
		t.Helper()
		if err := a.cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	order(control.QuiesceSignal)
	a.healthy(8, 0)
	a.said("[WARN]", "command by signal executed", "quiesce")
	if held, err := m.HeldBy(a.cmd.Process.Pid); err != nil || len(held) > 0 {
		t.Errorf("%v, held: %v", err, held)
	}
	for _, d := range a.devices() {
		if !strings.Contains(d.HealthDesc, "maintenance") {
			t.Errorf("%s: %s", d.ID, d.HealthDesc)
		}
	}
	order(control.ResumeSignal)
	a.healthy(8, 8)
}

// A signal that comes before Nomad has said anything is taken as later ones are.
func TestHangupAtTheStart(t *testing.T) {
	p := plugged(t)
	p.signal(t, syscall.SIGHUP)
	p.configure(t)
	p.follow(t, true)
	p.client.Kill()
	if !p.cmd.ProcessState.Success() {
		t.Errorf("ended with %s", p.cmd.ProcessState)
	}
}

// Who asks again while the plugin is ending does not want to wait for it.
func TestSecondSignalKills(t *testing.T) {
	for name, again := range map[string]syscall.Signal{"SIGINT": syscall.SIGINT, "SIGTERM": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			p := plugged(t)
			states["the disk hangs"](t, p) // it waits for its last word, a second
			p.signal(t, syscall.SIGTERM)
			await(t, "the end", patience, func() bool {
				_ = p.cmd.Process.Signal(again) // it may be gone
				return p.client.Exited()
			})
			p.client.Kill() // waits for the process
			status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
			if !ok || !status.Signaled() || status.Signal() != again {
				t.Errorf("ended with %s, want %s", p.cmd.ProcessState, again)
			}
		})
	}
}
