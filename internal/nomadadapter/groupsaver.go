package nomadadapter

import (
	"context"
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

const (
	loadAttempts     = 5                      // to read the group name file, before groups are named without it
	loadRetry        = 500 * time.Millisecond // between them; EMFILE, for example, is temporary
	groupFileTimeout = 10 * time.Second       // for the watchdog: one load or save
	saveRetry        = 30 * time.Second       // after a failed save

	// maxSaveWait is how long a fingerprint waits until its names are on disk, so that they survive a kill right after it.
	maxSaveWait = time.Second
)

// PersistGroups makes the plugin save the names of the groups that it announces in the state directory, and announce them
// again after a restart: Nomad loses the allocation of a device that moves to a group of another name. bootID returns the
// node's boot ID from procfs at procRoot ("" = /proc). Call it before Serve; without it names are not saved.
//
//	plugin   process 1: A = B in "NVLink A" ........ ends    process 2: A and B in "NVLink A"
//	links                       A   B
func (p *Plugin) PersistGroups(bootID func(procRoot string) (string, error)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bootID = bootID
}

// saveGroups starts the groupSaver of a run, if names are saved. The caller holds p.mu.
func (p *Plugin) saveGroups(r *run) {
	dir := r.settings.Health.StateDir
	if p.bootID == nil || dir == "" || !r.enabled {
		p.names.stopSaving()
		return
	}
	loaded, wake := p.names.startSaving()
	s := groupSaver{
		names: &p.names, loaded: loaded, wake: wake, done: r.done, task: watchdogOf(r.source).Register("groups"),
		file: groupFile{path: filepath.Join(dir, groupFileName), read: p.readFile, log: p.log}, look: p.savePolicyAgain,
	}
	bootID, procRoot := p.bootID, r.settings.Core.Roots.Proc
	p.diskWork.Go(func() {
		defer s.task.Done()
		s.file.boot, _ = bootID(procRoot) // if that fails, it is the one in the file
		s.run()
	})
}

// Flushed returns a channel that is closed when all writes to the state directory have ended. Call it after the context
// of New has ended.
func (p *Plugin) Flushed() <-chan struct{} {
	flushed := make(chan struct{})
	go func() {
		p.diskWork.Wait()
		close(flushed)
	}()
	return flushed
}

// groupSaver is the goroutine that blocks on the disk, so that fingerprints and reservations do not.
type groupSaver struct {
	names        *groupNamer
	loaded, wake chan struct{} // of names
	done         <-chan struct{}
	task         *watchdog.Task
	file         groupFile
	failing      bool // the last load or save failed
	onDisk       bool // the file was read or written
	look         func()
}

func (s *groupSaver) run() {
	if !s.load() {
		return
	}
	close(s.loaded)
	ctx, cancel := withDone(context.Background(), s.done)
	defer cancel()
	reconcile.Loop{
		On: []reconcile.Source{reconcile.Signal(s.wake)}, Task: s.task, Limit: groupFileTimeout,
	}.Run(ctx, func(context.Context, reconcile.Cause) time.Duration {
		s.look()
		switch {
		case !s.save():
			return saveRetry
		case s.onDisk:
			return statefile.LookEvery
		}
		return reconcile.Never
	})
	select {
	case <-s.wake: // there were new names at the end of the run
		s.save()
	default:
	}
}

// load merges the file into names; it returns false if the run ends meanwhile. If the file can't be read after
// loadAttempts, groups are named without it, and it is merged by the first save that can read it.
func (s *groupSaver) load() bool {
	s.task.Heartbeat(groupFileTimeout)
	statefile.RemoveTemporary(s.file.path)
	for attempt := 1; ; attempt++ {
		s.task.Heartbeat(groupFileTimeout)
		saved, text, err := s.file.load()
		if err == nil {
			s.onDisk = text != nil
			s.names.merge(saved)
			return true
		}
		if attempt == loadAttempts {
			s.logFailure("group name file not read, groups may get other names", err)
			return true
		}
		select {
		case <-time.After(loadRetry):
		case <-s.done:
			return false
		}
	}
}

// save writes the unsaved names, and all names if the file was removed, and reports whether none is left. The present
// content of the file is merged first: another process may have written it, or it could not be read before.
func (s *groupSaver) save() bool {
	if !s.names.unsaved() && (!s.onDisk || !statefile.IsMissing(s.file.path)) {
		return true
	}
	saved, text, err := s.file.load()
	all, done := s.names.beginSave(saved)
	if err == nil {
		err = s.file.save(all, text)
	}
	done(err == nil)
	if err != nil {
		s.logFailure("group names not saved, groups may get other names after a restart", err)
		return false
	}
	s.onDisk = true
	if s.failing {
		s.failing = false
		s.file.log.Info("group names saved again", "file", s.file.path)
	}
	return true
}

// logFailure logs the first of several failures in a row.
func (s *groupSaver) logFailure(message string, err error) {
	if !s.failing {
		s.file.log.Warn(message, "file", s.file.path, "error", err)
	}
	s.failing = true
}
