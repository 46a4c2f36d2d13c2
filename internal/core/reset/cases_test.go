package reset_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/reset"
)

// TestCases has the cases of the contracts that concern the decision, by their numbers. Those about the calls of nvidia-smi are in node/gpureset.
func TestCases(t *testing.T) {
	for name, test := range map[string]func(*testing.T){
		"rescue 18 a process has the GPU open: refused, and named":  case18,
		"rescue 20 reset, and the action is still there":            case20,
		"rescue 20 one try on a node with NVSwitches":               case20NVSwitch,
		"rescue 21 a process starts meanwhile: tried again":         case21,
		"rescue 23 what is handed over":                             case23,
		"prove 21 it fails its proof, is reset, and fails it again": caseProof,
		"prove 21 it is reset, and its check can't run":             caseProofNotRun,
		"a reset, and the GPU takes work":                           caseRepaired,
		"a GPU that fails again and again":                          caseOften,
		"and one that recovers by itself":                           caseOftenOver,
		"nvidia-smi refuses for good":                               caseRefused,
		"nvidia-smi fails twice":                                    caseFailed,
		"what a GPU waits for, in its order":                        caseWaits,
		"its P2P group":                                             caseGroup,
		"one at a time":                                             caseTurn,
		"cancelled after it was taken":                              caseStill,
		"the agent ends before the call":                            caseInterruptedBefore,
		"the agent ends during the call":                            caseInterrupted,
		"a reset keeps others back for as long as it lasts":         caseLong,
		"the persistence mode is restored after a restart":          casePersistence,
		"a boot does not end a fault":                               caseBoot,
		"off":                                                       caseOff,
		"report":                                                    caseReport,
		"a person asks for it":                                      casePerson,
		"a person is told all that keeps it from beginning":         casePersonWaits,
		"a clock step of a year":                                    caseClock,
		"GPUs that left":                                            caseGone,
		"a decision without news changes nothing on disk":           caseUnchanged,
		"numbers of another reset, and of a GPU without one":        caseNumbers,
	} {
		t.Run(name, test)
	}
}

const client = "GPU-0 is open in python3 (pid 2114, control group /kubepods/pod1)"

func case18(t *testing.T) {
	w := faultyWorld(t, 1)
	w.try(0, reset.InUse, client)
	if one := w.waits(0, reset.WaitBackOff, false); !strings.Contains(one.Text, client) {
		t.Errorf("%+v", one)
	}
	if r := w.record(0); r.Attempts != 0 || r.Refusals != 1 || r.Last.Outcome != reset.InUse || r.Last.Text != client {
		t.Errorf("%+v", r)
	}
}

func case20(t *testing.T) {
	w := faultyWorld(t, 2)
	b := w.begins(0)
	if b.Number != 1 || b.Cause != "XID_95" || b.With != nil {
		t.Errorf("%+v", b)
	}
	w.end(0, reset.Done, "")
	if one := w.waits(0, reset.WaitBackOff, false); !one.Until.Equal(w.now.Add(minute)) {
		t.Errorf("%+v at %v", one, w.now)
	}
	w.restart()
	w.pass(59 * second)
	w.waits(0, reset.WaitBackOff, false)
	w.pass(second)
	if len(w.last.Begin) != 1 || w.last.Begin[0].Number != 2 {
		t.Fatalf("%+v", w.last)
	}
	w.end(0, reset.Done, "GPU 00000000:01:00.0 was successfully reset.")
	w.never(day)
	if one := w.waits(0, reset.WaitAttempts, true); one.Text != "XID_95 is still there after 2 resets, the last one: done: GPU 00000000:01:00.0 was successfully reset." {
		t.Errorf("%q", one.Text)
	}
	w.restart()
	w.never(hour)
	w.gpu(0).Action = health.RecoveryReboot // what is handed over does not wait for WaitAttempts
	w.pass(0)
	w.waits(0, reset.WaitHandedOver, true)
}

func case20NVSwitch(t *testing.T) {
	w := faultyWorld(t, 1)
	w.gpu(0).NVSwitch = true
	w.try(0, reset.Failed, "exit status 3")
	w.never(day)
	w.waits(0, reset.WaitAttempts, true)
}

