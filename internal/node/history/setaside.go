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

// Suffixes of files that were set aside.
const (
	brokenSuffix = "broken" // its content could not be used completely
	unreadSuffix = "unread" // it could not be read
	otherSuffix  = "other"  // it is of another node
)

func broken(err error, conditions int) *aside {
	return &aside{brokenSuffix, "health history can't be read completely, the file is kept aside",
		[]any{"conditions", conditions, "error", oneLine(err)}}
}

func unread(err error) *aside {
	return &aside{unreadSuffix, "health history can't be read, the file is kept aside", []any{"error", oneLine(err)}}
}

func foreign(f *core.ForeignHistory) *aside {
	return &aside{otherSuffix, "health history is of another node, or every GPU was replaced: a new one begins, the file is kept aside",
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
	}
	f.aside, f.last = nil, nil
	f.lookAside()
	return nil
}

// keptAside returns the files that were set aside with one of the suffixes.
func (f *File) keptAside(suffixes ...string) (all []string, err error) {
	for _, suffix := range suffixes {
		names, err := statefile.Kept(f.path, suffix)
		if all = append(all, names...); err != nil {
			return all, err
		}
	}
	return all, nil
}

// lookAside finds the files that were set aside. An operator who has seen them removes them: then the problem ends.
func (f *File) lookAside() {
	kept, err := f.keptAside(brokenSuffix, unreadSuffix, otherSuffix)
	if err != nil {
		return // the files found before may still be there
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.kept) > 0 && len(kept) == 0 {
		f.notRead = ""
	}
	f.kept = kept
}

// isMissing reports whether an error means that there is no file at a path.
func isMissing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}
