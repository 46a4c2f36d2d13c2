// Package statefile reads and replaces the small files that an agent keeps in its state directory, and has a checksum for
// their text.
package statefile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/google/renameio/v2"
)

// ContentError means that a file has no content of an agent, however often it is read.
type ContentError struct {
	Path   string
	Reason string // "not a regular file", "larger than 1024 bytes"
}

func (e *ContentError) Error() string { return e.Path + ": " + e.Reason }

// IsContent reports whether err is, or wraps, a *ContentError. Other errors of Read may be gone at the next try.
func IsContent(err error) bool {
	_, ok := errors.AsType[*ContentError](err)
	return ok
}

// SharedDir are the flags for Read in a directory that other processes write to: it does not follow symbolic links (ELOOP) and
// does not block on a FIFO.
const SharedDir = syscall.O_NOFOLLOW | syscall.O_NONBLOCK

// Read returns the content of a regular file of at most limit bytes. It fails with *ContentError for anything else, and with the
// error of the system call if the file can't be read now. It adds flags, such as SharedDir, to those of open(2).
func Read(path string, limit, flags int) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|flags, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // opened for reading only
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &ContentError{path, "not a regular file"}
	}
	text, err := io.ReadAll(io.LimitReader(f, int64(limit)+1))
	if err == nil && len(text) > limit {
		return nil, &ContentError{path, fmt.Sprintf("larger than %d bytes", limit)}
	}
	return text, err
}

// Write replaces a file atomically, with mode 0600, and creates its directory if that is missing. The content is on disk when
// it returns nil. The temporary file is in the same directory: RemoveTemporary removes it after a crash.
func Write(path string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return Replace(path, text, 0o600)
}

// Replace replaces a file atomically, or creates it, with these permissions whatever the umask is. Processes that read the
// folder find the file before or the file after, complete and with these permissions. Otherwise it is as Write; the directory
// must exist.
func Replace(path string, text []byte, permissions fs.FileMode) error {
	// The temporary file must be in the same directory: some processes that watch it miss a file that comes from another one.
	pending, err := renameio.NewPendingFile(path, renameio.WithTempDir(filepath.Dir(path)), renameio.WithStaticPermissions(permissions))
	if err != nil {
		return err
	}
	defer func() { _ = pending.Cleanup() }() // without effect after the replacement
	if _, err := pending.Write(text); err != nil {
		return err
	}
	return pending.CloseAtomicallyReplace() // after fsync
}

// LookEvery is how often a writer asks IsMissing that has nothing to write.
const LookEvery = 30 * time.Second

// IsMissing reports whether there is no file at a path, or no folder for it. Each writer of a file asks that, once it
// has written it: a file that someone has removed, with its folder or without, is written again with the next pass. A
// file that can't be looked up is not known to be missing.
func IsMissing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// RemoveTemporary removes the temporary files that processes left which were killed during Write. Call it while no other
// process writes the file.
func RemoveTemporary(path string) {
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"[0-9]*")) // fails on a bad pattern only
	for _, temporary := range left {
		_ = os.Remove(temporary) // harmless if it remains
	}
}

// asideAtMost is how many files SetAside keeps for a path and a suffix.
const asideAtMost = 5

// SetAside renames a file that must not be replaced, for operators, and returns its new name: <path>.<suffix>, <path>.<suffix>.1 ...
// <path>.<suffix>.4. The first free name is used; if there is none, the last file is replaced, so that the first four and the latest remain.
func SetAside(path, suffix string) (name string, err error) {
	name = path + "." + suffix
	for n := 1; n < asideAtMost; n++ {
		if _, err := os.Lstat(name); errors.Is(err, fs.ErrNotExist) {
			break
		}
		name = fmt.Sprintf("%s.%s.%d", path, suffix, n)
	}
	return name, os.Rename(path, name)
}

// Kept returns the files that SetAside has kept for a path and a suffix. An error means that there may be others.
func Kept(path, suffix string) (names []string, err error) {
	name := path + "." + suffix
	for n := 1; n <= asideAtMost; n++ {
		switch _, err := os.Lstat(name); {
		case err == nil:
			names = append(names, name)
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR):
			return names, err
		}
		name = fmt.Sprintf("%s.%s.%d", path, suffix, n)
	}
	return names, nil
}