func case21(t *testing.T) {
	w := faultyWorld(t, 1)
	for i, wait := range []time.Duration{minute, 5 * minute, 30 * minute, 2 * hour, 2 * hour, 2 * hour} {
		w.try(0, reset.InUse, client)
		if one := w.waits(0, reset.WaitBackOff, i >= 2); !one.Until.Equal(w.now.Add(wait)) || !strings.Contains(one.Text, "python3 (pid 2114") {
			t.Errorf("%d: %+v at %v", i, one, w.now)
		}
		if i%2 == 0 {
			w.restart()
		}
		w.never(wait - minute)
		w.now = w.now.Add(minute)
	}
	w.try(0, reset.Done, "") // within the attempts
	if r := w.record(0); r.Attempts != 1 || r.Refusals != 6 {
		t.Errorf("%+v", r)
	}
	w.repaired(0)
	w.pass(0)
	if r := w.record(0); r.Attempts+r.Refusals != 0 || !r.Retry.IsZero() || r.Last.Outcome != reset.Done {
		t.Errorf("%+v", r)
	}
}

func case23(t *testing.T) {
	for action, text := range map[health.RecoveryAction]string{
		health.RecoveryBusReset: "bus reset", health.RecoverySystemReboot: "system reboot", health.RecoveryReboot: "node reboot",
		health.RecoveryDrainP2P: "drain P2P", health.RecoveryIMEX: "recover IMEX domain", health.RecoveryOther: "unknown action", 200: "unknown action",
	} {
		w := faultyWorld(t, 1)
		w.gpu(0).Action, w.gpu(0).ProofFailed = action, true
		w.never(hour)
		if one := w.waits(0, reset.WaitHandedOver, true); !strings.HasSuffix(one.Text, ": "+text) {
			t.Errorf("%+v", one)
		}
		if len(w.state.Records) > 0 {
			t.Errorf("%+v", w.state)
		}
	}
	w := faultyWorld(t, 1)
	w.gpu(0).Action = health.RecoveryUnknown
	w.never(hour)
	if one := w.waits(0, reset.WaitHandedOver, true); !strings.Contains(one.Text, "reports no recovery action") || !strings.Contains(one.Text, "XID_95") {
		t.Errorf("%+v", one)
	}
	w.gpu(0).Repair = health.NoRepair // it ends by itself
	w.pass(0)
	w.quiet()
	w.gpu(0).ProofFailed, w.gpu(0).Cause = true, ""
	w.pass(0)
	if one := w.waits(0, reset.WaitHandedOver, true); !strings.HasSuffix(one.Text, "PROOF_FAILED") {
		t.Errorf("%+v", one)
	}
	w.fault(0)
	w.gpu(0).Action, w.gpu(0).ProofFailed = health.RecoveryNone, false // the driver sees no need
	w.pass(0)
	w.quiet()
	w.gpu(0).Action, w.gpu(0).NeedsService = health.RecoveryReset, true
	w.pass(0)
	w.waits(0, reset.WaitService, true)
}

func caseProof(t *testing.T) {
	w := newWorld(t, 1)
	w.gpu(0).ProofFailed, w.gpu(0).TakesWork = true, false
	if b := w.begins(0); b.Cause != "PROOF_FAILED" {
		t.Errorf("%+v", b)
	}
	w.end(0, reset.Done, "")
	w.never(10 * minute)
	w.waits(0, reset.WaitProof, false)
	w.node.Paused = "a proof of GPU-0 runs"
	w.never(minute)
	w.node.Paused = ""
	w.gpu(0).NeedsService = true // as the proof that fails after a reset has it
	w.never(day)
	w.waits(0, reset.WaitService, true)
	w.restart()
	w.never(hour)
	if r := w.record(0); r.Attempts != 1 {
		t.Errorf("%+v", r)
	}
}

