package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/config"
	"github.com/tandem-gpu/tandem/internal/fleet/server"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

const (
	stopWithin  = fleet.CallTimeout + 5*time.Second // calls under way get their answers, and the lead is released
	storeWithin = 30 * time.Second                  // for a command that reads and writes the ledger
)

// settings are those of the flags and the configuration.
type settings struct {
	config.Config
	identity string
	log      *slog.Logger
}

// settings reads flags and configuration.
func (p *program) settings() (settings, error) {
	if !slices.Contains(formats, p.logFormat) {
		return settings{}, command.Usagef("--log-format = %q: want %s", p.logFormat, document.Choice(formats))
	}
	level, ok := levels[p.logLevel]
	if !ok {
		return settings{}, command.Usagef("--log-level = %q: want %s", p.logLevel, document.Choice(levelNames))
	}
	read, err := config.Load(p.file)
	unread, later := read.Unread()
	if err := errors.Join(append(split(err), unread...)...); err != nil {
		return settings{}, &configError{err}
	}
	log := p.log.Logger(level)
	for _, err := range later {
		log.Warn("file can't be read now, and is read again at each use", "error", err)
	}
	return settings{read, cmp.Or(p.identity, randomIdentity()), log}, nil
}

// randomIdentity is a name that no other process has: two processes of one host may be in one team.
func randomIdentity() string {
	host, err := os.Hostname()
	if err != nil {
		host = name
	}
	return fmt.Sprintf("%s_%s", host, strings.ToLower(rand.Text()[:8]))
}

// serve runs until ctx ends, or something fails without which the process is of no use.
func (p *program) serve(ctx context.Context) (err error) {
	p.log.Set(p.logFormat)
	s, err := p.settings()
	if err != nil {
		return err
	}
	t, err := s.connect()
	if err != nil {
		return err
	}
	leader, err := t.leader()
	if err != nil {
		return err
	}
	if c, ok := leader.(io.Closer); ok {
		defer func() { _ = c.Close() }() // the process ends
	}
	tasks := watchdog.NewRegistry()
	c := fleet.New(fleet.Options{
		Identity: s.identity, Policy: s.Policy, Clusters: t.clusters, Store: t.store, Leader: leader, Log: s.log, Watchdog: tasks,
	})
	h := server.New(server.Options{
		Listen: s.Listen, TokenFile: s.TokenFile, View: c.View(), Stop: c.Stop, Resume: c.Resume, Log: s.log, Version: command.VersionText(version),
	})
	s.log.Info("gpu-fleet starts", "version", command.VersionText(version), "identity", s.identity, "ledger", t.store.String())
	for _, line := range s.Summary() {
		s.log.Info("configuration", "is", line)
	}
	ended := watch.RunUntil(ctx, stopWithin, func() {
		all, ctx := errgroup.WithContext(ctx)
		all.Go(func() error { return c.Run(ctx) })
		all.Go(func() error { return h.Run(ctx) })
		all.Go(func() error { return tasks.Watch(ctx, s.log, "rescue") })
		err = all.Wait()
	})
	if !ended {
		return fmt.Errorf("not everything stopped within %v: the process exits without it", stopWithin)
	}
	if ctx.Err() != nil {
		s.log.Info("gpu-fleet has stopped", "identity", s.identity)
		return nil
	}
	return err
}

// create is the command init.
func (p *program) create(ctx context.Context) error {
	s, err := p.settings()
	if err != nil {
		return err
	}
	t, err := s.connect()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, storeWithin)
	defer cancel()
	switch err := t.store.Create(ctx); {
	case errors.Is(err, fleet.ErrExists):
		return fmt.Errorf("%s: %w: nothing was changed", t.store, err)
	case err != nil:
		return fmt.Errorf("the ledger can't be created: %w", err)
	}
	_, err = fmt.Fprintf(p.stdout, "created the ledger: %s\n", t.store)
	return err
}
