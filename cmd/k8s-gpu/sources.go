package main

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/kmsg"
	"github.com/tandem-gpu/tandem/internal/statefile"
)

// sources are where the agent hears of health beside the driver: from the kernel, and from its own past. What
// is switched off is nil.
type sources struct {
	kernelLog *kernelLog
	history   *statefile.File
}

func newSources(s settings, log *slog.Logger) sources {
	var from sources
	if path := s.health.KernelLog; path != "" {
		from.kernelLog = &kernelLog{path: path, optional: s.health.Optional, log: log}
	}
	if dir := s.health.StateDir; dir != "" {
		from.history = statefile.Open(dir, agentName, s.core.Roots.Proc, log)
	}
	return from
}

// store is the history as the monitor wants it; nil if none is kept.
func (s sources) store() monitor.Store {
	if s.history == nil {
		return nil // not s.history: a nil *File would be a Store
	}
	return s.history
}

// follow reports what the kernel log says until ctx ends.
func (s sources) follow(ctx context.Context, report func(...core.Observation) bool) {
	if s.kernelLog != nil {
		s.kernelLog.follow(ctx, report)
	}
}

// notes say in a line each what is wrong with a source.
func (s sources) notes() []string {
	var notes []string
	if s.kernelLog != nil {
		if err := s.kernelLog.problem(); err != nil {
			notes = append(notes, "XIDs that only the kernel log has are not seen: "+err.Error())
		}
	}
	if s.history != nil {
		if problem := s.history.Problem(); problem != "" {
			notes = append(notes, "health history: "+problem)
		}
	}
	return notes
}

// kernelLog is the second source of XIDs. The agent works without.
type kernelLog struct {
	path     string
	optional bool // nobody minds if it can't be read
	log      *slog.Logger
	failure  atomic.Pointer[error]
}

func (k *kernelLog) follow(ctx context.Context, report func(...core.Observation) bool) {
	err := kmsg.Follow(ctx, k.path, 0, func(l kmsg.Line) {
		if !report(l.Observation()) {
			k.log.Warn("too much happens at once, a line of the kernel log is left out", "pci", l.PCI, "xid", l.XID)
		}
	})
	if ctx.Err() != nil {
		return
	}
	k.failure.Store(&err)
	level := slog.LevelWarn
	if k.optional && errors.Is(err, kmsg.ErrUnavailable) {
		level = slog.LevelInfo
	}
	k.log.Log(ctx, level, "XIDs that only the kernel log has are not seen", "error", err)
}

// problem is why the log is not read any more; nil while it is.
func (k *kernelLog) problem() error {
	if err := k.failure.Load(); err != nil {
		return *err
	}
	return nil
}
