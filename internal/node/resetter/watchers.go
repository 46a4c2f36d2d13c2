package resetter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

const (
	commandAtMost = time.Minute     // for a command of reset.Pause
	orphanAtMost  = 5 * time.Minute // for which the nvidia-smi of an earlier process is awaited
)

// resuming is why no reset begins while programs that watch GPUs are stopped.
const resuming = "programs that watch GPUs were stopped for a reset, and do not run again yet"

// stopWatchers stops the programs that watch GPUs, if they have a GPU open. That they are to be started again is on
// disk before.
//
//	on disk . . . stop . . . reset, or not . . . start . . . on disk
//	the agent is killed at any point after the first: the next process starts them
func (a *attempt) stopWatchers(ctx context.Context, target gpureset.Target) error {
	if len(a.opts.Pause.Programs) == 0 {
		return nil
	}
	look, err := a.opts.Resetter.Look(ctx, target)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(look.Clients, func(c gpureset.Client) bool { return a.opts.Pause.Has(c.Name) }) {
		return nil
	}
	a.phase("stopping programs that watch GPUs: " + strings.Join(a.opts.Pause.Programs, ", "))
	a.pausing.Lock()
	defer a.pausing.Unlock()
	a.mu.Lock()
	s := a.state.Stopped()
	err = a.file.Store(s)
	if err == nil {
		a.set(s)
	}
	a.mu.Unlock()
	if err != nil {
		return &cancelError{"the record of resets can't be written: " + err.Error()}
	}
	if err := a.command(ctx, a.opts.Pause.Stop); err != nil {
		return fmt.Errorf("programs that watch GPUs are not stopped: %w", err)
	}
	return nil
}

// resumeWatchers starts the programs again that a reset has stopped, unless another one runs.
func (r *Resetter) resumeWatchers(ctx context.Context) {
	r.pausing.Lock()
	defer r.pausing.Unlock()
	r.mu.Lock()
	stopped := r.state.Watchers && r.Resets() == ""
	r.mu.Unlock()
	if !stopped {
		return
	}
	r.endCommands()
	err := r.command(ctx, r.opts.Pause.Resume)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		one := problem.Problem{
			Code:   problem.WatchersStopped,
			Text:   "programs that watch GPUs were stopped for a reset, and are not started: " + err.Error(),
			Remedy: "correct reset.pause.resume, which runs again each minute: until it has ended with 0 no GPU is reset",
		}
		r.problems.Put(one, slog.LevelWarn, "programs that watch GPUs are not started after a reset", "error", err)
		return
	}
	r.change(reset.State.Resumed)
	r.problems.End(problem.WatchersStopped, "", "programs that watch GPUs were started again after a reset")
	r.wake()
}

// endCommands ends what commands of an earlier process have left running: they could stop the programs again. pausing
// is locked.
func (r *Resetter) endCommands() {
	if r.opts.Folder == "" {
		return
	}
	if err := proofcommand.CleanUp(r.opts.Folder); err != nil {
		r.opts.Log.Warn("processes of earlier commands of reset.pause can't be ended", "error", err)
	}
}

// command runs a command of reset.Pause.
func (r *Resetter) command(ctx context.Context, command []string) error {
	if len(command) == 0 {
		return errors.New("the configuration has no command for that any more")
	}
	run := proofcommand.Proof{Command: command, Reason: "reset", Timeout: commandAtMost, Folder: r.opts.Folder}
	result := r.opts.Command(ctx, run)
	if result.Outcome != proofcommand.Passed {
		return errors.New(strings.TrimSpace(result.Text + " " + proofcommand.Line(result.Output, maxOutput)))
	}
	return nil
}

// maxOutput is how much of what a command has printed an error has, in bytes.
const maxOutput = 300

// orphanRuns reports whether an nvidia-smi that this process does not wait for may reset a GPU. After some minutes it
// counts as one that hangs.
func (r *Resetter) orphanRuns() bool {
	if r.opts.Runs == nil || r.Resets() != "" {
		return false
	}
	runs, err := r.opts.Runs()
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !runs && err == nil:
		r.orphan = time.Time{}
	case r.orphan.IsZero():
		r.orphan = time.Now()
	}
	return !r.orphan.IsZero() && time.Since(r.orphan) < orphanAtMost
}
