package resetter_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// watched returns a world in which dcgm-exporter has the GPU open, and the operator has given commands that stop and
// start it.
func watched(t *testing.T) *world {
	w := newWorld(t, "GPU-1")
	w.pause = reset.Pause{Programs: []string{"dcgm-exporter"}, Stop: []string{"stop"}, Resume: []string{"start"}}
	dcgm := gpureset.Client{PID: 7, Name: "dcgm-exporter"}
	w.clients["GPU-1"] = []gpureset.Client{dcgm}
	w.command = func(command []string) proofcommand.Outcome {
		w.with(func() {
			if w.clients["GPU-1"] = nil; command[0] == "start" {
				w.clients["GPU-1"] = []gpureset.Client{dcgm}
			}
		})
		return proofcommand.Passed
	}
	return w
}

const watchedWhole = "take GPU-1, stop, driver released, nvidia-smi GPU-1, driver opened, recorded GPU-1, read, given back GPU-1, start"

// Beside a program that watches GPUs no reset began. One that the operator has listed is stopped for it and started
// again, also after one that failed.
func TestWatchersAreStoppedForAReset(t *testing.T) {
	for _, fails := range []error{nil, &gpureset.RefusedError{GPU: "GPU-1", Refusal: gpureset.NotSupported, Text: "its text"}} {
		synctest.Test(t, func(t *testing.T) {
			w := watched(t)
			w.resetErr = fails
			r, stop := w.start()
			defer stop()
			want := watchedWhole
			if fails != nil {
				want = strings.ReplaceAll(want, ", recorded GPU-1", "")
			}
			if got := w.happened(); got != want || len(r.Problems()) > 0 {
				t.Errorf("%s, %v", got, r.Problems())
			}
			if disk := w.disk["stop"]; !strings.Contains(disk, `"watchersStopped": true`) {
				t.Errorf("before they are stopped the disk has %s", disk)
			}
			if onDisk, err := os.ReadFile(w.file); err != nil || strings.Contains(string(onDisk), "watchersStopped") {
				t.Errorf("afterwards: %s, %v", onDisk, err)
			}
		})
	}
}

// Another program beside it is not stopped, and neither is one that the operator has not listed.
func TestOnlyListedWatchersAreStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := watched(t)
		w.clients["GPU-1"] = append(w.clients["GPU-1"], gpureset.Client{PID: 9, Name: "python3"})
		r, stop := w.start()
		defer stop()
		if got, e := w.happened(), record(r, "GPU-1").Last; got != "take GPU-1, given back GPU-1" || e == nil || e.Text != "GPU-1 is open in python3 (pid 9)" {
			t.Errorf("%s, %+v", got, e)
		}
	})
}

// The agent is killed at any step after they were stopped: the next process starts them, but not while the nvidia-smi
// of the one before runs.
func TestKilledWhileWatchersAreStopped(t *testing.T) {
	for _, event := range strings.Split(watchedWhole, ", ") {
		synctest.Test(t, func(t *testing.T) {
			w := watched(t)
			_, stop := w.start()
			stop()
			next := watched(t)
			next.heals, next.policy.Mode, next.runs = false, reset.Off, true
			check.NoError(t, os.WriteFile(next.file, []byte(w.disk[event]), 0o600))
			r, stop := next.start()
			defer stop()
			if time.Sleep(2 * time.Minute); next.happened() != "" {
				t.Errorf("%s: started while nvidia-smi runs", event)
			}
			next.with(func() { next.runs = false })
			time.Sleep(time.Minute)
			want := ""
			if strings.Contains(w.disk[event], `"watchersStopped"`) {
				want = "start"
			}
			if got := next.happened(); got != want || r.Decision().State.Watchers {
				t.Errorf("%s: %q, want %q", event, got, want)
			}
		})
	}
}

// What the killed agent's command has left running is ended before the programs are started: else it could stop them
// again.
func TestCommandOfAKilledAgentIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := watched(t)
		_, stop := w.start()
		stop()
		next := watched(t)
		next.heals, next.policy.Mode, next.folder = false, reset.Off, t.TempDir()
		check.NoError(t, os.WriteFile(next.file, []byte(w.disk["stop"]), 0o600))
		left := filepath.Join(next.folder, "tandem-proof-LEFT.lock")
		check.NoError(t, os.WriteFile(left, nil, 0o600))
		started, command := false, next.command
		next.command = func(words []string) proofcommand.Outcome {
			_, err := os.Stat(left)
			started = started || err != nil
			return command(words)
		}
		_, stop = next.start()
		defer stop()
		if time.Sleep(time.Minute); !started {
			t.Errorf("started beside it: %s", next.happened())
		}
	})
}

// A command that fails is tried again each minute, is a problem until it succeeds, and keeps other resets from
// beginning. An nvidia-smi that hangs does not keep them stopped for ever.
func TestWatchersThatAreNotStarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := watched(t)
		works, outcome := w.command, proofcommand.Failed
		w.command = func(command []string) proofcommand.Outcome {
			if command[0] == "start" && outcome == proofcommand.Failed {
				return outcome
			}
			return works(command)
		}
		r, stop := w.start()
		time.Sleep(3*time.Minute + time.Second)
		all := r.Problems()
		if n := strings.Count(w.happened(), "start"); n < 3 || len(all) != 1 || all[0].Code != problem.WatchersStopped {
			t.Errorf("tried %d times, %v", n, all)
		}
		if plan := r.Plan(t.Context(), "GPU-1", false); len(plan.Keeps) == 0 || plan.Keeps[0].Code != reset.WaitPaused {
			t.Errorf("%+v", plan)
		}
		stop()
		outcome = proofcommand.Passed
		w.runs = true
		r, stop = w.start()
		defer stop()
		time.Sleep(6 * time.Minute)
		if got := w.happened(); got != "start" || len(r.Problems()) > 0 {
			t.Errorf("after five minutes: %s, %v", got, r.Problems())
		}
	})
}

// What can't be stopped is no reason to reset the GPU; it is started again in any case.
func TestWatchersThatAreNotStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := watched(t)
		w.command = func(command []string) proofcommand.Outcome {
			return map[string]proofcommand.Outcome{"stop": proofcommand.CouldNotRun, "start": proofcommand.Passed}[command[0]]
		}
		r, stop := w.start()
		defer stop()
		if got, e := w.happened(), record(r, "GPU-1").Last; got != "take GPU-1, stop, given back GPU-1, start" || e.Outcome != reset.InUse || !strings.Contains(e.Text, "its text") {
			t.Errorf("%s, %+v", got, e)
		}
	})
}
