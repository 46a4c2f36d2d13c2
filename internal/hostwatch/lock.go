package hostwatch

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

	"github.com/tandem-gpu/tandem/internal/filelock"
)

const lockAtMost = 5 * time.Second // another agent holds the folder for the blink of an eye

// lockFolder holds a folder for one who may change what is in it, until unlock is called or the process ends. The folder
// must be one that no other user can open.
func lockFolder(ctx context.Context, path string) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lockAtMost)
	defer cancel()
	folder, err := filelock.Wait(ctx, path, os.Open)
	if err != nil {
		return nil, err
	}
	return func() { _ = folder.Close() }, nil // which unlocks
}

// errTwin says that another process runs under the same agent's name.
var errTwin = errors.New("another agent of this name is running")

// holdLife takes the lock that says that an agent is running; it fails with errTwin if another process has it. Call
// it with the folder locked: who looks whether an agent is alive holds that lock for a moment, too.
func holdLife(path string) (*os.File, error) {
	f, err := filelock.Take(path)
	if errors.Is(err, filelock.ErrHeld) {
		return nil, errTwin
	}
	return f, err
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
