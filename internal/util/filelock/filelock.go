// Package filelock has the flock(2) locks that agents take on files in their state directory. The kernel releases such a lock
// when the process ends, and it also holds between containers that mount the same folder.
//
// Every process that can open a file can lock it, even read-only: lock only what no other user can open.
package filelock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// ErrHeld is returned for a lock that another open file has, of this process or another one.
var ErrHeld = errors.New("locked by another process")

const retryPause = 5 * time.Millisecond // between tries of Wait

// openPrivate opens the file at path for its lock, and creates it if it is missing. Afterwards no other user except root can
// open it (mode 0600). A symbolic link or a file that is not regular is refused.
func openPrivate(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	if err := private(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func private(f *os.File) error {
	stat, err := f.Stat()
	switch {
	case err != nil:
		return err
	case !stat.Mode().IsRegular():
		return &fs.PathError{Op: "lock", Path: f.Name(), Err: errors.New("not a regular file")}
	case stat.Mode().Perm()&0o077 != 0:
		return f.Chmod(0o600)
	}
	return nil
}

// Take locks the file at path exclusively, or fails with ErrHeld. It creates the file if it is missing, and gives it mode 0600;
// a symbolic link or a file that is not regular is refused. The lock lasts until the file is closed: see Release.
func Take(path string) (*os.File, error) { return lock(path, openPrivate) }

// Wait waits for the exclusive lock of the file or folder at path until ctx ends.
func Wait(ctx context.Context, path string) (*os.File, error) {
	tick := time.NewTicker(retryPause)
	defer tick.Stop()
	for {
		f, err := lock(path, os.Open)
		if !errors.Is(err, ErrHeld) {
			return f, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("lock %s: %w", path, ctx.Err())
		}
	}
}

// lock opens a file and locks it exclusively. A file that was replaced or removed meanwhile is opened again, so that the lock is
// that of the file that others open.
func lock(path string, open func(string) (*os.File, error)) (*os.File, error) {
	for {
		f, err := open(path)
		if err != nil {
			return nil, err
		}
		err = flock(f, syscall.LOCK_EX)
		if err == nil && IsAt(f, path) {
			return f, nil
		}
		_ = f.Close()
		if err != nil {
			return nil, err
		}
	}
}

// flock takes a lock without blocking, or fails with ErrHeld.
func flock(f *os.File, how int) error {
	for {
		switch err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB); {
		case err == nil:
			return nil
		case errors.Is(err, syscall.EWOULDBLOCK):
			return ErrHeld
		case !errors.Is(err, syscall.EINTR):
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		}
	}
}

// Release removes a file that Take has locked, if it is still the one at path, and unlocks it. f may be nil.
func Release(f *os.File, path string) {
	if f == nil {
		return
	}
	if IsAt(f, path) {
		_ = os.Remove(path) // if it stays, it is not locked
	}
	_ = f.Close()
}

// IsHeld reports whether the file at path is locked exclusively. A missing file is not. With an error it is not known. It takes a
// shared lock for a moment; Take and Wait find the lock held in that moment.
func IsHeld(path string) (bool, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return false, nil
	case err != nil:
		return false, err
	}
	defer func() { _ = f.Close() }()
	if err = flock(f, syscall.LOCK_SH); errors.Is(err, ErrHeld) {
		return true, nil
	}
	return false, err
}

// IsAt reports whether an open file is still the one at its path.
func IsAt(f *os.File, path string) bool {
	own, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Lstat(path)
	return err == nil && os.SameFile(own, now)
}