// A second reset shows nothing about a GPU that was not proved after the first. One that the driver asks for is made.
func caseProofNotRun(t *testing.T) {
	w := newWorld(t, 1)
	w.gpu(0).NVSwitch = true
	w.gpu(0).ProofFailed, w.gpu(0).TakesWork = true, true // onFail is degraded
	w.try(0, reset.Done, "")
	w.never(day)
	w.waits(0, reset.WaitProof, false)
	w.gpu(0).NVSwitch = false
	w.fault(0)
	w.try(0, reset.Done, "")
	w.never(day)
	w.waits(0, reset.WaitAttempts, true)
	w.gpu(0).ProofFailed = false
	w.repaired(0)
	w.pass(0)
	w.quiet()
	if r := w.record(0); r.Attempts != 0 {
		t.Errorf("%+v", r)
	}
}

func caseRepaired(t *testing.T) {
	w := faultyWorld(t, 2)
	w.try(0, reset.Done, "")
	w.gpu(0).Action = health.RecoveryNone
	w.pass(minute)
	if r := w.record(0); r.Attempts != 1 { // it takes no work yet
		t.Errorf("%+v", r)
	}
	gpus := w.node.GPUs
	w.node.GPUs = gpus[1:] // nor is it there
	w.never(hour)
	w.node.GPUs = gpus
	if r := w.record(0); r.Attempts != 1 {
		t.Errorf("%+v", r)
	}
	w.repaired(0)
	w.pass(0)
	w.quiet()
	r := w.record(0)
	if r.Attempts != 0 || r.Last == nil || r.Last.Took != 40*second || r.Last.Cause != "XID_95" || r.Last.Number != 1 {
		t.Errorf("%+v", r)
	}
	w.never(day)
	w.fault(0)
	w.try(0, reset.Done, "")
	w.pass(minute)
	if len(w.last.Begin) != 1 { // each fault has its attempts
		t.Errorf("%+v", w.last)
	}
}

// faultAgain has a GPU take work for some time after its reset, and then fail again.
func (w *world) faultAgain(i int) {
	w.Helper()
	w.repaired(i)
	w.pass(minute)
	w.quiet()
	w.pass(3 * minute)
	w.fault(i)
}

// A GPU that fails again after each reset is left to a person after the second one within a day. A person who has it
// reset goes on.
func caseOften(t *testing.T) {
	w := faultyWorld(t, 1)
	resets := 0
	for range 240 { // a day
		if w.pass(6 * minute); len(w.last.Begin) == 0 {
			continue
		}
		resets++
		w.end(0, reset.Done, "was successfully reset")
		w.faultAgain(0)
	}
	if resets != 2 {
		t.Errorf("%d resets within a day", resets)
	}
	w.never(3 * day)
	w.restart()
	w.never(hour)
	one := w.waits(0, reset.WaitOften, true)
	if one.Text != "XID_95 comes after 2 resets within a day, and the GPU has failed again each time; the last one: done: was successfully reset" {
		t.Errorf("%q", one.Text)
	}

	b, waits := w.policy.ByPerson(w.state, w.node, w.gpu(0).ID)
	if len(waits) > 0 {
		t.Fatalf("%+v", waits)
	}
	w.state, _ = w.state.BegunByPerson(b, w.now)
	w.end(0, reset.Done, "")
	w.faultAgain(0)
	w.try(0, reset.Done, "")
	w.faultAgain(0)
	w.begins(0)
}

// One that takes work again by itself, such as after a boot, is reset again when the two are a day ago.
func caseOftenOver(t *testing.T) {
	w := faultyWorld(t, 1)
	for range 2 {
		w.try(0, reset.Done, "")
		w.faultAgain(0)
	}
	w.pass(0)
	w.waits(0, reset.WaitOften, true)
	w.repaired(0)
	w.pass(hour)
	w.quiet()
	w.fault(0)
	w.pass(0)
	w.waits(0, reset.WaitOften, true)
	w.repaired(0)
	w.never(day)
	w.fault(0)
	w.begins(0)
}

func caseRefused(t *testing.T) {
	w := faultyWorld(t, 1)
	w.try(0, reset.Refused, "Resetting GPU is not supported")
	w.restart()
	w.never(day)
	if one := w.waits(0, reset.WaitRefused, true); one.Text != "nvidia-smi does not reset it: Resetting GPU is not supported" {
		t.Errorf("%q", one.Text)
	}
	w.repaired(0)
	w.pass(0)
	w.fault(0)
	w.begins(0)
}

