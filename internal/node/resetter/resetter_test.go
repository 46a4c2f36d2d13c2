package resetter_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/resetter"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

const whole = "take GPU-1, driver released, nvidia-smi GPU-1, driver opened, recorded GPU-1, read, given back GPU-1"

// A faulty GPU that nothing uses is reset: each step in its order, and on disk before it.
func TestReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		w.persists["GPU-1"] = true
		r, stop := w.start()
		defer stop()
		if got := w.happened(); got != whole {
			t.Errorf("%s; %+v", got, r.Decision().Waits)
		}
		for event, want := range map[string]string{
			"take GPU-1": `"number": 1`, "driver released": `"running"`, "nvidia-smi GPU-1": `"called": true`, "given back GPU-1": `"outcome": "done"`,
		} {
			if !strings.Contains(w.disk[event], want) {
				t.Errorf("at %q the disk has %s", event, w.disk[event])
			}
		}
		if !strings.Contains(w.disk["nvidia-smi GPU-1"], `"persistence": true`) || strings.Contains(w.disk["given back GPU-1"], `"persistence"`) {
			t.Error("the persistence mode is not on disk while nvidia-smi runs, or still after it")
		}
		one := record(r, "GPU-1")
		if one.Last == nil || one.Last.Outcome != reset.Done || one.Running != nil || one.Last.Cause != "XID_95" || r.Resets() != "" {
			t.Errorf("%+v", one)
		}
		time.Sleep(time.Hour)
		if got := w.happened(); got != "" || len(r.Problems()) != 0 {
			t.Errorf("afterwards: %s, %v", got, r.Problems())
		}
	})
}

// case 19: a fault that outlasts two resets is left to a person, also after a restart.
func TestAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		w.heals = false
		_, stop := w.start()
		time.Sleep(time.Hour)
		if got := w.happened(); got != whole+", "+whole {
			t.Error(got)
		}
		stop()
		r, stop := w.start()
		defer stop()
		time.Sleep(time.Hour)
		all := r.Decision().Waits
		if got := w.happened(); got != "" || len(all) != 1 || all[0].Code != reset.WaitAttempts || !all[0].Alert {
			t.Errorf("after a restart: %s, %+v", got, all)
		}
	})
}

// case 18: a process that has the GPU open is named, and nothing is closed for it; it is tried again when that has ended.
func TestOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		w.clients["GPU-1"] = []gpureset.Client{{PID: 2114, Name: "python3", Group: "/kubepods/pod7"}}
		r, stop := w.start()
		defer stop()
		if got := w.happened(); got != "take GPU-1, given back GPU-1" {
			t.Error(got)
		}
		if e := record(r, "GPU-1").Last; e == nil || e.Outcome != reset.InUse || e.Text != "GPU-1 is open in python3 (pid 2114, control group /kubepods/pod7)" {
			t.Errorf("%+v", e)
		}
		w.with(func() { w.clients = nil })
		time.Sleep(time.Hour)
		if got := w.happened(); got != whole {
			t.Errorf("afterwards: %s", got)
		}
	})
}

// The MPS control daemon of a pool without work does not keep a person's reset from beginning: it ends when the GPU is
// taken.
func TestOpenInAnMPSDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		daemon := gpureset.Client{PID: 7, Name: "nvidia-cuda-mps"}
		r, stop := w.start()
		defer stop()
		time.Sleep(time.Hour)
		for name, clients := range map[string][]gpureset.Client{"alone": {daemon}, "beside a process": {daemon, {PID: 8, Name: "python3"}}} {
			w.with(func() { w.clients["GPU-1"] = clients })
			plan := r.Plan(t.Context(), "GPU-1", false)
			if keeps := len(plan.Keeps) > 0; keeps != (len(clients) > 1) {
				t.Errorf("%s: %+v", name, plan)
			}
		}
	})
}

// Another agent that does not close the driver in its time, and this one, are in use: the driver is opened again, and the next try is later.
func TestNotClosed(t *testing.T) {
	const tried = "take GPU-1, driver released, driver opened, read, given back GPU-1"
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		w.with(func() {
			w.on = func(event string) {
				if event == "driver released" {
					w.with(func() { w.clients["GPU-1"] = []gpureset.Client{{PID: 3, Name: "dcgm"}} })
				}
			}
		})
		r, stop := w.start()
		time.Sleep(releaseTime)
		if got, e := w.happened(), record(r, "GPU-1").Last; got != tried || e == nil || e.Outcome != reset.InUse || !strings.Contains(e.Text, "dcgm (pid 3)") {
			t.Errorf("another process: %s, %+v", got, e)
		}
		stop()

		w = newWorld(t, "GPU-1")
		w.waitErr = errors.New("nvmlDeviceGetMemoryInfo does not return")
		r, stop = w.start()
		defer stop()
		time.Sleep(releaseTime)
		if got, e := w.happened(), record(r, "GPU-1").Last; got != tried || e == nil || e.Outcome != reset.InUse || !strings.Contains(e.Text, "does not return") {
			t.Errorf("a call that hangs: %s, %+v", got, e)
		}
	})
}

