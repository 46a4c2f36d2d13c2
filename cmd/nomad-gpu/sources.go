package main

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/kmsg"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/statefile"
)

// agentName names the plugin's files in the state directory.
const agentName = "nomad-gpu"

// sources are where the plugin hears of health beside the driver: from the kernel, and from its own past.
// What is switched off is nil.
type sources struct {
	kernelLog *kernelLog
	history   *statefile.File
}

func newSources(s nomadadapter.Settings, log *slog.Logger) sources {
	var from sources
	if path := s.Health.KernelLog; path != "" {
		from.kernelLog = &kernelLog{path: path, optional: s.Health.Optional, log: log}
	}
	if dir := s.Health.StateDir; dir != "" {
		from.history = statefile.Open(dir, agentName, s.Core.Roots.Proc, log)
	}
	return from
}

// notes say in a line each what is wrong with a source.
func (s sources) notes() []string {
	var notes []string
	if s.kernelLog != nil {
		if err := s.kernelLog.problem(); err != nil {
			notes = append(notes, "XIDs that only the kernel log has are not seen: "+err.Error())
		}
	}
	return append(notes, historyNotes(s.history)...)
}

// historyNotes say what is wrong with the history, if there is to be one.
func historyNotes(history *statefile.File) []string {
	if history == nil || history.Problem() == "" {
		return nil
	}
	return []string{"health history: " + history.Problem()}
}

// kernelLog is the second source of XIDs. The plugin works without.
type kernelLog struct {
	path     string
	optional bool // nobody minds if it can't be read
	log      *slog.Logger
	failure  atomic.Pointer[error]
}

// follow reports what the log says until ctx ends or it can't be read.
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
