// Package filelock has the locks of flock(2) that agents take on files in their state directory. The kernel releases
// such a lock when the process ends, and it also holds between containers that mount the same folder.
//
// Whoever can open a file can lock it, whatever its mode says about writing: lock only what no other user can open.
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

const again = 5 * time.Millisecond // between tries of Wait

// OpenPrivate opens the file at path for its lock, and makes it if it is missing. Afterwards no other user can open it
// (mode 0600), except root. A symbolic link or something that is not a regular file is refused.
func OpenPrivate(path string) (*os.File, error) {
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

// Take opens the file at path as OpenPrivate does and takes its lock, or fails with ErrHeld. A file that is removed at
// the same time is made again: see Release.
func Take(path string) (*os.File, error) {
	for {
		f, err := OpenPrivate(path)
		if err != nil {
			return nil, err
		}
		err = Exclusive(f)
		if err == nil && IsAt(f, path) {
			return f, nil
		}
		_ = f.Close()
		if err != nil {
			return nil, err
		}
	}
}

// Release removes a file that Take has locked, if it is still the one at path, and with it the lock. nil is no file.
func Release(f *os.File, path string) {
	if f == nil {
		return
	}
	if IsAt(f, path) {
		_ = os.Remove(path) // if it stays, it is not locked
	}
	_ = f.Close()
}

// Exclusive takes the only lock of a file, or fails with ErrHeld. It lasts until the file is closed.
func Exclusive(f *os.File) error { return flock(f, syscall.LOCK_EX) }

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

// IsHeld reports whether the file at path is locked exclusively, which takes no more than a moment's shared lock: who
// tries for the lock in that moment finds it held.
func IsHeld(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	return errors.Is(flock(f, syscall.LOCK_SH), ErrHeld)
}

// Wait opens the file or folder at path with open and waits for its exclusive lock until ctx ends. What was replaced
// meanwhile is opened again: the lock is that of the file that others find.
func Wait(ctx context.Context, path string, open func(string) (*os.File, error)) (*os.File, error) {
	tick := time.NewTicker(again)
	defer tick.Stop()
	for {
		f, err := open(path)
		if err != nil {
			return nil, err
		}
		err = Exclusive(f)
		if err == nil && IsAt(f, path) {
			return f, nil
		}
		_ = f.Close()
		if err != nil && !errors.Is(err, ErrHeld) {
			return nil, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("lock %s: %w", path, ctx.Err())
		}
	}
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
