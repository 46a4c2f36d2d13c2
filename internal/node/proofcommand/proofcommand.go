// Package proofcommand runs the operator's command that proves one GPU, and returns how it ended. It decides neither when a GPU is proved nor what
// follows: it makes sure that the command gets this GPU only, ends in time, and leaves nothing behind.
package proofcommand

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Proof is one run of the command.
type Proof struct {
	Command     []string     // program, by an absolute path, and arguments: no shell reads them
	GPU         gpu.DeviceID // that the command sees
	Reason      string       // why it runs: TANDEM_PROOF_REASON
	Timeout     time.Duration
	LibraryPath string // LD_LIBRARY_PATH of the command; "" = not set
	Folder      string // in which Run makes the working folder: only the agent's user can write it, and nothing else is in it. CleanUp gets the same
}

// Outcome is how a run ended.
type Outcome uint8

// Outcomes. Only Passed and Failed are evidence about the GPU.
const (
	CouldNotRun Outcome = iota // see Cause
	Passed                     // exit status 0
	Failed                     // exit status 1
	Cancelled                  // the context ended before the command
)

var outcomeNames = [...]string{"could-not-run", "passed", "failed", "cancelled"}

// String returns the name of the outcome for programs.
func (o Outcome) String() string { return outcomeNames[o] }

// Cause is why there is no verdict.
type Cause uint8

// Causes of CouldNotRun.
const (
	NoCause        Cause = iota // of the other outcomes
	ProgramMissing              // there is no file at the path of the program
	ProgramRefused              // Check refuses it: who may write it, its rights, no absolute path
	NotStarted                  // the kernel does not start it, or there is no working folder
	Reported                    // exit status 2: the command itself reports that it could not run
	OtherStatus                 // another exit status
	Signal                      // it was ended by a signal that Run has not sent
	Timeout                     // it has not ended in time
)

var causeNames = [...]string{"", "program-missing", "program-refused", "not-started", "reported", "other-status", "signal", "timeout"}

// String returns the name of the cause for programs, "" for NoCause.
func (c Cause) String() string { return causeNames[c] }

// Result is how a run ended, and what the command printed.
type Result struct {
	Outcome  Outcome
	Cause    Cause
	Text     string // one sentence about the outcome
	Duration time.Duration
	Summary  string             // of the command: one line of at most 200 characters; "" = none
	Values   map[string]float64 // that the command has measured
	Note     string             // what the last line of stdout has that was dropped; "" = nothing
	Output   string             // the end of stdout and stderr, printable, at most 64 KiB
	Left     []int              // PIDs of the run that could not be killed: they may still use the GPU
}

// Run runs the command until it ends, ctx ends or the time is over. It ends what the command has started, and returns within 10 s after the
// timeout, even if a process can't be killed.
func Run(ctx context.Context, p Proof) Result { return standard.run(ctx, p) }

// runner has what tests replace.
type runner struct {
	check                         func(command []string) error
	groups                        func() string    // folder of the agent's control group
	kill                          func(*processes) // sends SIGKILL
	termWait, killWait, outputMax time.Duration    // after SIGTERM; after SIGKILL; for the output after the end
}

var standard = runner{Check, ownGroup, (*processes).kill, 2 * time.Second, 4 * time.Second, time.Second}

// errTimeout is the cause of a context that ended because the time of the proof is over.
var errTimeout = errors.New("the time of the proof is over")

func (r runner) run(ctx context.Context, p Proof) Result {
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, p.Timeout, errTimeout)
	defer cancel()
	c := newChild(r, p)
	go c.live()
	result := c.follow(ctx)
	result.Duration = time.Since(began)
	return result
}

// follow waits for the end of the command, or ends it, and then ends what it has left.
func (c *child) follow(ctx context.Context) Result {
	select {
	case <-c.exited:
	case <-ctx.Done():
	}
	stopped := !isClosed(c.exited)
	if stopped {
		c.terminate()
	}
	left := c.processes.end(c.runner.kill, c.runner.killWait)
	close(c.released)
	if !isClosed(c.exited) { // also when it was started just now
		c.runner.kill(&c.processes)
	}
	reaped := watch.Await(context.WithoutCancel(ctx), c.reaped, 2*c.runner.outputMax)
	result := c.output.result()
	result.Left = left
	switch cause := context.Cause(ctx); {
	case stopped && errors.Is(cause, errTimeout):
		result.Cause, result.Text = Timeout, fmt.Sprintf("the command has not ended within %v", c.proof.Timeout)
	case stopped:
		result.Outcome, result.Text = Cancelled, fmt.Sprintf("cancelled: %v", cause)
	case !reaped:
		result.Cause, result.Text = NotStarted, "the end of the command could not be read"
	case c.err != nil:
		result.Cause, result.Text = causeOf(c.err), strings.ReplaceAll(c.err.Error(), "\n", "; ")
	default:
		result.Outcome, result.Cause, result.Text = verdict(c.cmd.ProcessState)
	}
	return result
}

// terminate asks the command to end, and waits for that.
func (c *child) terminate() {
	wait := time.NewTimer(c.runner.termWait)
	defer wait.Stop()
	select {
	case <-c.started:
		c.processes.terminate()
	case <-c.exited: // it could not be started
	case <-wait.C: // its start hangs
		return
	}
	select {
	case <-c.exited:
	case <-wait.C:
	}
}

func causeOf(err error) Cause {
	_, refused := errors.AsType[*ProgramError](err)
	switch {
	case errors.Is(err, ErrMissing):
		return ProgramMissing
	case refused:
		return ProgramRefused
	}
	return NotStarted
}

func verdict(s *os.ProcessState) (Outcome, Cause, string) {
	switch status := s.ExitCode(); status {
	case 0:
		return Passed, NoCause, "the command ended with exit status 0: passed"
	case 1:
		return Failed, NoCause, "the command ended with exit status 1: failed"
	case 2:
		return CouldNotRun, Reported, "the command ended with exit status 2: it could not run"
	case -1:
		return CouldNotRun, Signal, "the command was ended by a signal: " + s.String()
	default:
		return CouldNotRun, OtherStatus, fmt.Sprintf("the command ended with exit status %d, which is no verdict", status)
	}
}

// newName returns a name that no other run has.
func newName() string { return "tandem-proof-" + rand.Text() }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