// releaseTime is for how long the driver is waited for at most, and a little more.
const releaseTime = 11 * time.Second

// case 20: nvidia-smi's refusals are final for the attempt, and those for good for the fault.
func TestRefused(t *testing.T) {
	for refusal, want := range map[gpureset.Refusal]reset.Outcome{
		gpureset.InUse: reset.InUse, gpureset.NotSupported: reset.Refused, gpureset.Linked: reset.Refused, gpureset.NotPermitted: reset.Refused,
		gpureset.Other: reset.Failed, gpureset.TimedOut: reset.Failed, gpureset.NotFound: reset.Failed,
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "GPU-1")
			w.resetErr = &gpureset.RefusedError{GPU: "GPU-1", Refusal: refusal, Text: "its text"}
			r, stop := w.start()
			defer stop()
			const calls = "take GPU-1, driver released, nvidia-smi GPU-1, driver opened, read, given back GPU-1"
			if got, e := w.happened(), record(r, "GPU-1").Last; got != calls || e == nil || e.Outcome != want || e.Text != "its text" {
				t.Errorf("%v: %s, %+v", refusal, got, e)
			}
			time.Sleep(24 * time.Hour)
			if again := strings.Count(w.happened(), "nvidia-smi"); want == reset.Refused && again != 0 || want == reset.Failed && again != 1 {
				t.Errorf("%v: tried again %d times", refusal, again)
			}
		})
	}
}

// A component that has gone has called nothing: that is no attempt, and the driver is not released again at once.
func TestUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		w.resetErr = &gpureset.UnavailableError{Remedy: "run it", Err: errors.New("no process serves reset.sock")}
		r, stop := w.start()
		defer stop()
		if one := record(r, "GPU-1"); !strings.Contains(w.happened(), "nvidia-smi") || one.Attempts != 0 || one.Refusals != 1 || !strings.Contains(one.Last.Text, "run it") {
			t.Errorf("%+v", one)
		}
	})
}

// case 21: a persistence mode that was not restored is a problem, and is restored as soon as that succeeds, also by the next process.
func TestPersistence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		w.persists["GPU-1"], w.leaves = true, true
		r, stop := w.start()
		if all := r.Problems(); len(all) != 1 || all[0].Code != problem.PersistenceMode || !strings.Contains(all[0].Remedy, "nvidia-smi -pm 1 -i GPU-1") {
			t.Errorf("%v", all)
		}
		if one := record(r, "GPU-1"); one.Last.Outcome != reset.Done || !one.Persistence {
			t.Errorf("the GPU was reset: %+v", one)
		}
		time.Sleep(3 * time.Minute)
		if n := strings.Count(w.happened(), "restore GPU-1"); n < 3 || n > 4 {
			t.Errorf("tried %d times", n)
		}
		stop()
		for _, mode := range []reset.Mode{reset.Off, reset.Act} {
			w.policy.Mode, w.leaves = mode, mode == reset.Off
			r, stop = w.start()
			synctest.Wait()
			if n := len(r.Problems()); w.leaves != (n == 1) || w.leaves != record(r, "GPU-1").Persistence {
				t.Errorf("%v: %v, %+v", mode, r.Problems(), record(r, "GPU-1"))
			}
			stop()
		}
		if !w.persists["GPU-1"] {
			t.Error("the persistence mode is off")
		}
	})
}