func caseFailed(t *testing.T) {
	w := faultyWorld(t, 1)
	w.try(0, reset.Failed, "exit status 255")
	if one := w.waits(0, reset.WaitBackOff, false); one.Text != "its last reset: failed: exit status 255" {
		t.Errorf("%q", one.Text)
	}
	w.now = w.now.Add(minute)
	w.try(0, reset.Failed, "exit status 255")
	w.never(day)
	w.waits(0, reset.WaitAttempts, true)
	w.policy.Attempts = 1 // also with a policy of fewer, or of none
	w.never(hour)
	w.policy.Attempts = 0
	w.never(hour)
}

// Each reason is shown while it and all that follow hold.
func caseWaits(t *testing.T) {
	w := faultyWorld(t, 2)
	w.try(0, reset.Cancelled, "the agent ends")
	g := w.gpu(0)
	for _, one := range []struct {
		code  reset.Code
		alert bool
		end   func()
	}{
		{reset.WaitService, true, func() { g.NeedsService = false }},
		{reset.WaitHandedOver, true, func() { g.Action = health.RecoveryReset }},
		{reset.WaitCannot, true, func() { w.node.Cannot = "" }},
		{reset.WaitMIG, true, func() { w.policy.LoseMIG = true }},
		{reset.WaitBackOff, false, func() { w.now = w.now.Add(10 * second) }},
		{reset.WaitPaused, false, func() { w.node.Paused = "" }},
		{reset.WaitMoving, false, func() { g.Moving = "" }},
		{reset.WaitUnread, true, func() { g.Unread, g.Never = "", false }},
		{reset.WaitHeld, false, func() { g.Holders = nil }},
		{reset.WaitProcesses, false, func() { g.Processes = nil }},
	} {
		if one.code == reset.WaitService {
			g.NeedsService, g.Action, g.MIG, g.Moving, g.Unread, g.Never = true, health.RecoveryReboot, true, "it moves to DRA", "no answer", true
			w.node.Cannot, w.node.Paused = "the component is not there: set reset.enabled", "maintenance"
			g.Holders, g.Processes = []string{"pod a", "pod b", "pod c"}, []string{"pid 7"}
		}
		w.pass(0)
		w.waits(0, one.code, one.alert)
		one.end()
	}
	w.begins(0)
}

func caseGroup(t *testing.T) {
	w := faultyWorld(t, 3)
	g, other := w.gpu(0), w.gpu(2)
	g.Action, g.Group = health.RecoveryDrainAndReset, []gpu.DeviceID{w.gpu(1).ID, other.ID}
	for want, busy := range map[string]reset.GPU{
		"pod a has it": {Holders: []string{"pod a"}}, "in use by pid 7": {Processes: []string{"pid 7"}},
		"what has it is not known: no answer": {Unread: "no answer", Never: true}, "it moves": {Moving: "it moves"},
	} {
		busy.ID, busy.Action, busy.TakesWork = other.ID, health.RecoveryNone, true
		*other = busy
		w.never(minute)
		if one := w.waits(0, reset.WaitGroup, busy.Never); one.Text != string(other.ID)+" of its P2P group: "+want {
			t.Errorf("%+v", one)
		}
	}
	*other = reset.GPU{ID: "GPU-other"}
	w.never(minute)
	w.waits(0, reset.WaitGroup, false)
	other.ID = g.Group[1]
	if b := w.begins(0); !slices.Equal(b.With, g.Group) {
		t.Errorf("%+v", b)
	}
	if why := w.still(g.ID); why != "" {
		t.Error(why)
	}
	other.Holders = []string{"pod a"}
	if why := w.still(g.ID); !strings.Contains(why, "pod a has it") {
		t.Error(why)
	}
	w.end(0, reset.Cancelled, "pod a")
	g.Action = health.RecoveryReset // that of one GPU needs it alone
	w.now = w.now.Add(minute)
	if b := w.begins(0); b.With != nil {
		t.Errorf("%+v", b)
	}
}

