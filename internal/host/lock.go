package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

const (
	lockAtMost = 5 * time.Second // another agent holds the folder for the blink of an eye
	lockAgain  = 5 * time.Millisecond
)

// lockFolder holds a folder for one who may change what is in it, until unlock is called or the process ends. The lock
// is the file system's, so that it also holds between containers in which the folder is mounted. A folder that was
// replaced meanwhile is locked anew.
func lockFolder(ctx context.Context, path string) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lockAtMost)
	defer cancel()
	again := time.NewTicker(lockAgain)
	defer again.Stop()
	for {
		folder, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		err = flock(folder, syscall.LOCK_EX)
		if err == nil && isAt(folder, path) {
			return func() { _ = folder.Close() }, nil // which unlocks
		}
		_ = folder.Close()
		if err != nil && !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("lock %s: %w", path, ctx.Err())
		}
	}
}

// flock takes a lock of flock(2) or fails with EWOULDBLOCK.
func flock(f *os.File, how int) error {
	for {
		err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

// isAt reports whether an open file is still the one at its path.
func isAt(f *os.File, path string) bool {
	own, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Lstat(path)
	return err == nil && os.SameFile(own, now)
}

// errTwin says that another process runs under the same agent's name.
var errTwin = errors.New("another agent of this name is running")

// holdLife takes the lock that says that an agent is running; it fails with errTwin if another process has it. Call
// it with the folder locked: who looks whether an agent is alive holds that lock for a moment, too.
func holdLife(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flock(f, syscall.LOCK_EX); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errTwin
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// lives reports whether an agent is running. Call it with the folder locked.
func lives(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	return errors.Is(flock(f, syscall.LOCK_SH), syscall.EWOULDBLOCK)
}

// readFile reads a regular file of a bounded size; it never waits for somebody who writes to a pipe.
func readFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // nothing was written
	switch stat, err := f.Stat(); {
	case err != nil:
		return nil, err
	case !stat.Mode().IsRegular():
		return nil, &fs.PathError{Op: "read", Path: filepath.Base(path), Err: errors.New("no regular file")}
	}
	text, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err == nil && len(text) > maxSize {
		err = fmt.Errorf("larger than %d bytes", maxSize)
	}
	return text, err
}
