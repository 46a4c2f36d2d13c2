package nomadadapter

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"

	"github.com/google/renameio/v2"
)

// groupFileName is the file of announced names in the state directory.
const groupFileName = "nomad-gpu.groups.json"

// maxGroupFile bounds what is read, in bytes: mostNames of each, with long names, need half of it.
const maxGroupFile = 1 << 20

// groupFile is the file of announced names. Its methods may hang as long as a disk does; one goroutine calls them.
type groupFile struct {
	path string
	boot string                            // the machine's boot id; "" = unknown
	read func(path string) ([]byte, error) // readGroups; tests have it fail
	log  *slog.Logger
}

// load is what the file holds, with its text: nothing if there is none. A file that is not understood is kept aside, so
// that another takes its place; one that can't be read is left alone, and that is the error.
func (f *groupFile) load() (assignment, []byte, error) {
	text, err := f.read(f.path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return assignment{}, nil, nil
	}
	if err != nil {
		return assignment{}, nil, err
	}
	kept, boot, err := decodeGroups(text, f.boot)
	if len(text) > maxGroupFile {
		err = fmt.Errorf("larger than %d bytes", maxGroupFile)
	}
	if err == nil {
		f.boot = cmp.Or(f.boot, boot)
		return kept, text, nil
	}
	aside := f.path + ".broken"
	if failed := os.Rename(f.path, aside); failed != nil {
		return assignment{}, nil, errors.Join(err, failed)
	}
	f.log.Warn("the names of groups are not understood: they are found anew, and the file is kept aside", "file", aside, "error", err)
	return assignment{}, nil, nil
}

// save replaces the file, whose text is was, if it would change.
func (f *groupFile) save(n assignment, was []byte) error {
	text, err := encodeGroups(n, f.boot)
	if err != nil || bytes.Equal(text, was) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
		return err
	}
	return renameio.WriteFile(f.path, text, 0o600) // it is on the disk, or what was there before is
}

// tidy removes what a write left that the end of a process cut short.
func (f *groupFile) tidy() {
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(f.path), "."+filepath.Base(f.path)+"[0-9]*")) // its only error is a bad pattern
	for _, path := range left {
		_ = os.Remove(path) // if it stays, it does no harm
	}
}

// readGroupFile is os.ReadFile with a bound: of a larger file it is one byte more than maxGroups.
func readGroupFile(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // nothing was written
	return io.ReadAll(io.LimitReader(file, maxGroupFile+1))
}