func caseTurn(t *testing.T) {
	w := faultyWorld(t, 3)
	w.fault(1)
	w.begins(0)
	w.waits(1, reset.WaitTurn, false)
	if len(w.last.Waits) != 1 {
		t.Errorf("%+v", w.last.Waits)
	}
	w.pass(second)
	w.waits(1, reset.WaitTurn, false)
	w.end(0, reset.Done, "")
	if len(w.last.Begin) != 1 || w.last.Begin[0].GPU != w.gpu(1).ID {
		t.Errorf("%+v", w.last)
	}
}

func caseStill(t *testing.T) {
	for want, change := range map[string]func(w *world){
		"":                                  func(*world) {},
		"pod a has it":                      func(w *world) { w.gpu(0).Holders = []string{"pod a"} },
		"in use by pid 7":                   func(w *world) { w.gpu(0).Processes = []string{"pid 7"} },
		"what has it is not known: x":       func(w *world) { w.gpu(0).Unread = "x" },
		"it moves to DRA":                   func(w *world) { w.gpu(0).Moving = "it moves to DRA" },
		"maintenance":                       func(w *world) { w.node.Paused = "maintenance" },
		"no right":                          func(w *world) { w.node.Cannot = "no right" },
		"a reset removes its MIG instances": func(w *world) { w.gpu(0).MIG = true },
		"the driver does not ask for a reset any more": func(w *world) { w.repaired(0) },
		"GPUs are not reset any more":                  func(w *world) { w.policy.Mode = reset.Report },
		"the GPU is not this agent's any more":         func(w *world) { w.node.GPUs = w.node.GPUs[1:] },
		"it has not begun": func(w *world) {
			w.state = w.state.Ended(w.gpu(0).ID, reset.End{Number: w.state.Begun, Outcome: reset.Cancelled}, w.now)
		},
	} {
		w := faultyWorld(t, 2)
		id := w.begins(0).GPU
		change(w)
		if why := w.still(id); why != want {
			t.Errorf("%q, want %q", why, want)
		}
	}
	w := faultyWorld(t, 1)
	w.try(0, reset.Cancelled, "pod a\nhas it")
	if one := w.waits(0, reset.WaitBackOff, false); one.Text != "its reset did not begin: pod a has it" || !one.Until.Equal(w.now.Add(10*second)) {
		t.Errorf("%+v", one)
	}
	if r := w.record(0); r.Attempts+r.Refusals != 0 || r.Last != nil {
		t.Errorf("%+v", r)
	}
	w.pass(10 * second)
	if len(w.last.Begin) != 1 {
		t.Errorf("%+v", w.last)
	}
	w.end(0, reset.Cancelled, "again")
	w.repaired(0)
	if w.pass(0); len(w.state.Records) > 0 {
		t.Errorf("%+v", w.state)
	}
}

func caseInterruptedBefore(t *testing.T) {
	w := faultyWorld(t, 1)
	w.begins(0)
	w.restart()
	w.pass(second)
	w.waits(0, reset.WaitBackOff, false)
	if r := w.record(0); r.Running != nil || r.Attempts != 0 || r.Last != nil {
		t.Errorf("%+v", r)
	}
	w.pass(10 * second)
	if len(w.last.Begin) != 1 || w.last.Begin[0].Number != 2 {
		t.Errorf("%+v", w.last)
	}
}

func caseInterrupted(t *testing.T) {
	w := faultyWorld(t, 1)
	for range 2 {
		b := w.begins(0)
		w.state = w.state.Calls(b.GPU, false)
		w.restart()
		w.pass(30 * second)
		w.waits(0, []reset.Code{reset.WaitBackOff, reset.WaitAttempts}[b.Number-1], b.Number == 2)
		w.pass(0) // the end of the process is counted once
		if r := w.record(0); r.Attempts != int(b.Number) || r.Last.Outcome != reset.Interrupted || r.Last.Took != 30*second {
			t.Errorf("%+v", r)
		}
		w.now = w.now.Add(minute)
	}
	w.never(day)
	w.waits(0, reset.WaitAttempts, true)
}

