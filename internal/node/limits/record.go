package limits

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/recordfile"
)

// The record of limits belongs to one process. During an update (maxSurge) a node has two agents, of which neither knows what the other one has set: both would end
// each other's limits. The older one has the lock of the record until it ends. Until then the newer one reads, and gives out no share whose limit is required.

// newFile is the record on disk, of which nothing is read.
func (l *Limiter) newFile() *recordfile.File[limit.Saved] {
	return recordfile.New(recordfile.Options[limit.Saved]{
		Path: l.opts.File, MaxBytes: limit.MaxBytes, Parse: limit.Parse, Encode: limit.Saved.Encode, Problems: &l.problems, Code: problem.LimitState,
		Name: "the record of limits", Without: "no limit of device memory is read or set", Damaged: "limits that were set before are taken for those of another program",
	})
}

// load brings the state up to date, and fails if the record can't be read. It fails with limit.ErrElsewhere while another process has the record: then the state is
// what that has written, and is not stored. limits is that there may be some to set: without, and without a record from before, nothing is locked or followed. The
// caller has the lock of the limiter.
func (l *Limiter) load(limits bool) error {
	if _, err := os.Lstat(l.opts.File); !limits && errors.Is(err, fs.ErrNotExist) {
		return l.file.Load(&l.saved)
	}
	if l.elsewhere = l.isElsewhere(); l.elsewhere {
		l.unsaved.Store(nil)
		l.saved, _ = l.file.Read() // without one there is none; why it can't be read is a problem of the other process
		return limit.ErrElsewhere
	}
	if err := l.file.Load(&l.saved); err != nil { // its problem has the error
		return err
	}
	l.followClaims()
	return nil
}

// isElsewhere takes the lock of the record, unless this process has it, and reports whether another one has. Where it can't be locked for another reason, the record
// can't be written, either.
func (l *Limiter) isElsewhere() bool {
	path := l.opts.File + ".lock"
	if l.opts.File == "" || l.recordLock != nil && filelock.IsAt(l.recordLock, path) {
		return false
	}
	l.unlockRecord()
	_ = os.MkdirAll(filepath.Dir(path), 0o755) // else it can't be locked
	f, err := filelock.Take(path)
	if err != nil {
		return errors.Is(err, filelock.ErrHeld)
	}
	l.disk.Lock()
	defer l.disk.Unlock()
	l.recordLock, l.file, l.saved = f, l.newFile(), limit.Saved{} // another process may have written it since
	return false
}

// unlockRecord gives the record to another process.
func (l *Limiter) unlockRecord() {
	filelock.Release(l.recordLock, l.opts.File+".lock")
	l.recordLock = nil
}

// followClaims has the state have the pods of the claims that are prepared, whether or not LimitPod or ReleasePod was called for them, or has succeeded. A pod whose
// claim is not prepared any more goes when it has no process, which is before its group does.
func (l *Limiter) followClaims() {
	if l.opts.Pods == nil {
		return
	}
	prepared, complete := l.opts.Pods()
	if len(prepared)+len(l.saved.Pods) == 0 {
		return
	}
	before := l.saved.Pods
	groups := sync.OnceValues(l.opts.Groups.Pods)
	l.saved = l.saved.OfClaims(prepared, func(w holders.Work) bool {
		if !complete {
			return false
		}
		all, err := groups()
		at, there := all[w.ID]
		if err != nil || !there {
			return err == nil
		}
		pids, err := l.opts.Groups.ProcessesBelow(at)
		return errors.Is(err, fs.ErrNotExist) || err == nil && len(pids) == 0
	})
	if !slices.Equal(before, l.saved.Pods) { // a pass is due
		l.passes.basis = basis{}
	}
}
