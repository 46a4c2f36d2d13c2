package control_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/resetter"
	"github.com/tandem-gpu/tandem/internal/operator/control"
)

// resets makes resets whose phases a test gives.
type resets struct {
	mu       sync.Mutex
	plan     resetter.Plan
	progress []resetter.Progress // one after the other; the last one stays
	calls    []string
	shown    func() // called when a progress is asked for; nil = none
}

func (r *resets) asked(what string, id gpu.DeviceID, loseMIG bool) resetter.Plan {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.calls = append(r.calls, what+" "+string(id)); loseMIG {
		r.calls = append(r.calls, "and lose MIG")
	}
	p := r.plan
	p.GPU = id
	return p
}

func (r *resets) Plan(_ context.Context, id gpu.DeviceID, loseMIG bool) resetter.Plan {
	p := r.asked("plan", id, loseMIG)
	p.Number = 0
	return p
}

func (r *resets) Begin(_ context.Context, id gpu.DeviceID, loseMIG bool) resetter.Plan {
	return r.asked("begin", id, loseMIG)
}

func (r *resets) Progress(number uint64) (p resetter.Progress, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.shown != nil {
		r.shown()
	}
	if number != r.plan.Number || len(r.progress) == 0 {
		return p, false
	}
	p = r.progress[0]
	r.progress = r.progress[min(1, len(r.progress)-1):]
	return p, true
}

func startResets(t *testing.T, of *resets) *rig {
	return start(t, coretest.WithMIG(coretest.GPUs(3), 2, "1g.10gb"), func(o *control.Options) { o.Resets = of })
}

// reset runs the command.
func (r *rig) reset(args control.ResetArgs) (string, error) {
	var out bytes.Buffer
	err := control.Reset(r.Context(), r.path, args, &out)
	return out.String(), err
}

// A dry run prints the steps and does nothing; a GPU is named as for clear.
func TestResetDryRun(t *testing.T) {
	t.Parallel()
	of := &resets{plan: resetter.Plan{With: []gpu.DeviceID{"GPU-b"}, Number: 7}}
	r := startResets(t, of)
	for _, name := range []string{"1", "0000:11:00.0", string(coretest.GPU(1))} {
		out, err := r.reset(control.ResetArgs{GPU: name, DryRun: true})
		if err != nil {
			t.Error(err)
		}
		contains(t, out, "reset of "+string(coretest.GPU(1))+" (index 1, 0000:11:00.0, NVIDIA H100 80GB HBM3):", "the other GPUs of its P2P group, GPU-b", "its other GPUs (2)",
			"turn its persistence mode off, run nvidia-smi --gpu-reset -i "+string(coretest.GPU(1))+", and turn the mode on again", "nothing keeps it from beginning now; nothing was done")
	}
	out, err := r.reset(control.ResetArgs{GPU: "2", DryRun: true, LoseMIG: true})
	contains(t, out, "its MIG instances (1) are lost")
	if want := "plan " + string(coretest.GPU(2)); err != nil || !slices.Equal(of.calls[len(of.calls)-2:], []string{want, "and lose MIG"}) {
		t.Errorf("%v, %q", err, of.calls)
	}
	if strings.Contains(r.log.String(), "asked for by operator") {
		t.Errorf("a dry run is logged: %s", r.log)
	}
}

// What keeps a reset from beginning is an error with each reason, the same for the dry run and the act. Bad input is one clear error.
func TestResetRefused(t *testing.T) {
	t.Parallel()
	of := &resets{plan: resetter.Plan{Keeps: []reset.Wait{
		{Code: reset.WaitHeld, Text: "pod default/train has it"}, {Code: reset.WaitMIG, Text: "a reset removes its MIG instances"},
	}}}
	r := startResets(t, of)
	var texts []string
	for _, dry := range []bool{true, false} {
		out, err := r.reset(control.ResetArgs{GPU: "0", DryRun: dry})
		e, ok := errors.AsType[*control.NotBegunError](err)
		if !ok || len(e.Keeps) != 2 || !strings.Contains(out, "nvidia-smi --gpu-reset") || strings.Contains(out, "has begun") {
			t.Fatalf("%v, %s", err, out)
		}
		texts = append(texts, e.Error())
	}
	want := "a reset of " + string(coretest.GPU(0)) + " can't begin now:\n  HELD: pod default/train has it\n  MIG_LAYOUT: a reset removes its MIG instances"
	if texts[0] != want || texts[1] != want {
		t.Errorf("%q, want %q", texts, want)
	}
	contains(t, r.log.String(), "reset asked for by operator can't begin", "default/train")
	r.rejects(with(control.Reset, control.ResetArgs{GPU: "9"}), http.StatusBadRequest, `gpu = "9"`, "inspect lists those that are known")
	without := start(t, coretest.GPUs(1))
	without.rejects(with(control.Reset, control.ResetArgs{GPU: "0"}), http.StatusNotFound)
}

// The command writes each phase once as it comes, waits for the end, and writes when the GPU takes work.
func TestReset(t *testing.T) {
	t.Parallel()
	phases := []resetter.Phase{{At: time.Now(), Text: "taking it"}, {At: time.Now(), Text: "resetting it by nvidia-smi"}}
	end := func(o reset.Outcome, text string) *reset.End {
		return &reset.End{Outcome: o, Text: text, Took: 42 * time.Second}
	}
	of := &resets{plan: resetter.Plan{Number: 7}, progress: []resetter.Progress{
		{Number: 7}, {Number: 7, Phases: phases[:1]}, {Number: 7, Phases: phases}, {Number: 7, Phases: phases, End: end(reset.Done, "")},
	}}
	r := startResets(t, of)
	r.xid(0, 95)
	out, err := r.reset(control.ResetArgs{GPU: "0"})
	if err != nil || strings.Count(out, "taking it") != 1 || strings.Count(out, "resetting it by nvidia-smi") != 1 {
		t.Errorf("%v, %s", err, out)
	}
	contains(t, out, "the end of this command does not end it", string(coretest.GPU(0))+" was reset; all of it took 42s", "it takes work when this is over: GPU 0 XID_95")
	contains(t, r.log.String(), "reset asked for by operator begins", "number=7")

	of.progress = []resetter.Progress{{Number: 7, End: end(reset.InUse, "GPU-1 is open in python3 (pid 2114)")}}
	_, err = r.reset(control.ResetArgs{GPU: "1"})
	if e, ok := errors.AsType[*control.NotResetError](err); !ok || e.Error() != string(coretest.GPU(1))+" was not reset: in-use: GPU-1 is open in python3 (pid 2114)" {
		t.Errorf("%v", err)
	}
	of.progress = nil
	r.rejects(with(control.Reset, control.ResetArgs{GPU: "1"}), http.StatusNotFound, "number 7", "inspect")
}

// The end of the client does not end a reset; an agent that does not answer any more may go on with it.
func TestResetWithoutClient(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	of := &resets{plan: resetter.Plan{Number: 7}, progress: []resetter.Progress{{Number: 7}}, shown: cancel}
	r := startResets(t, of)
	var out bytes.Buffer
	if err := control.Reset(ctx, r.path, control.ResetArgs{GPU: "0"}, &out); err == nil || !strings.Contains(err.Error(), "the reset may go on") {
		t.Errorf("%v", err)
	}
}