func caseLong(t *testing.T) {
	w := faultyWorld(t, 2)
	w.fault(1)
	b := w.begins(0)
	w.state = w.state.Calls(b.GPU, true)
	w.pass(day)
	w.waits(1, reset.WaitTurn, false)
	if r := w.record(0); r.Attempts != 0 || r.Running == nil {
		t.Errorf("%+v", r)
	}
	w.state = w.state.Ended(b.GPU, reset.End{Number: b.Number, Outcome: reset.Failed}, w.now)
	if w.pass(0); len(w.last.Begin) != 1 || w.last.Begin[0].GPU != w.gpu(1).ID {
		t.Errorf("%+v", w.last)
	}
	before := w.encoded(w.state)
	w.state = w.state.Ended(b.GPU, reset.End{Number: b.Number, Outcome: reset.Done}, w.now)
	if after := w.encoded(w.state); after != before {
		t.Errorf("the end of a reset that is over counts: %s", after)
	}
}

func casePersistence(t *testing.T) {
	w := faultyWorld(t, 2)
	b := w.begins(0)
	w.state = w.state.Calls(b.GPU, true)
	if w.pass(second); len(w.last.Restore) > 0 {
		t.Errorf("while it runs: %+v", w.last.Restore)
	}
	w.restart()
	w.policy.Mode = reset.Off // restored nevertheless
	for range 2 {
		if w.pass(second); !slices.Equal(w.last.Restore, []gpu.DeviceID{b.GPU}) {
			t.Errorf("%+v", w.last.Restore)
		}
		w.restart()
	}
	gpus := w.node.GPUs
	w.node.GPUs = gpus[1:]
	if w.pass(second); len(w.last.Restore) > 0 {
		t.Errorf("a GPU that is not there: %+v", w.last.Restore)
	}
	w.node.GPUs = gpus
	w.policy.Mode = reset.Act
	w.pass(minute)
	again := w.last.Begin[0]
	w.state = w.state.Calls(again.GPU, false) // as the reset finds it now; it was on before the one that was interrupted
	w.state = w.state.Ended(again.GPU, reset.End{Number: again.Number, Outcome: reset.Done}, w.now)
	if w.pass(0); len(w.last.Restore) != 1 {
		t.Errorf("%+v", w.last.Restore)
	}
	w.state = w.state.Restored(again.GPU)
	if w.pass(0); len(w.last.Restore) != 0 {
		t.Errorf("%+v", w.last.Restore)
	}
	w.repaired(0)
	w.fault(0)
	w.pass(minute)
	w.state = w.state.Restored("GPU-never")
}

func caseBoot(t *testing.T) {
	w := faultyWorld(t, 1)
	w.try(0, reset.Done, "")
	w.now = w.now.Add(minute)
	w.state = w.state.Calls(w.begins(0).GPU, true)
	w.now = w.now.Add(minute)
	w.boot("2")
	w.restart()
	w.pass(second)
	if len(w.last.Restore) > 0 { // the boot has set the persistence mode anew
		t.Errorf("%+v", w.last.Restore)
	}
	w.never(day)
	w.waits(0, reset.WaitAttempts, true)
	w.repaired(0)
	w.pass(0)
	w.quiet()
	w.fault(0)
	w.begins(0)
}

func caseOff(t *testing.T) {
	w := faultyWorld(t, 2)
	w.policy = reset.Policy{}
	empty := w.encoded(reset.State{})
	w.never(hour)
	w.quiet()
	if text := w.encoded(w.state); text != empty {
		t.Error(text)
	}
	w.policy = reset.Default()
	w.policy.Mode = reset.Act
	w.begins(0)
	w.policy.Mode = reset.Off
	w.pass(second)
	if len(w.last.Begin)+len(w.last.Waits) > 0 || w.record(0).Running == nil {
		t.Errorf("%+v", w.last)
	}
	w.end(0, reset.Cancelled, "off")
	w.never(hour)
}

