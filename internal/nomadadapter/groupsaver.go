package nomadadapter

import (
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/internal/watchdog"
)

const (
	loadAttempts  = 5                      // at the file of names while it can't be read, before it is done without
	recallPause  = 500 * time.Millisecond // between them; a table of open files that is full has room again soon
	groupsAtDisk = 10 * time.Second       // one reading or writing, by a disk that does not hang
	saveRetry    = 30 * time.Second       // after a write that failed

	// maxSaveWait bounds how long a fingerprint waits for its names to be on disk, so that a kill right after it
	// leaves them there. A disk that takes longer keeps Nomad waiting no longer.
	maxSaveWait = time.Second
)

// KeepNames has the plugin keep the names of the groups that it announces in the state directory, and announce them
// again after a restart: Nomad forgets which allocation holds a device that has come to a group of another name. bootID
// is the machine's boot id, with procfs at that folder ("" = /proc). Call it before serving; without it no names are kept.
//
//	plugin   process 1: A = B in "NVLink A" ........ ends    process 2: A and B in "NVLink A"
//	links                       A   B
func (p *Plugin) KeepNames(bootID func(procRoot string) (string, error)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bootID = bootID
}

// saveGroups starts the keeper of a life, if names are kept. Call it with p.mu held.
func (p *Plugin) saveGroups(l *run) {
	dir := l.settings.Health.StateDir
	if p.bootID == nil || dir == "" || !l.enabled {
		p.names.forget()
		return
	}
	recall, wake := p.names.keep()
	k := keeper{
		names: &p.names, recall: recall, wake: wake, ended: l.done, turns: watchdogOf(l.source).Register("groups"),
		file: groupFile{path: filepath.Join(dir, groupFileName), read: p.readFile, log: p.log},
	}
	bootID, procRoot := p.bootID, l.settings.Core.Roots.Proc
	p.diskWork.Go(func() {
		defer k.turns.Done()
		k.file.boot, _ = bootID(procRoot) // the history says it if that fails
		k.run()
	})
}

// Parted is closed when nothing is under way on disk any more. Call it after the context of New has ended.
func (p *Plugin) Parted() <-chan struct{} {
	parted := make(chan struct{})
	go func() {
		p.diskWork.Wait()
		close(parted)
	}()
	return parted
}

// keeper is the goroutine that may wait for the disk, so that neither a fingerprint nor a reservation does.
type keeper struct {
	names        *groupNamer
	recall, wake chan struct{} // the register's
	ended        <-chan struct{}
	turns        *watchdog.Task
	file         groupFile
	failing      bool
}

func (k *keeper) run() {
	if !k.remember() {
		return
	}
	close(k.recall)
	var again <-chan time.Time
	for {
		k.turns.Heartbeat(0)
		select {
		case <-k.wake:
		case <-again:
		case <-k.ended:
			return
		}
		k.turns.Heartbeat(groupsAtDisk)
		if again = nil; !k.save() {
			again = time.After(saveRetry)
		}
	}
}

// remember takes up what was kept, and reports whether the life goes on. A file that can't be read for a moment is tried
// again; if it still can't, names are given without it, and it is joined with them when it can.
func (k *keeper) remember() bool {
	k.turns.Heartbeat(groupsAtDisk)
	k.file.tidy()
	for try := 1; ; try++ {
		k.turns.Heartbeat(groupsAtDisk)
		kept, _, err := k.file.load()
		if err == nil {
			k.names.take(kept)
			return true
		}
		if try == loadAttempts {
			k.failed("the names of groups that were announced before can't be read: groups may have other names", err)
			return true
		}
		select {
		case <-time.After(recallPause):
		case <-k.ended:
			return false
		}
	}
}

// save writes the names that are not written yet, and reports whether none is left. What another process wrote meanwhile,
// or could not be read before, is joined with them: it is never overwritten unread.
func (k *keeper) save() bool {
	if !k.names.changed() {
		return true
	}
	kept, was, err := k.file.load()
	all, done := k.names.begin(kept)
	if err == nil {
		err = k.file.save(all, was)
	}
	done(err == nil)
	if err != nil {
		k.failed("the names of groups are not kept: after a restart they may be others", err)
		return false
	}
	if k.failing {
		k.failing = false
		k.file.log.Info("the names of groups are kept again", "file", k.file.path)
	}
	return true
}

// failed logs a failure, the first in a row only.
func (k *keeper) failed(message string, err error) {
	if !k.failing {
		k.file.log.Warn(message, "file", k.file.path, "error", err)
	}
	k.failing = true
}