// case 22: an agent that is killed at any step knows afterwards whether nvidia-smi may have been called, and restores
// what that has changed when that nvidia-smi has ended.
func TestKilled(t *testing.T) {
	for _, event := range strings.Split(whole, ", ") {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "GPU-1")
			w.persists["GPU-1"], w.heals = true, false
			_, stop := w.start()
			stop()
			next := newWorld(t, "GPU-1")
			next.heals, next.policy.Mode, next.runs = false, reset.Off, true
			check.NoError(t, os.WriteFile(next.file, []byte(w.disk[event]), 0o600))
			r, stop := next.start()
			defer stop()
			one, called := record(r, "GPU-1"), strings.Contains(w.disk[event], `"called": true`)
			if time.Sleep(2 * time.Minute); next.happened() != "" || len(r.Problems()) > 0 {
				t.Errorf("%s: while nvidia-smi runs: %v", event, r.Problems())
			}
			next.with(func() { next.runs = false })
			time.Sleep(time.Minute)
			switch {
			case one.Running != nil:
				t.Errorf("%s: it still runs", event)
			case event == "given back GPU-1":
				if one.Attempts != 1 || one.Last.Outcome != reset.Done {
					t.Errorf("%s: %+v", event, one)
				}
			case called:
				if one.Attempts != 1 || one.Last.Outcome != reset.Interrupted || next.happened() != "restore GPU-1" {
					t.Errorf("%s: %+v", event, one)
				}
			case one.Attempts != 0 || one.NotBegun == "" || next.happened() != "":
				t.Errorf("%s: %+v", event, one)
			}
		})
	}
}

// With a policy that is off, too, the mode of a GPU is restored that is not listed when the agent starts, and the driver is not open yet.
func TestRestoreWhenListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		w.persists["GPU-1"], w.leaves = true, true
		_, stop := w.start()
		stop()
		w.policy.Mode, w.leaves = reset.Off, false
		all := w.seen.GPUs
		w.seen.GPUs = nil
		r, stop := w.start()
		defer stop()
		w.with(func() { w.seen.GPUs, w.events = all, nil })
		time.Sleep(90 * time.Second)
		if got := w.happened(); got != "restore GPU-1" || record(r, "GPU-1").Persistence {
			t.Errorf("%s, %+v", got, record(r, "GPU-1"))
		}
		if time.Sleep(time.Hour); w.happened() != "" {
			t.Error("restored again")
		}
	})
}

// While a reset goes on, no other one begins, and its persistence mode is not touched, however long that takes.
func TestLongReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1", "GPU-2")
		w.persists["GPU-1"] = true
		goOn := make(chan struct{})
		w.on = func(event string) {
			if event == "nvidia-smi GPU-1" {
				<-goOn
			}
		}
		r, stop := w.start()
		defer stop()
		time.Sleep(time.Hour)
		if got := w.happened(); got != "take GPU-1, driver released, nvidia-smi GPU-1" || record(r, "GPU-1").Running == nil {
			t.Errorf("%s, %+v", got, record(r, "GPU-1"))
		}
		if plan := r.Begin(t.Context(), "GPU-2", false); plan.Number != 0 || plan.Keeps[0].Code != reset.WaitPaused && plan.Keeps[0].Code != reset.WaitTurn {
			t.Errorf("a person: %+v", plan)
		}
		close(goOn)
		time.Sleep(time.Minute)
		if got := w.happened(); !strings.Contains(got, "given back GPU-1, take GPU-2") || !w.persists["GPU-1"] {
			t.Error(got)
		}
	})
}

// The end of an agent does not wait for a pass that hangs, as with its disk.
func TestEndWithAPassThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		r, stop := w.start()
		hangs := make(chan struct{})
		w.with(func() { w.hangs = hangs })
		w.changed <- struct{}{}
		synctest.Wait()
		ended := r.End()
		select {
		case <-ended:
			t.Error("the pass has ended")
		default:
		}
		close(hangs)
		<-ended
		stop()
	})
}

// What is about to happen is on disk before: with a full disk no reset begins, and none goes on.
func TestFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		full := func() { check.NoError(t, os.MkdirAll(filepath.Join(w.file, "x"), 0o700)) }
		room := func() { check.NoError(t, os.RemoveAll(w.file)) }
		w.on = func(event string) {
			if event == "driver released" {
				room()
				full()
			}
		}
		r, stop := w.start()
		defer stop()
		if got := w.happened(); got != "take GPU-1, driver released, driver opened, read, given back GPU-1" {
			t.Error(got)
		}
		time.Sleep(time.Hour)
		if got := w.happened(); got != "" || len(r.Problems()) != 1 || r.Problems()[0].Code != problem.ResetState {
			t.Errorf("%s, %v", got, r.Problems())
		}
		w.with(func() { w.on = nil })
		room()
		time.Sleep(time.Minute)
		if got := w.happened(); got != whole || len(r.Problems()) != 0 {
			t.Errorf("with room again: %s, %v", got, r.Problems())
		}
	})
}

