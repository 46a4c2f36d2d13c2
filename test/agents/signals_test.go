package agents

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/operator/control"
)

// Signals with another meaning do not end an agent, also not the SIGINT of a terminal to the process group of Nomad.
func TestSignalsThatDoNotEndIt(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		signals, answer := []syscall.Signal{syscall.SIGHUP, syscall.SIGPIPE}, []string{"INFO", "configuration reloaded: nothing changed"}
		if a.program == nomadGPU {
			signals, answer = append(signals, syscall.SIGINT), []string{"INFO", "SIGHUP", "needs an agent restart"}
		}
		a.startHealthy()
		a.signal(control.QuiesceSignal)
		a.healthy(8, 0)
		a.logs("WARN", "command by signal executed", "quiesce")
		if held, err := a.driver.HeldBy(a.cmd.Process.Pid); err != nil || len(held) > 0 {
			a.Errorf("%v, held: %v", err, held)
		}
		for id, d := range a.devices() {
			if !strings.Contains(d.Reason, "maintenance") {
				a.Errorf("%s: %s", id, d.Reason)
			}
		}
		a.signal(control.ResumeSignal)
		a.healthy(8, 8)
		for range 20 {
			a.signal(signals...)
		}
		a.signal(control.QuiesceSignal, syscall.SIGHUP)
		a.logs(answer[0], answer[1:]...)
		a.logsTimes("command=quiesce", 2) // two signals that are pending at once have no order
		a.signal(control.ResumeSignal)
		a.logsTimes("command=resume", 2)
		a.await("an XID makes GPU 2 unhealthy", func() bool {
			a.xid(2, 95) // again: an event is lost while the driver is not open
			return !a.devices()[a.driver.UUID(2)].Healthy && a.devices()[a.driver.UUID(0)].Healthy
		})
		a.healthy(8, 7)
		a.allocates(0)
		a.alive()
		if a.exited() {
			a.Error("it has ended")
		}
	})
}

// A SIGHUP that comes early, and any signals while the agent is ending, change nothing.
func TestSignalsAtTheStartAndAtTheEnd(t *testing.T) {
	t.Parallel()
	for _, state := range []string{"the disk hangs", "nvmlInit hangs"} {
		t.Run(state, func(t *testing.T) {
			both(t, "h100x8", map[string]any{"call_deadline": "500ms"}, func(a *agent) {
				states[state].reach(a)
				a.signal(syscall.SIGHUP)
				a.logs("INFO", map[string]string{nomadGPU: "SIGHUP", k8sGPU: "nothing changed"}[a.program])
				a.stopBy(func() {
					a.signal(syscall.SIGTERM)
					for _, s := range []syscall.Signal{control.QuiesceSignal, syscall.SIGHUP, control.ResumeSignal, syscall.SIGHUP} {
						_ = a.cmd.Process.Signal(s) // it may have ended
					}
				})
			})
		})
	}
	t.Run("not configured", func(t *testing.T) {
		t.Parallel()
		a := newAgent(t, nomadGPU, "h100x8", nil)
		a.launch()
		a.signal(syscall.SIGHUP)
		a.configure()
		a.follow()
		a.healthy(8, 8)
		a.stop()
	})
}

// A log that is not read, and one that has no reader any more, delays neither the detection of a fault nor an answer nor the end.
func TestLogIsNotRead(t *testing.T) {
	t.Parallel()
	for name, closed := range map[string]bool{"full": false, "closed": true} {
		t.Run(name, func(t *testing.T) {
			both(t, "h100x8", map[string]any{"health_period": "200ms"}, func(a *agent) {
				log := a.logToFIFO()
				if !closed {
					fill(a, log)
				}
				a.start()
				a.healthy(8, 8)
				if closed {
					a.must(log.Close())
				}
				a.signal(syscall.SIGHUP, syscall.SIGHUP, syscall.SIGHUP)
				a.xid(2, 95)
				a.must(a.driver.Lose(5))
				a.healthy(8, 6)
				a.allocates(0)
				a.stop()
			})
		})
	}
}

// logToFIFO makes the log of the agent a FIFO with a reader.
func (a *agent) logToFIFO() *os.File {
	a.Helper()
	fifo := filepath.Join(a.dir, "log")
	a.must(syscall.Mkfifo(fifo, 0o600))
	log, err := os.OpenFile(fifo, os.O_RDWR, 0) // fifo(7): does not wait for the other end
	a.must(err)
	a.Cleanup(func() { _ = log.Close() })
	script := fmt.Sprintf("#!/bin/sh\nexec %s \"$@\" 2>%s\n", a.binary, fifo)
	a.binary = filepath.Join(a.dir, a.program)
	a.must(os.WriteFile(a.binary, []byte(script), 0o700))
	return log
}

// fill writes into a pipe until it is full.
func fill(a *agent, pipe *os.File) {
	a.Helper()
	fd, err := syscall.Open(pipe.Name(), syscall.O_WRONLY|syscall.O_NONBLOCK, 0) // another open file: the agent's writes shall block
	a.must(err)
	defer func() { _ = syscall.Close(fd) }()
	for _, size := range []int{4096, 1} {
		for err = nil; err == nil; {
			_, err = syscall.Write(fd, make([]byte, size))
		}
		if !errors.Is(err, syscall.EAGAIN) {
			a.Fatal(err)
		}
	}
}

// While the state disk hangs, there are no devices, and the agent works otherwise. They are there when the disk is back. What it
// has is no history here, so no GPU takes work before something shows that it has no fault.
func TestDiskHangs(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		a.hangDisk()
		a.start()
		if a.program == nomadGPU {
			a.await("the first list", func() bool { return len(a.nomad.Fingerprints()) > 0 })
			if _, err := a.allocate(a.driver.UUID(0)); err == nil || !strings.Contains(err.Error(), "does the disk hang?") {
				a.Errorf("Reserve: %v, want a text about the disk", err)
			}
		} else {
			a.logs("", "does the disk hang")
		}
		a.healthy(0, 0)
		w, err := os.OpenFile(a.history(), os.O_WRONLY, 0)
		a.must(err, w.Close())
		a.healthy(8, 0)
		a.prints("FAULTS_UNKNOWN", "inspect")
	})
}