// With the mode report nothing is on disk of what would be done.
func caseReport(t *testing.T) {
	w := faultyWorld(t, 3)
	w.fault(1)
	w.policy.Mode = reset.Report
	empty := w.encoded(reset.State{})
	for range 1000 {
		w.pass(minute)
		if len(w.last.Begin) != 1 || w.last.Begin[0].GPU != w.gpu(0).ID || w.last.Begin[0].Number != 0 {
			t.Fatalf("%+v", w.last)
		}
		w.waits(1, reset.WaitTurn, false)
		if text := w.encoded(w.state); text != empty {
			t.Fatal(text)
		}
	}
}

func casePerson(t *testing.T) {
	w := newWorld(t, 2)
	w.policy.Mode = reset.Off
	id := w.gpu(0).ID
	w.pass(0)
	b, waits := w.policy.ByPerson(w.state, w.node, id)
	if len(waits) > 0 || b.GPU != id || b.Number != 0 || b.Cause != "by a person" || b.With != nil {
		t.Fatalf("%+v, %+v", b, waits)
	}
	w.state, b = w.state.BegunByPerson(b, w.now)
	if r := w.record(0).Running; b.Number != 1 || r == nil || r.Number != 1 || r.Cause != "by a person" || !r.ByPerson {
		t.Fatalf("%+v", r)
	}
	if same, again := w.state.BegunByPerson(reset.Begin{GPU: w.gpu(1).ID}, w.now); again.Number != 0 || !reflect.DeepEqual(same, w.state) {
		t.Errorf("a second one: %+v", again)
	}
	if _, waits := w.policy.ByPerson(w.state, w.node, w.gpu(1).ID); len(waits) != 1 || waits[0].Code != reset.WaitTurn {
		t.Errorf("%+v", waits)
	}
	w.pass(second)
	if why := w.still(id); why != "" { // also of a GPU without a fault, and with the mode off
		t.Error(why)
	}
	w.gpu(0).Processes = []string{"pid 7"}
	if why := w.still(id); why != "in use by pid 7" {
		t.Error(why)
	}
	w.gpu(0).Processes = nil
	w.end(0, reset.Done, "")
	if r := w.record(0); r.Attempts != 0 || r.Last.Outcome != reset.Done || r.Last.Cause != "by a person" {
		t.Errorf("%+v", r)
	}
	w = faultyWorld(t, 1) // it counts as an attempt, and attempts do not limit it
	for range 3 {
		b, waits := w.policy.ByPerson(w.state, w.node, id)
		if len(waits) > 0 || b.Cause != "XID_95" {
			t.Fatalf("%+v, %+v", b, waits)
		}
		w.state, _ = w.state.BegunByPerson(b, w.now)
		w.pass(0)
		w.end(0, reset.Done, "")
	}
	w.never(day)
	w.waits(0, reset.WaitAttempts, true)
}

func casePersonWaits(t *testing.T) {
	w := faultyWorld(t, 3)
	codes := func() (all []reset.Code) {
		_, waits := w.policy.ByPerson(w.state, w.node, w.gpu(0).ID)
		for _, one := range waits {
			if one.Text == "" || one.GPU != w.gpu(0).ID {
				t.Errorf("%+v", one)
			}
			all = append(all, one.Code)
		}
		return all
	}
	g := w.gpu(0)
	g.Action, g.NeedsService, g.Group = health.RecoveryDrainP2P, true, []gpu.DeviceID{w.gpu(1).ID, w.gpu(2).ID}
	if all := codes(); all != nil {
		t.Errorf("%v", all)
	}
	w.state, _ = w.state.BegunByPerson(reset.Begin{GPU: w.gpu(1).ID}, w.now)
	w.node.Cannot, w.node.Paused = "no right", "maintenance"
	g.MIG, g.Moving, g.Unread, g.Holders, g.Processes = true, "it moves", "no answer", []string{"pod a"}, []string{"pid 7"}
	w.gpu(1).Holders, w.gpu(2).Processes = []string{"pod b"}, []string{"pid 8"}
	want := []reset.Code{
		reset.WaitCannot, reset.WaitMIG, reset.WaitPaused, reset.WaitMoving, reset.WaitUnread, reset.WaitHeld, reset.WaitProcesses,
		reset.WaitGroup, reset.WaitGroup, reset.WaitTurn,
	}
	if all := codes(); !slices.Equal(all, want) {
		t.Errorf("%v", all)
	}
	w.policy.LoseMIG = true
	if all := codes(); slices.Contains(all, reset.WaitMIG) {
		t.Errorf("%v", all)
	}
	if b, _ := w.policy.ByPerson(w.state, w.node, g.ID); !slices.Equal(b.With, g.Group) {
		t.Errorf("%+v", b)
	}
	if _, waits := w.policy.ByPerson(w.state, w.node, "GPU-never"); len(waits) != 1 || waits[0].Code != reset.WaitUnknown {
		t.Errorf("%+v", waits)
	}
}

