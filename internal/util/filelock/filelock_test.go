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

	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/test/check"
)

// take locks a file that no other open file has locked.
func take(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := filelock.Take(path)
	check.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestOneHolderAtATime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	f := take(t, path)
	if _, err := filelock.Take(path); !errors.Is(err, filelock.ErrHeld) {
		t.Errorf("a second lock: %v", err)
	}
	for of, want := range map[string]bool{path: true, path + ".none": false, path + "/none": false} {
		if held, err := filelock.IsHeld(of); held != want || err != nil {
			t.Errorf("%s is held: %v, %v", of, held, err)
		}
	}
	check.NoError(t, f.Close())
	if held, err := filelock.IsHeld(path); held || err != nil {
		t.Errorf("a lock outlives its file: %v, %v", held, err)
	}
	take(t, path)
}

// A lock file that can't be opened is not one that no process holds.
func TestLockThatCannotBeRead(t *testing.T) {
	loop := filepath.Join(t.TempDir(), "loop")
	check.NoError(t, os.Symlink(loop, loop))
	if held, err := filelock.IsHeld(loop); err == nil {
		t.Errorf("held: %v, without an error", held)
	}
}

// A file that other users could open, and so lock, is made private before it is locked.
func TestLockFileIsPrivate(t *testing.T) {
	dir := t.TempDir()
	wide := filepath.Join(dir, "wide")
	check.NoError(t, os.WriteFile(wide, nil, 0o644))
	for _, path := range []string{wide, filepath.Join(dir, "new")} {
		take(t, path)
		if stat, err := os.Stat(path); err != nil || stat.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", path, stat.Mode(), err)
		}
	}
}

func TestOnlyARegularFileIsALockFile(t *testing.T) {
	dir := t.TempDir()
	target, link, pipe := filepath.Join(dir, "target"), filepath.Join(dir, "link"), filepath.Join(dir, "pipe")
	check.NoError(t, errors.Join(os.WriteFile(target, nil, 0o644), os.Symlink(target, link), syscall.Mkfifo(pipe, 0o644)))
	for _, path := range []string{link, pipe, dir} {
		if f, err := filelock.Take(path); err == nil {
			t.Errorf("%s is locked: %v", path, f.Close())
		}
	}
	if stat, err := os.Stat(target); err != nil || stat.Mode() != 0o644 {
		t.Errorf("the target of a link has mode %v, %v", stat.Mode(), err)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	held := take(t, path)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := filelock.Wait(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting for a lock that is held: %v", err)
	}
	// The lock of a file that was replaced is of no use: the new file is locked.
	check.NoError(t, errors.Join(os.Rename(path, path+".old"), os.WriteFile(path, nil, 0o600)))
	f, err := filelock.Wait(t.Context(), path)
	if err != nil || !filelock.IsAt(f, path) || filelock.IsAt(held, path) {
		t.Fatalf("the lock of a replaced file: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// Of many goroutines that take and release one lock, whose file is created and removed each time, one has it at a time.
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
