package agent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"time"
)

// Reloader runs an agent, and reads its configuration S again at each SIGHUP; NVIDIA's config-manager sends that signal after it
// has changed the configuration file. NVIDIA's plugin stops its plugins before it reads, so an invalid file ends it.
//
//	configuration --> run ------------------+--> next run
//	                   |                    |
//	                  HUP: read again       | RunChanged: the run ends, sockets and driver session with it
//	                   |- invalid: every problem is logged, the run goes on unchanged
//	                   |- Unchanged
//	                   |- PolicyChanged: the run applies it; resources that it does not change keep their streams
//	                   '- LibraryChanged: the process ends, because it can't unload the driver's library
type Reloader[S any] struct {
	Read     func() (S, error)
	Run      func(ctx context.Context, s S, policies <-chan S, log *slog.Logger) error // one run: it applies what policies yields
	Compare  func(was, is S) (change Change, changed []string)                         // and the names of the settings that changed
	NewLog   func(S) *slog.Logger                                                      // called at the start of each run
	Announce func(S, *slog.Logger)                                                     // called after each valid read
	Hangup   <-chan os.Signal                                                          // one that is pending stands for all
	Changed  <-chan struct{}                                                           // the same, for what Read depends on beside a file; nil = nothing
	Status   *ReloadStatus
	Busy     func() bool // whether a run that was stopped may take longer: it waits for what can't be taken back; nil = none does
}

// Change is what a new configuration requires.
type Change int

// The changes, in the order of their effects.
const (
	Unchanged      Change = iota
	PolicyChanged         // the run applies it: only the policy differs
	RunChanged            // another run in this process
	LibraryChanged        // another process: the library of the driver may be another
)

const (
	stopTimeout = 5 * time.Second // for a run, whose own limit is 2 s

	// RestartPause is the time between two runs: kubelets up to 1.36 may take the end of the old stream for that of the new one.
	RestartPause = time.Second
)

var errNotStopped = errors.New("the configuration changed, and the run with the old one did not stop within " + stopTimeout.String() +
	": a new process is needed, and the DaemonSet starts one")

// Serve runs agents until ctx ends, a run fails or a new process is needed. A configuration that is invalid at the start is an
// error.
func (r *Reloader[S]) Serve(ctx context.Context) error {
	s, err := r.Read()
	for again := true; again && err == nil; {
		r.Status.Loaded(time.Now())
		s, again, err = r.runOnce(ctx, s)
	}
	return err
}

// result is what Read returned.
type result[S any] struct {
	s   S
	err error
}

// runOnce runs an agent. With again, another run is needed, with the configuration that is returned.
func (r *Reloader[S]) runOnce(ctx context.Context, s S) (next S, again bool, err error) {
	log := r.NewLog(s)
	r.Announce(s, log)
	run, stop := context.WithCancel(ctx)
	defer stop()
	ended, policies := make(chan error, 1), make(chan S, 1)
	go func(s S) { ended <- r.Run(run, s, policies, log) }(s)
	reads, hangup, changedInput := make(chan result[S], 1), r.Hangup, r.Changed
	readAgain := func() { // one read at a time, beside the run: reading the file may hang
		hangup, changedInput = nil, nil
		go func() {
			s, err := r.Read()
			reads <- result[S]{s, err}
		}()
	}
	change, changed := Unchanged, []string(nil)
	for change < RunChanged {
		select {
		case err := <-ended:
			return s, false, err
		case <-ctx.Done():
			log.Info("stopping", "cause", context.Cause(ctx))
			return s, false, <-ended
		case <-hangup:
			readAgain()
		case <-changedInput:
			readAgain()
		case read := <-reads:
			hangup, changedInput = r.Hangup, r.Changed
			if change, changed = r.compare(s, read, log); change != Unchanged {
				s = read.s
			}
			if change == PolicyChanged {
				replace(policies, s)
			}
		}
	}
	stop()
	if err := r.awaitEnd(ended); err != nil {
		return s, false, err
	}
	if change == LibraryChanged {
		log.Warn("driver library changed: the process ends, because it can't unload the old one; the DaemonSet starts another",
			"changed", strings.Join(changed, ", "))
		return s, false, nil
	}
	select {
	case <-ctx.Done():
		return s, false, nil
	case <-time.After(RestartPause):
		return s, true, nil
	}
}

// awaitEnd waits for the end of a run that was stopped.
func (r *Reloader[S]) awaitEnd(ended <-chan error) error {
	for {
		select {
		case err := <-ended:
			return err
		case <-time.After(stopTimeout):
			if r.Busy == nil || !r.Busy() {
				return errNotStopped
			}
		}
	}
}

// compare logs what a read means, and records it if no new run follows.
func (r *Reloader[S]) compare(was S, read result[S], log *slog.Logger) (change Change, changed []string) {
	if read.err != nil {
		for line := range strings.Lines(read.err.Error()) {
			log.Error("configuration not reloaded", "problem", strings.TrimSuffix(line, "\n"))
		}
		log.Error("configuration not reloaded: the old one stays in force")
		r.Status.Refused(time.Now(), read.err)
		return Unchanged, nil
	}
	r.Announce(read.s, log)
	message := "configuration reloaded: agent restarts in this process"
	switch change, changed = r.Compare(was, read.s); change {
	case Unchanged:
		r.Status.Loaded(time.Now())
		log.Info("configuration reloaded: nothing changed")
		return change, nil
	case PolicyChanged:
		r.Status.Loaded(time.Now())
		message = "configuration reloaded: policy applied"
	case RunChanged, LibraryChanged:
	}
	log.Info(message, "changed", strings.Join(changed, ", "))
	return change, changed
}

// replace puts the latest value into a channel of capacity 1 that has no other sender.
func replace[S any](c chan S, latest S) {
	select {
	case <-c:
	default:
	}
	c <- latest
}
