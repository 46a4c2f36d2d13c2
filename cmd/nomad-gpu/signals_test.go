package main

import (
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// What reaches the agent's whole process group from its terminal is not the plugin's business; nor is a log
// that nobody reads.
func TestSignalsThatDoNotEndIt(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	a := run(t, m, shortDir(t), nil)
	a.healthy(8, 8)
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE} {
		for range 20 {
			if err := a.cmd.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
		}
	}
	a.said("[INFO]", "configuration comes from Nomad", "needs an agent restart")
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
