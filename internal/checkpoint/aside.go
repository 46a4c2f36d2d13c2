package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/core"
)

// asideAtMost is how many files are kept aside for each reason: <file>.broken, <file>.broken.1 ... <file>.broken.4. They
// are never read again, and are for people. The first name that is free is taken; if none is, the last one is replaced:
// so the four first ones and the latest are there.
const asideAtMost = 5

// aside is why a file is not to be replaced.
type aside struct {
	suffix  string // of its new name
	message string // logged when it has it
	args    []any  // in that line
}

func broken(err error, conditions int) *aside {
	return &aside{"broken", "health history can't be read completely, the file is kept aside",
		[]any{"conditions", conditions, "error", oneLine(err)}}
}

func unread(err error) *aside {
	return &aside{"unread", "health history could not be read, the file is kept aside", []any{"error", oneLine(err)}}
}

func foreign(f *core.ForeignHistory) *aside {
	return &aside{"other", "health history is that of another machine, or every GPU was replaced: it starts anew, the file is kept aside",
		[]any{"history", f.HistoryGPUs, "machine", f.DriverGPUs}}
}

// SetAside implements monitor.Store.
func (f *File) SetAside(why error) {
	if f.untouched {
		return
	}
	if other, ok := errors.AsType[*core.ForeignHistory](why); ok {
		f.aside = foreign(other)
	} else {
		f.aside = unread(why)
	}
}

// setAside gives the file another name, if it is not to be replaced.
func (f *File) setAside() error {
	if f.aside == nil {
		return nil
	}
	name := f.asideName(f.aside.suffix)
	switch err := os.Rename(f.path, name); {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR): // there is nothing to keep
	case err != nil:
		return fmt.Errorf("setting aside what is there: %w", err)
	default:
		f.log.Warn(f.aside.message, append([]any{"file", name}, f.aside.args...)...)
		f.mu.Lock()
		if f.unread != "" {
			f.unread += "; the file is kept aside as " + name
		}
		f.mu.Unlock()
	}
	f.aside, f.last = nil, nil
	return nil
}

// asideName is the first name that is free, or the last one.
func (f *File) asideName(suffix string) string {
	name := f.path + "." + suffix
	for n := 1; n < asideAtMost; n++ {
		if _, err := os.Lstat(name); errors.Is(err, fs.ErrNotExist) {
			break
		}
		name = fmt.Sprintf("%s.%s.%d", f.path, suffix, n)
	}
	return name
}