func caseClock(t *testing.T) {
	for _, step := range []time.Duration{365 * day, -365 * day} {
		for _, known := range []bool{true, false} {
			for _, o := range []reset.Outcome{reset.InUse, reset.Cancelled} {
				w := faultyWorld(t, 1)
				if !known {
					w.node.BootTime = time.Time{}
				}
				for range 4 {
					w.try(0, o, client)
					w.now = w.record(0).Retry
				}
				w.try(0, o, client)
				retry := w.record(0).Retry.Sub(w.now)
				w.set(step)
				w.pass(0)
				if left := w.record(0).Retry.Sub(w.now); known && left != retry || left > 2*hour {
					t.Errorf("a step of %v, boot time known %t, %v: %v are left of %v", step, known, o, left, retry)
				}
				w.pass(2 * hour)
				if w.state.Begun != 6 {
					t.Errorf("a step of %v, boot time known %t, %v: %+v", step, known, o, w.last)
				}
				w.set(step)
				if w.pass(second); known && w.record(0).Running == nil {
					t.Errorf("a step of %v ends a reset", step)
				}
			}
		}
	}
	w := faultyWorld(t, 1)
	w.now = w.now.In(time.FixedZone("", 3600))
	w.try(0, reset.Done, "")
	if at := w.record(0).Last.At; at.Location() != time.UTC {
		t.Error(at)
	}
}

func caseGone(t *testing.T) {
	w := faultyWorld(t, 2)
	w.fault(1)
	for i := range 400 {
		w.gpu(0).ID = gpu.DeviceID(fmt.Sprint("GPU-", i))
		w.try(0, reset.Refused, "not supported")
		if r := w.record(1).Running; r != nil {
			w.end(1, reset.Refused, "not supported")
		}
	}
	if n := len(w.state.Records); n != 128 || w.record(0).Last == nil || w.record(1).Attempts != 1 {
		t.Errorf("%d records", n)
	}
	w.restart()
}

// The boot time is computed from two clocks, and differs a little each time.
func caseUnchanged(t *testing.T) {
	w := faultyWorld(t, 8)
	w.try(0, reset.Refused, "not supported")
	before, booted := w.encoded(w.state), w.node.BootTime
	for i := range 600 {
		w.node.BootTime = booted.Add(time.Duration(i%5) * time.Millisecond)
		w.gpu(i % 8).Holders = [][]string{nil, {"pod default/train"}}[i/8%2]
		w.pass(second)
	}
	if after := w.encoded(w.state); after != before {
		t.Errorf("from\n%s to\n%s", before, after)
	}
}

func caseNumbers(t *testing.T) {
	w := faultyWorld(t, 1)
	b := w.begins(0)
	before := w.encoded(w.state)
	for _, s := range []reset.State{
		w.state.Ended(b.GPU, reset.End{Number: 7, Outcome: reset.Done}, w.now), w.state.Ended("GPU-never", reset.End{Number: 1}, w.now),
		w.state.Calls("GPU-never", true),
	} {
		if after := w.encoded(s); after != before {
			t.Errorf("%s", after)
		}
	}
	w.end(0, reset.Refused, "")
	if before := w.encoded(w.state); w.encoded(w.state.Calls(b.GPU, true)) != before { // after its end
		t.Error(w.encoded(w.state.Calls(b.GPU, true)))
	}
	if _, ok := w.state.Of("GPU-never"); ok {
		t.Error("a GPU that was never there has a record")
	}
}
