package filelock_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/filelock"
)

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := filelock.OpenPrivate(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestOneHolderAtATime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	a, b := open(t, path), open(t, path)
	if err := filelock.Exclusive(a); err != nil {
		t.Fatal(err)
	}
	if err := filelock.Exclusive(b); !errors.Is(err, filelock.ErrHeld) {
		t.Errorf("a second lock: %v", err)
	}
	if !filelock.IsHeld(path) || filelock.IsHeld(path+".none") {
		t.Error("it is not seen which file is locked")
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if filelock.IsHeld(path) {
		t.Error("a lock outlives its file")
	}
	if err := filelock.Exclusive(b); err != nil {
		t.Errorf("after the first holder has closed its file: %v", err)
	}
}

// A file that other users could open, and so lock, is made private before it is used.
func TestLockFileIsPrivate(t *testing.T) {
	dir := t.TempDir()
	wide := filepath.Join(dir, "wide")
	if err := os.WriteFile(wide, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{wide, filepath.Join(dir, "new")} {
		open(t, path)
		if stat, err := os.Stat(path); err != nil || stat.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", path, stat.Mode(), err)
		}
	}
}

func TestOnlyARegularFileIsALockFile(t *testing.T) {
	dir := t.TempDir()
	target, link, pipe := filepath.Join(dir, "target"), filepath.Join(dir, "link"), filepath.Join(dir, "pipe")
	if err := errors.Join(os.WriteFile(target, nil, 0o644), os.Symlink(target, link), syscall.Mkfifo(pipe, 0o644)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, pipe, dir} {
		if f, err := filelock.OpenPrivate(path); err == nil {
			t.Errorf("%s is taken for a lock file: %v", path, f.Close())
		}
	}
	if stat, err := os.Stat(target); err != nil || stat.Mode() != 0o644 {
		t.Errorf("the target of a link has mode %v, %v", stat.Mode(), err)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	held := open(t, path)
	if err := filelock.Exclusive(held); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := filelock.Wait(ctx, path, filelock.OpenPrivate); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting for a lock that is held: %v", err)
	}
	// One that was replaced is no lock any more: the new file's is taken.
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	f, err := filelock.Wait(t.Context(), path, filelock.OpenPrivate)
	if err != nil || !filelock.IsAt(f, path) || filelock.IsAt(held, path) {
		t.Fatalf("the lock of a replaced file: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// Of many that take and release one lock, which is a file that comes and goes, one has it at a time.
func TestReleasedLockIsTakenByOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	var holders, turns atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for turns.Load() < 500 {
				f, err := filelock.Take(path)
				if errors.Is(err, filelock.ErrHeld) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d have the lock", n)
				}
				turns.Add(1)
				holders.Add(-1)
				filelock.Release(f, path)
			}
		})
	}
	all.Wait()
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file stays: %v", err)
	}
}
