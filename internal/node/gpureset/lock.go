package gpureset

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	lockWithin   = 3 * time.Second // to wait for the lock: another process asks nvidia-smi something
	lockEvery    = 50 * time.Millisecond
	orphanAtMost = 5 * time.Minute // for which an nvidia-smi is awaited that another process has started
)

// BusyError is that an nvidia-smi of the node runs, which may reset a GPU. Nothing was done.
type BusyError struct{}

func (*BusyError) Error() string {
	return "an nvidia-smi that resets a GPU of the node may still run: " +
		"nothing touches a GPU until it has ended, or 5 minutes have passed"
}

// Lock is held while nvidia-smi runs for an agent or component of the node. nvidia-smi inherits it, so it is held also
// when the process that has started nvidia-smi was killed:
//
//	agent       takes it . starts nvidia-smi . killed
//	nvidia-smi             has it . . . . . . . . . . . resets the GPU . ended
//	next agent                                 waits . . . . . . . . . . takes it
//
// A process may hold it several times. Make one with NewLock; nil is none. Its methods are safe for concurrent use.
type Lock struct {
	path string

	mu      sync.Mutex
	file    *os.File // nil = this process does not have it
	holds   int
	foreign time.Time // since when another process was seen to have it; zero = none was
	taken   time.Time // when that has taken it, as the file shows it: tells it from the next one
}

// LockPath returns the path of the lock in a state directory.
func LockPath(stateDir string) string { return filepath.Join(stateDir, "nvidia-smi.lock") }

// NewLock returns the lock of a node, by its state directory; nil if there is none.
func NewLock(stateDir string) *Lock {
	if stateDir == "" {
		return nil
	}
	return &Lock{path: LockPath(stateDir)}
}

// Hold takes the lock until release is called. It fails with *BusyError while an nvidia-smi of another process has it,
// but for orphanAtMost at most: a driver that hangs can keep that process for ever.
func (l *Lock) Hold(ctx context.Context) (release func(), err error) {
	_, release, err = l.hold(ctx)
	return release, err
}

// hold is Hold with the file that nvidia-smi inherits; nil = there is none.
func (l *Lock) hold(ctx context.Context) (file *os.File, release func(), err error) {
	if l == nil {
		return nil, func() {}, nil
	}
	for deadline := time.Now().Add(lockWithin); ; {
		file, err = l.try()
		_, busy := errors.AsType[*BusyError](err)
		if !busy || time.Now().After(deadline) || !watch.Sleep(ctx, lockEvery) {
			break
		}
	}
	if err != nil {
		return nil, func() {}, err
	}
	return file, sync.OnceFunc(l.release), nil
}

// try takes the lock once more.
func (l *Lock) try() (*os.File, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		file, err := filelock.Take(l.path)
		switch held := errors.Is(err, filelock.ErrHeld); {
		case err == nil:
			l.file, l.foreign = file, time.Time{}
			now := time.Now()
			_ = os.Chtimes(l.path, now, now) // without it another process counts this one as the one before
		case !held:
			return nil, &UnavailableError{"make the state directory writable", err}
		case !l.hangs():
			return nil, &BusyError{}
		}
	}
	l.holds++
	return l.file, nil
}

// hangs reports whether one other process was seen to have the lock for orphanAtMost. mu is locked.
func (l *Lock) hangs() bool {
	var taken time.Time
	if file, err := os.Stat(l.path); err == nil {
		taken = file.ModTime()
	}
	if l.foreign.IsZero() || !taken.Equal(l.taken) {
		l.foreign, l.taken = time.Now(), taken
	}
	return time.Since(l.foreign) >= orphanAtMost
}

func (l *Lock) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holds--; l.holds == 0 {
		l.close()
	}
}

// leave has a process keep the lock that this one has started and could not end.
func (l *Lock) leave() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.close()
}

// close closes the file, which stays: a process that has it open has the lock. mu is locked.
func (l *Lock) close() {
	if l.file != nil {
		_ = l.file.Close()
		l.file = nil
	}
}