// Until nvidia-smi is called a reset is cancelled by the end of the agent, and if the GPU is wanted back. From then on it is awaited.
func TestCancelled(t *testing.T) {
	for event, called := range map[string]bool{"take GPU-1": false, "driver released": false, "nvidia-smi GPU-1": true} {
		for _, ends := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "GPU-1")
				reached, goOn := make(chan struct{}), make(chan struct{})
				w.on = func(e string) {
					if e == event {
						close(reached)
						<-goOn
					}
				}
				r, stop := w.start()
				<-reached
				if ends {
					ended := r.End()
					synctest.Wait()
					select {
					case <-ended:
						t.Errorf("%s: it is not awaited", event)
					default:
					}
				} else if w.taken["GPU-1"] != nil {
					close(w.taken["GPU-1"].back)
				}
				synctest.Wait()
				w.with(func() { w.on = nil })
				close(goOn)
				synctest.Wait()
				if event == "take GPU-1" && !ends {
					w.taken = nil
				}
				got := w.happened()
				if event == "take GPU-1" && !ends {
					called = true // it was not wanted back
				}
				if strings.Contains(got, "nvidia-smi") != called || !strings.HasSuffix(got, "given back GPU-1") {
					t.Errorf("%s, ends %t: %s", event, ends, got)
				}
				if one := record(r, "GPU-1"); one.Running != nil || called != (one.Last != nil && one.Last.Outcome == reset.Done) || !called && one.NotBegun == "" {
					t.Errorf("%s, ends %t: %+v", event, ends, one)
				}
				stop()
			})
		}
	}
}

// A GPU that is not free in time, or of which that can't be known, counts as one in use: if it stays so, a person is called. One that the node shows in use by
// then is not reset, either.
func TestNotTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		w.takeErr = errors.New("GPU GPU-1 was not free, it waits for the end of pod default/train")
		r, stop := w.start()
		time.Sleep(2 * time.Minute)
		if got, one := w.happened(), record(r, "GPU-1"); !strings.HasPrefix(got, "take GPU-1") || strings.Contains(got, "released") || one.Attempts != 0 || one.Refusals != 1 {
			t.Errorf("%s, %+v", got, one)
		}
		time.Sleep(time.Hour)
		if got, waits := strings.Count(w.happened(), "take GPU-1"), r.Decision().Waits; got != 3 || len(waits) != 1 || !waits[0].Alert {
			t.Errorf("tried %d times within an hour, waits for %+v", got, waits)
		}
		stop()

		w = newWorld(t, "GPU-1")
		w.on = func(event string) {
			if event == "take GPU-1" {
				w.with(func() { w.of("GPU-1").Holders = []string{"pod default/train"} })
			}
		}
		r, stop = w.start()
		defer stop()
		if got, one := w.happened(), record(r, "GPU-1"); got != "take GPU-1, given back GPU-1" || !strings.Contains(one.NotBegun, "default/train") {
			t.Errorf("%s, %+v", got, one)
		}
	})
}

// case 23: with DRAIN_AND_RESET the whole P2P group is taken, and nothing may have one of its GPUs open.
func TestGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1", "GPU-2")
		w.seen.GPUs[0].Action, w.seen.GPUs[0].Group = health.RecoveryDrainAndReset, []gpu.DeviceID{"GPU-2"}
		w.seen.GPUs[1] = reset.GPU{ID: "GPU-2", Group: []gpu.DeviceID{"GPU-1"}, TakesWork: true}
		w.clients["GPU-2"] = []gpureset.Client{{PID: 9, Name: "python3"}}
		r, stop := w.start()
		defer stop()
		if got, e := w.happened(), record(r, "GPU-1").Last; strings.Count(got, "take ") != 2 || strings.Count(got, "given back") != 2 || strings.Contains(got, "driver") ||
			e == nil || !strings.HasPrefix(e.Text, "GPU-2 is open in python3") {
			t.Errorf("%s, %+v", got, e)
		}
		w.with(func() { w.clients = nil })
		time.Sleep(time.Hour)
		if got := w.happened(); strings.Count(got, "take ") != 2 || strings.Count(got, "given back") != 2 || strings.Count(got, "nvidia-smi") != 1 {
			t.Error(got)
		}
	})
}

// With the mode report nothing is done or written; with off there is not even a goroutine.
func TestNotActed(t *testing.T) {
	for _, mode := range []reset.Mode{reset.Off, reset.Report} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "GPU-1")
			w.policy.Mode = mode
			r, stop := w.start()
			time.Sleep(time.Hour)
			begin := r.Decision().Begin
			if got := w.happened(); got != "" || (mode == reset.Report) != (len(begin) == 1 && begin[0].GPU == "GPU-1") {
				t.Errorf("%v: %s, %+v", mode, got, begin)
			}
			if _, err := os.Stat(w.file); err == nil {
				t.Errorf("%v: there is a file", mode)
			}
			stop()
		})
	}
}

