package nodelabels

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// file is a features file, which the worker of NFD reads.
type file struct {
	path      string
	timestamp bool // with the time of the change
}

func (f *file) name() string  { return "file" }
func (f *file) place() string { return f.path }
func (f *file) remedy() string {
	return "--features-file needs a file of its own in a folder that exists and can be written: features.d of Node Feature Discovery"
}

// put implements target. Without labels there is no file.
func (f *file) put(_ context.Context, l Labels) (written bool, err error) {
	present, timestamp, err := f.present()
	switch {
	case err != nil:
		return false, err
	case len(l) == 0 && present == nil, len(l) > 0 && maps.Equal(present, l) && timestamp == f.timestamp:
		return false, nil
	case len(l) == 0:
		if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, f.failure("removed", err)
		}
		return false, nil
	}
	all := l
	if f.timestamp {
		all = l.at(time.Now())
	}
	if err := statefile.Replace(f.path, all.Text(), 0o644); err != nil {
		return false, f.failure("written", err)
	}
	return true, nil
}

// present are the labels that the file has, and whether it has the time of the change; nil = there is no file. One with other lines is not the
// agent's to replace or remove, nor is what is no regular file: an error.
func (f *file) present() (l Labels, timestamp bool, err error) {
	text, err := statefile.Read(f.path, maxSize, statefile.SharedDir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, false, nil
	case statefile.IsContent(err), errors.Is(err, syscall.ELOOP), err == nil && !areLabels(text):
		return nil, false, fmt.Errorf("%s exists and is no file of node labels: it is neither replaced nor removed", f.path)
	case err != nil:
		return nil, false, f.failure("read", err)
	}
	l, timestamp = parse(text)
	return l, timestamp, nil
}

// failure is the same text for each attempt: the name of a temporary file is left out.
func (f *file) failure(action string, err error) error {
	if number, ok := errors.AsType[syscall.Errno](err); ok {
		err = number
	}
	return fmt.Errorf("%s can't be %s: %w", f.path, action, err)
}
