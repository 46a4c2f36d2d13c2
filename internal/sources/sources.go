// Package sources is where an agent hears of what matters beside the driver: from the kernel log, from its own past
// and from its host. It is the same for both agents.
package sources

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/checkpoint"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/hostwatch"
	"github.com/tandem-gpu/tandem/internal/kmsg"
	"github.com/tandem-gpu/tandem/internal/report"
)

// Sources are those that are not switched off. The agent works without any. All methods but Follow are safe
// for concurrent use.
type Sources struct {
	log      *slog.Logger
	proc     string // procfs root
	path     string // of the kernel log; "" = it is not read
	optional bool   // nobody minds if it can't be
	failure  atomic.Pointer[error]
	history  *checkpoint.File // nil = none is kept
	host     *hostwatch.Watcher
}

// Open names the sources of an agent with that configuration; mpsRoot is where this process sees the folders of the MPS
// control daemons. Nothing is read yet, but for the machine's boot id.
func Open(v config.Health, cfg core.Config, mpsRoot, agent string, log *slog.Logger) *Sources {
	s := &Sources{log: log, proc: cfg.Roots.Proc, path: v.KernelLog, optional: v.KernelLogOptional}
	if v.StateDir != "" {
		s.history = checkpoint.Open(v.StateDir, agent, cfg.Roots.Proc, log)
	}
	s.host = hostwatch.New(hostwatch.Options{Agent: agent, StateDir: v.StateDir, BootID: s.Boot().ID, MPSRoot: mpsRoot, Config: cfg, Log: log})
	return s
}

// Boot reads the present boot of the machine; what can't be read is unknown.
func (s *Sources) Boot() core.Boot {
	boot, _ := checkpoint.ReadBoot(s.proc) // the history says it if that fails
	return boot
}

// Host watches what the host has beside the driver.
func (s *Sources) Host() *hostwatch.Watcher { return s.host }

// Store is the agent's history; nil if none is kept.
func (s *Sources) Store() monitor.Store {
	if s.history == nil {
		return nil // not s.history: a nil *File would be a Store
	}
	return s.history
}

// Machine is what learns of the kernel log: a monitor.
type Machine interface {
	Restored(ctx context.Context) bool // waits until State has the history
	State() core.State
	Report(obs ...core.Observation) bool
}

const (
	reportAgain = 100 * time.Millisecond // after a machine could not take more at once
	unread      = "XIDs that only the kernel log has are not seen"
)

// Follow reports what the kernel log has that the machine's history does not know, a LogRead observation when that was
// all, and what comes from then on, until ctx ends or the log can't be read. LogRead without a number says that it is not
// read: there is none, or it failed.
func (s *Sources) Follow(ctx context.Context, m Machine) {
	if !m.Restored(ctx) {
		return
	}
	if s.path == "" {
		s.report(ctx, m, core.Observation{Kind: core.KernelLogRead})
		return
	}
	err := s.follow(ctx, m)
	if ctx.Err() != nil {
		return
	}
	s.report(ctx, m, core.Observation{Kind: core.KernelLogRead})
	s.failure.Store(&err)
	level := slog.LevelWarn
	if s.optional && errors.Is(err, kmsg.ErrUnavailable) {
		level = slog.LevelInfo
	}
	s.log.Log(ctx, level, unread, "error", err)
}

func (s *Sources) follow(ctx context.Context, m Machine) error {
	first, known := m.State().KernelLog()
	log, err := kmsg.Read(ctx, s.path, first)
	if err != nil {
		return err
	}
	if log.Older {
		s.log.Warn("the kernel log ends before the line that was read last: it is of another boot, and all of it is read",
			"next", log.Next, "expected", first)
	}
	if known {
		for _, l := range log.Lines { // NVML tells of none of these any more, so they wait for no event
			o := l.Observation()
			o.Backlog = true
			s.report(ctx, m, o)
		}
	}
	s.report(ctx, m, core.Observation{Kind: core.KernelLogRead, NextSequence: log.Next})
	return kmsg.Follow(ctx, s.path, log.Next, func(l kmsg.Line) { s.report(ctx, m, l.Observation()) })
}

// report reports one observation, and again until it is taken or ctx ends: one that is left out would be skipped for
// good as soon as a later one is taken. The kernel keeps its log meanwhile.
func (s *Sources) report(ctx context.Context, m Machine, o core.Observation) {
	for !m.Report(o) {
		select {
		case <-time.After(reportAgain):
		case <-ctx.Done():
			return
		}
	}
}

// Warnings say in a line each what is wrong with a source.
func (s *Sources) Warnings() []string {
	var notes []string
	if err := s.failure.Load(); err != nil {
		notes = append(notes, unread+": "+(*err).Error())
	}
	return slices.Concat(notes, historyNotes(s.history), s.host.Warnings())
}

// historyNotes say what is wrong with a history, if there is to be one.
func historyNotes(history *checkpoint.File) []string {
	if history == nil {
		return nil
	}
	notes := history.Warnings()
	for i := range notes {
		notes[i] = "health history: " + notes[i]
	}
	return notes
}

// Up says of each source by name whether it works: "kernel_log", "history". One that is switched off is
// missing.
func (s *Sources) Up() map[string]bool {
	up := map[string]bool{}
	if s.path != "" {
		up["kernel_log"] = s.failure.Load() == nil
	}
	if s.history != nil {
		up["history"] = s.history.Problem() == ""
	}
	return up
}

// Reading is what an agent that starts now would offer, with the history and on the host that it would find. A machine
// without a driver is an answer, not a failure; a driver that does not answer is given up on in time.
func Reading(ctx context.Context, open func() (monitor.Session, error), cfg core.Config, mpsRoot, stateDir, agent string) report.Report {
	var history *checkpoint.File
	var store monitor.Store
	if stateDir != "" {
		history = checkpoint.OpenReadOnly(stateDir, agent, cfg.Roots.Proc)
		store = history
	}
	state := report.Read(ctx, open, cfg, store)
	boot, _ := checkpoint.ReadBoot(cfg.Roots.Proc) // the history says it if that fails
	found := hostwatch.ReadOnce(hostwatch.Options{Agent: agent, StateDir: stateDir, BootID: boot.ID, MPSRoot: mpsRoot, Config: cfg}, state.Inventory)
	return report.DescribeState(state.WithHost(cfg, time.Now(), found), cfg, historyNotes(history)...)
}
