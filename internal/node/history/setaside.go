package history

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// aside is why a file must be renamed and not replaced.
type aside struct {
	suffix  string // of its new name
	message string // logged when it was renamed
	args    []any  // of that line
}

func broken(err error, conditions int) *aside {
	return &aside{"broken", "health history can't be read completely, the file is kept aside",
		[]any{"conditions", conditions, "error", oneLine(err)}}
}

func unread(err error) *aside {
	return &aside{"unread", "health history can't be read, the file is kept aside", []any{"error", oneLine(err)}}
}

func foreign(f *core.ForeignHistory) *aside {
	return &aside{"other", "health history is of another node, or every GPU was replaced: a new one begins, the file is kept aside",
		[]any{"history", f.HistoryGPUs, "node", f.DriverGPUs}}
}

// SetAside implements monitor.Store.
func (f *File) SetAside(why error) {
	if f.readOnly {
		return
	}
	if other, ok := errors.AsType[*core.ForeignHistory](why); ok {
		f.aside = foreign(other)
	} else {
		f.aside = unread(why)
	}
}

// setAside renames the file if it must not be replaced.
func (f *File) setAside() error {
	if f.aside == nil {
		return nil
	}
	switch name, err := statefile.SetAside(f.path, f.aside.suffix); {
	case isMissing(err): // there is nothing to keep
	case err != nil:
		return fmt.Errorf("setting aside %s: %w", f.path, err)
	default:
		f.log.Warn(f.aside.message, append([]any{"file", name}, f.aside.args...)...)
		f.mu.Lock()
		if f.loadProblem != "" {
			f.loadProblem += "; the file is kept aside as " + name
		}
		f.mu.Unlock()
	}
	f.aside, f.last = nil, nil
	return nil
}

// isMissing reports whether an error means that there is no file at a path.
func isMissing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}
