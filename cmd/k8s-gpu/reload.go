package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/control"
)

// lives are what a process does: one life of the agent after another, each with the settings of its time. HUP
// has them read again; NVIDIA's config-manager sends it after it has changed the configuration file.
//
//	settings --> life ------------------+--> next life
//	              |                     |
//	             HUP: read again        | changed: the old life ends, kubelet's sockets, driver and all
//	              |- unchanged: so be it
//	              |- another policy: the life adopts it; resources that it leaves as they are keep their streams
//	              |- bad: every problem is said, the old life goes on untouched
//	              '- another driver root: the process ends, as it can't let go of the driver's library
//
// NVIDIA's plugin stops its plugins first and reads then: a bad file ends it.
type lives struct {
	read   func() (settings, error)
	live   func(context.Context, settings, <-chan settings, *slog.Logger) error // one life: see shared.live
	hup    <-chan os.Signal
	config *configStatus
	stderr io.Writer
	warned string // text of the configuration file of which the warnings are logged; "" = of none
}

const (
	endsAtMost = 5 * time.Second // for a life, which gives itself two

	// between is the rest between two lives: kubelets up to 1.36 may take the end of the old stream for
	// that of the new one.
	between = time.Second
)

var errEndless = errors.New("the configuration changed and what ran with the old one does not end; a new process is needed, and the DaemonSet starts one")

// run lives until ctx ends, a life fails, or a new process is needed.
func (l *lives) run(ctx context.Context) error {
	s, err := l.read()
	if err != nil {
		return err
	}
	for more := true; more; {
		l.config.loaded(time.Now())
		if s, more, err = l.spend(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// spend spends a life. With more, another one is wanted, with the settings that are returned.
func (l *lives) spend(ctx context.Context, s settings) (next settings, more bool, err error) {
	log := slog.New(slog.NewTextHandler(l.stderr, &slog.HandlerOptions{Level: s.LogLevel}))
	for _, note := range s.Notes {
		log.Info(note)
	}
	l.warn(s, log)
	life, end := context.WithCancel(ctx)
	defer end()
	ended, offers := make(chan error, 1), make(chan settings, 1)
	go func() { ended <- l.live(life, s, offers, log) }()
	came, hup, now := make(chan reading, 1), l.hup, s
	for changed := false; !changed; {
		select {
		case err := <-ended:
			return settings{}, false, err
		case <-ctx.Done():
			log.Info("stopping", "cause", context.Cause(ctx))
			return settings{}, false, <-ended
		case <-hup:
			hup = nil // one at a time, beside the life: where the file is may hang
			go func() {
				s, err := l.read()
				came <- reading{s, err}
			}()
		case r := <-came:
			hup = l.hup
			if next, changed = r.s, l.judge(now, r, log); changed && next.DiffersInPolicyOnly(now) {
				replace(offers, next)
				now, changed = next, false
			}
		}
	}
	end()
	select {
	case err := <-ended:
		if err != nil {
			return settings{}, false, err
		}
	case <-time.After(endsAtMost):
		return settings{}, false, errEndless
	}
	if otherLibrary(s, next) {
		log.Warn("the driver root changed, and a process keeps the driver's library that it has: this one ends, the DaemonSet starts another",
			"was", s.Core.Roots.Driver, "is", next.Core.Roots.Driver)
		return settings{}, false, nil
	}
	select {
	case <-ctx.Done():
		return settings{}, false, nil
	case <-time.After(between):
		return next, true, nil
	}
}

// reading is what the settings are by now.
type reading struct {
	s   settings
	err error
}

// judge says what becomes of a reading, and reports whether another life is to begin with it.
func (l *lives) judge(s settings, r reading, log *slog.Logger) (changed bool) {
	if r.err != nil {
		for line := range strings.Lines(r.err.Error()) {
			log.Error("configuration not reloaded", "problem", strings.TrimSuffix(line, "\n"))
		}
		log.Error("configuration not reloaded: the old one stays in force, all of it")
		l.config.refused(time.Now(), r.err)
		return false
	}
	l.warn(r.s, log)
	if r.s.Equal(s) {
		log.Info("configuration reloaded: nothing changed")
		l.config.loaded(time.Now())
		return false
	}
	how := "starting anew"
	if r.s.DiffersInPolicyOnly(s) {
		how = "what is offered changes"
		l.config.loaded(time.Now())
	}
	log.Info("configuration reloaded: "+how, "changed", strings.Join(r.s.Changes(s), ", "))
	return true
}

// warn logs what the configuration file means otherwise than to NVIDIA's plugin, once for each text of the file.
func (l *lives) warn(s settings, log *slog.Logger) {
	if s.File.Text == l.warned {
		return
	}
	l.warned = s.File.Text
	for _, w := range s.File.Warnings {
		log.Warn("configuration differs in effect from NVIDIA's k8s-device-plugin", "warning", w)
	}
}

// replace puts the latest settings into a channel that holds one; nobody else puts any there.
func replace(c chan settings, latest settings) {
	select {
	case <-c:
	default:
	}
	c <- latest
}

// otherLibrary reports whether the driver's library may be another one: see nvidia.Open.
func otherLibrary(a, b settings) bool {
	return a.Core.Roots.Driver != b.Core.Roots.Driver || a.FallbackDriver != b.FallbackDriver
}

// signals are those that do not end the agent: HUP, and what is asked of the machine. They are caught until
// the process has ended, so that none ends it sooner. One HUP that waits stands for all, as each has the whole
// configuration read.
func signals() (hup, asked <-chan os.Signal) {
	h, a := make(chan os.Signal, 1), make(chan os.Signal, 4)
	signal.Ignore(syscall.SIGPIPE) // who read the log is gone: the agent is not
	signal.Notify(h, syscall.SIGHUP)
	signal.Notify(a, control.QuiesceSignal, control.ResumeSignal)
	return h, a
}
