package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/node/kmsg"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// sources are the sources of health information apart from the driver: kernel log, own history, the state of the node. The agent works without any of
// them. All methods but follow are safe for concurrent use.
type sources struct {
	log      *slog.Logger
	procRoot string
	kmsgPath string // "" = the kernel log is not read
	optional bool   // the configuration does not name the kernel log
	open     func(path string) (kmsg.Log, error)
	failure  atomic.Pointer[error]
	history  *history.File // nil = no history is kept
	host     *host
}

// newSources reads the node's boot ID and nothing else.
func newSources(o Options) *sources {
	s := &sources{log: o.Log, procRoot: o.Core.Roots.Proc, kmsgPath: o.Health.KernelLog, optional: o.Health.KernelLogOptional}
	if s.open = kmsg.Open; s.optional {
		s.open = kmsg.OpenAny
	}
	if o.Health.StateDir != "" {
		s.history = history.Open(o.Health.StateDir, o.Name, o.Core.Roots.Proc, o.Log)
	}
	s.host = newHost(o)
	return s
}

func ownershipOptions(o Options) ownership.Options {
	boot, _ := history.ReadBoot(o.Core.Roots.Proc) // the history's warnings have the error
	return ownership.Options{
		Agent: o.Name, StateDir: o.Health.StateDir, BootID: boot.ID, Config: o.Core, Log: o.Log,
		ResetRuns: func() (bool, error) { return filelock.IsHeld(gpureset.LockPath(o.Health.StateDir)) },
	}
}

// boot reads the present boot of the node; the zero value is unknown.
func (s *sources) boot() core.Boot {
	boot, _ := history.ReadBoot(s.procRoot) // the history's warnings have the error
	return boot
}

// store is the agent's history on disk; nil if none is kept.
func (s *sources) store() monitor.Store {
	if s.history == nil {
		return nil // not s.history: a nil *File in an interface is not nil
	}
	return s.history
}

// logReader is what receives the kernel log: a monitor.
type logReader interface {
	Restored(ctx context.Context) bool // waits until State has the history
	State() core.State
	Report(obs ...health.Observation) bool // false = the queue is full
}

const (
	reportRetry    = 10 * time.Millisecond // after a full queue: the first reading waits for the log
	logUnavailable = "kernel log unavailable: " + health.WithoutKernelLog
)

// follow reports the lines of the kernel log that the history does not cover: on a first start those of this boot. Then
// it reports a KernelLogRead observation and new lines, until ctx ends or the log can't be read. A KernelLogRead
// without a number means that the log is not read.
func (s *sources) follow(ctx context.Context, m logReader) {
	if !m.Restored(ctx) {
		return
	}
	if s.kmsgPath == "" {
		s.report(ctx, m, health.Observation{Kind: health.KernelLogRead})
		return
	}
	err := s.followLog(ctx, m)
	if ctx.Err() != nil {
		return
	}
	s.report(ctx, m, health.Observation{Kind: health.KernelLogRead})
	s.failure.Store(&err)
	level := slog.LevelWarn
	if s.notGiven(err) {
		level = slog.LevelInfo
	}
	s.log.Log(ctx, level, logUnavailable, "error", err)
}

// notGiven reports whether the kernel log is one that the agent was not given, and that the configuration does not name: no fault, but a
// problem in reports.
func (s *sources) notGiven(err error) bool { return s.optional && errors.Is(err, kmsg.ErrUnavailable) }

func (s *sources) followLog(ctx context.Context, m logReader) error {
	file, err := s.open(s.kmsgPath)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	first, _ := m.State().KernelLog()
	if !file.Counts(first) {
		s.report(ctx, m, health.Observation{Kind: health.KernelLogReplaced})
		first = 0
	}
	log, err := file.Read(ctx, first)
	if err != nil {
		return err
	}
	if log.Older {
		s.log.Warn("kernel log ends before the last line read: it is of another boot, and is read from its start",
			"next", log.Next, "expected", first)
	}
	for _, l := range log.Lines { // NVML does not report these any more, so they wait for no event
		o := l.Observation()
		o.Backlog, o.Again = true, first == 0 || log.Older
		s.report(ctx, m, o)
	}
	s.report(ctx, m, health.Observation{Kind: health.KernelLogRead, NextSequence: log.Next, Complete: log.Complete})
	return file.Follow(ctx, log.Next, func(l kmsg.Line) { s.report(ctx, m, l.Observation()) })
}

// report reports one observation, and repeats that until it is accepted or ctx ends: if a later one were accepted first, this
// one would never be reported. The kernel keeps its log meanwhile.
func (s *sources) report(ctx context.Context, m logReader, o health.Observation) {
	for !m.Report(o) {
		select {
		case <-time.After(reportRetry):
		case <-ctx.Done():
			return
		}
	}
}

func (s *sources) problems() []problem.Problem {
	var all []problem.Problem
	if err := s.failure.Load(); err != nil {
		all = append(all, problem.Problem{Code: problem.KernelLog, Object: s.kmsgPath, Text: logUnavailable + ": " + (*err).Error()})
	}
	return slices.Concat(all, s.history.Problems(), s.host.agents.Problems())
}

func (s *sources) up() map[string]bool {
	up := map[string]bool{}
	if err := s.failure.Load(); s.kmsgPath != "" && (err == nil || !s.notGiven(*err)) {
		up["kernel_log"] = err == nil
	}
	if s.history != nil {
		up["history"] = len(s.history.Problems()) == 0
	}
	return up
}