// An agent that can't reset a GPU has a problem with the remedy, until it can.
func TestCannot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "GPU-1")
		w.readyErr = errors.New("no process serves reset.sock: deploy the component")
		r, stop := w.start()
		defer stop()
		all := r.Problems()
		if got := w.happened(); got != "" || len(all) != 1 || all[0].Code != problem.ResetCannot || !strings.Contains(all[0].Text, "deploy the component") {
			t.Errorf("%s, %v", got, all)
		}
		w.with(func() { w.readyErr = nil })
		time.Sleep(2 * time.Minute)
		if got := w.happened(); got != whole || len(r.Problems()) != 0 {
			t.Errorf("%s, %v", got, r.Problems())
		}
	})
}

// A person has a GPU reset that has no fault, with any mode; another one meanwhile is refused.
func TestByPerson(t *testing.T) {
	for _, mode := range []reset.Mode{reset.Off, reset.Report, reset.Act} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "GPU-1", "GPU-2")
			for i := range w.seen.GPUs {
				w.seen.GPUs[i] = reset.GPU{ID: w.seen.GPUs[i].ID, Action: health.RecoveryNone, TakesWork: true}
			}
			w.policy.Mode = mode
			hold := make(chan struct{})
			w.on = func(event string) {
				if event == "nvidia-smi GPU-1" {
					<-hold
				}
			}
			r, stop := w.start()
			defer stop()
			if plan := r.Plan(t.Context(), "GPU-1", false); len(plan.Keeps) != 0 || plan.Number != 0 {
				t.Errorf("%v: %+v", mode, plan)
			}
			if _, err := os.Stat(w.file); err == nil {
				t.Errorf("%v: a plan writes a file", mode)
			}
			plan := r.Begin(t.Context(), "GPU-1", false)
			if plan.Number == 0 || len(plan.Keeps) != 0 {
				t.Fatalf("%v: %+v", mode, plan)
			}
			synctest.Wait()
			if p, ok := r.Progress(plan.Number); !ok || p.End != nil || len(p.Phases) == 0 || r.Resets() != "GPU-1" {
				t.Errorf("%v: %+v", mode, p)
			}
			if other := r.Begin(t.Context(), "GPU-2", false); other.Number != 0 || len(other.Keeps) != 1 || other.Keeps[0].Code != reset.WaitTurn {
				t.Errorf("%v: meanwhile: %+v", mode, other)
			}
			close(hold)
			if got := w.happened(); got != whole {
				t.Errorf("%v: %s", mode, got)
			}
			if p, ok := r.Progress(plan.Number); !ok || p.End == nil || p.End.Outcome != reset.Done {
				t.Errorf("%v: %+v", mode, p)
			}
			if _, ok := r.Progress(plan.Number + 1); ok {
				t.Error("there is no such reset")
			}
			if plan := r.Plan(t.Context(), "GPU-7", false); len(plan.Keeps) != 1 || plan.Keeps[0].Code != reset.WaitUnknown {
				t.Errorf("%v: unknown: %+v", mode, plan)
			}
		})
	}
}

// The dry run equals the act: what keeps one from beginning keeps the other, in random situations.
func TestDryRunEqualsTheAct(t *testing.T) {
	random := newRandom(t)
	begun := 0
	for range 2000 {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "GPU-1", "GPU-2", "GPU-3")
			w.policy.Mode = reset.Off
			w.random(random)
			r, stop := w.start()
			defer stop()
			id, lose := gpu.DeviceID([]string{"GPU-1", "GPU-2", "GPU-9"}[random.IntN(3)]), random.IntN(2) == 0
			if random.IntN(8) == 0 {
				r.End()
				synctest.Wait()
			}
			plan, act := r.Plan(t.Context(), id, lose), r.Begin(t.Context(), id, lose)
			if !samePlan(plan, act) || (act.Number != 0) != (len(plan.Keeps) == 0) {
				t.Errorf("dry run %+v, act %+v", plan, act)
			}
			if got := w.happened(); (act.Number == 0) != (got == "") {
				t.Errorf("%+v: %s", act, got)
			}
			if act.Number != 0 {
				begun++
			}
		})
	}
	if begun < 20 || begun > 1900 {
		t.Errorf("%d of 2000 have begun", begun)
	}
}

var _ gpureset.Resetter = (*world)(nil)
var _ resetter.Node = (*world)(nil)
