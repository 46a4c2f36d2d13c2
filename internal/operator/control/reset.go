package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/resetter"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Resets resets GPUs for a person: a *resetter.Resetter, whose methods are described there.
type Resets interface {
	Plan(ctx context.Context, id gpu.DeviceID, loseMIG bool) resetter.Plan
	Begin(ctx context.Context, id gpu.DeviceID, loseMIG bool) resetter.Plan
	Progress(number uint64) (resetter.Progress, bool)
}

// ResetArgs select the GPU to reset.
type ResetArgs struct {
	GPU     string `json:"gpu"`     // as in ClearArgs
	DryRun  bool   `json:"dryRun"`  // nothing is done
	LoseMIG bool   `json:"loseMIG"` // also a GPU with MIG instances, which it loses
}

// resetPlan is the result of a reset that was asked for.
type resetPlan struct {
	resetter.Plan
	Index       int            `json:"index"`
	PCI         gpu.PCIAddress `json:"pci"`
	Model       string         `json:"model"`
	Persistence string         `json:"persistence"`   // mode, in the words of nvidia-smi; "" = not known
	MIG         int            `json:"mig,omitempty"` // instances, which the GPU loses
	Others      int            `json:"others"`        // GPUs of the node
	DryRun      bool           `json:"dryRun"`
}

func (h handler) reset(ctx context.Context, args ResetArgs) (resetPlan, error) {
	s := h.State()
	id, err := argParser{s, time.Now()}.physicalGPU(args.GPU)
	if err != nil {
		return resetPlan{}, err
	}
	p := resetPlan{Index: -1, DryRun: args.DryRun}
	for i := range s.Snapshot.Devices {
		switch d := &s.Snapshot.Devices[i]; {
		case d.ID == id:
			p.Index, p.PCI, p.Model, p.Persistence = d.Index, d.PCI, d.Model, d.PersistenceMode.String()
		case d.At.GPU == id:
			p.MIG++
		case d.Profile == "":
			p.Others++
		}
	}
	if args.DryRun {
		p.Plan = h.Resets.Plan(ctx, id, args.LoseMIG)
	} else {
		p.Plan = h.Resets.Begin(ctx, id, args.LoseMIG)
	}
	return p, nil
}

func (p resetPlan) log(log *slog.Logger, _ string, peer slog.Attr) {
	switch {
	case p.DryRun:
	case p.Number == 0:
		log.Warn("reset asked for by operator can't begin", "gpu", p.GPU, "reasons", reasons(p.Keeps), peer)
	default:
		log.Warn("reset asked for by operator begins", "gpu", p.GPU, "number", p.Number, peer)
	}
}

func reasons(keeps []reset.Wait) (texts []string) {
	for _, w := range keeps {
		texts = append(texts, w.Text)
	}
	return texts
}

// resetProgress answers how far a reset has come.
func (h handler) resetProgress(w http.ResponseWriter, r *http.Request) {
	number, err := strconv.ParseUint(r.FormValue("number"), 10, 64)
	if err != nil {
		err = &setting.Error{Key: "number", Value: r.FormValue("number"), Remedy: "want the number of a reset"}
		respond(w, statusCode(err), errorBody{err.Error()})
		return
	}
	p, ok := h.Resets.Progress(number)
	if !ok {
		respond(w, http.StatusNotFound, errorBody{fmt.Sprintf("no reset of this process has number %d, or a later one has begun: inspect shows the latest of each GPU", number)})
		return
	}
	respond(w, http.StatusOK, p)
}

// Times of a client that waits for a reset.
const (
	resetPoll     = 300 * time.Millisecond
	silentAtMost  = 15 * time.Second // for the agent to answer again
	followUpAfter = time.Second      // for the first reading after a reset to be in the report
)

// Reset has the agent at path reset a GPU, and writes what is done until it has ended, or with DryRun what would be done, and all that keeps it from
// beginning. It fails with *NotBegunError or *NotResetError if the GPU was not reset. The end of ctx does not end the reset.
func Reset(ctx context.Context, path string, args ResetArgs, out io.Writer) error {
	p, err := call[resetPlan](ctx, path, resetURL, args)
	if err != nil {
		return err
	}
	p.write(out)
	switch {
	case len(p.Keeps) > 0:
		return &NotBegunError{p.GPU, p.Keeps}
	case args.DryRun:
		_, err = fmt.Fprintln(out, "nothing keeps it from beginning now; nothing was done")
		return err
	}
	fmt.Fprintln(out, "the reset has begun; the end of this command does not end it")
	end, err := followReset(ctx, path, p.Number, out)
	if err != nil {
		return err
	}
	return writeEnd(ctx, path, p.GPU, end, out)
}

// NotBegunError is that a reset can't begin now.
type NotBegunError struct {
	GPU   gpu.DeviceID
	Keeps []reset.Wait
}

// Error has a line for each reason.
func (e *NotBegunError) Error() string {
	text := fmt.Sprintf("a reset of %s can't begin now:", e.GPU)
	for _, w := range e.Keeps {
		text += fmt.Sprintf("\n  %s: %s", w.Code, w.Text)
	}
	return text
}

// NotResetError is that a reset has begun, and the GPU was not reset.
type NotResetError struct {
	GPU gpu.DeviceID
	End reset.End
}

// Error has the outcome.
func (e *NotResetError) Error() string { return fmt.Sprintf("%s was not reset: %s", e.GPU, &e.End) }

// write writes the steps of a reset.
func (p resetPlan) write(out io.Writer) {
	name := string(p.GPU)
	if p.Index >= 0 {
		name = fmt.Sprintf("%s (index %d, %s, %s)", p.GPU, p.Index, p.PCI, p.Model)
	}
	fmt.Fprintf(out, "reset of %s:\n", name)
	taken := "the GPU"
	if len(p.With) > 0 {
		taken = fmt.Sprintf("the GPU and the other GPUs of its P2P group, %s,", report.IDs(p.With))
	}
	steps := []string{
		"take " + taken + " from every API, when nothing has had it for 30 s",
		"look for processes that have it open: one ends the try, and is not stopped",
		fmt.Sprintf("have the agents of this node close the driver: its other GPUs (%d) keep their health for at most a minute, and take no new work until it is open again; running work goes on", p.Others),
	}
	run := "run nvidia-smi --gpu-reset -i " + string(p.GPU)
	switch p.Persistence {
	case gpu.Enabled.String():
		run = "turn its persistence mode off, " + run + ", and turn the mode on again"
	case "":
		run += "; a persistence mode that is on is off meanwhile"
	}
	if p.MIG > 0 {
		run += fmt.Sprintf("; its MIG instances (%d) are lost", p.MIG)
	}
	steps = append(steps, run, "open the driver, read all GPUs, and give it back")
	for i, step := range steps {
		fmt.Fprintf(out, "  %d. %s\n", i+1, step)
	}
}

// followReset writes each phase of a reset as it comes, and returns its end.
func followReset(ctx context.Context, path string, number uint64, out io.Writer) (reset.End, error) {
	url, written, answered := resetURL+"?number="+strconv.FormatUint(number, 10), 0, time.Now()
	for {
		p, err := call[resetter.Progress](ctx, path, url, nil)
		if refused, ok := errors.AsType[*RefusedError](err); ok {
			return reset.End{}, refused
		}
		if err == nil {
			answered = time.Now()
		} else if ctx.Err() != nil || time.Since(answered) > silentAtMost {
			return reset.End{}, fmt.Errorf("the reset may go on, inspect shows its result: %w", err)
		}
		for ; written < len(p.Phases); written++ {
			fmt.Fprintf(out, "%s %s\n", p.Phases[written].At.Local().Format(time.TimeOnly), p.Phases[written].Text)
		}
		if p.End != nil {
			return *p.End, nil
		}
		watch.Sleep(ctx, resetPoll)
	}
}

// writeEnd writes the result of a reset, and what follows.
func writeEnd(ctx context.Context, path string, id gpu.DeviceID, end reset.End, out io.Writer) error {
	if end.Outcome != reset.Done {
		return &NotResetError{id, end}
	}
	fmt.Fprintf(out, "%s was reset; all of it took %v\n", id, end.Took.Round(time.Second))
	watch.Sleep(ctx, followUpAfter)
	r, err := Report(ctx, path)
	if err != nil {
		return fmt.Errorf("whether the GPU takes work is not known: %w", err)
	}
	for _, line := range takesWork(r, id) {
		fmt.Fprintln(out, line)
	}
	return nil
}

// takesWork is when a GPU that was reset takes work.
func takesWork(r report.Report, id gpu.DeviceID) (lines []string) {
	for _, c := range r.Conditions {
		if c.GPU == id && c.InEffect() {
			lines = append(lines, fmt.Sprintf("it takes work when this is over: %s: cleared by: %s", c, c.Clears))
		}
	}
	for _, p := range r.Proofs {
		if p.GPU == id && (p.Running != "" || p.WaitsFor != "") {
			lines = append(lines, "it is proved before or while it takes work, see prove: "+p.Waits)
		}
	}
	of := func(d report.Device) bool { return d.GPU == id }
	if i := slices.IndexFunc(r.Devices, of); i >= 0 && len(lines) == 0 {
		lines = append(lines, "it is "+r.Devices[i].State.String()+": no condition keeps work from it")
	}
	return lines
}
