package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

const (
	// maxSize bounds what is read, in bytes. A machine with 16 GPUs of which everything is wrong needs a tenth.
	maxSize = 8 << 20

	// A file that can't be read (EMFILE, ENFILE, EIO, EACCES ...) is read again for so long. Nothing is offered meanwhile,
	// so this is short: what keeps the file from being read longer than that may do so for ever.
	readAgainFor = 10 * time.Second
	firstPause   = 250 * time.Millisecond // between two tries; then twice as long each time
	longestPause = 2 * time.Second
)

// contentError says that what is there is no history, however often it is read.
type contentError struct{ error }

func (e contentError) Unwrap() error { return e.error }

// read is the record in the file.
func (f *File) read() core.Checkpoint {
	text, err := f.patiently()
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) { // nothing was kept; Save says if nothing can be
		return core.Checkpoint{}
	}
	if _, content := errors.AsType[contentError](err); err != nil && !content {
		f.goOnWithout(err)
		return core.Checkpoint{}
	}
	var r core.Checkpoint
	if err == nil {
		var skipped []error
		if r, skipped, err = decode(text, f.agent); err == nil && len(skipped) == 0 {
			f.last = text
			return r
		}
		err = errors.Join(append(skipped, err)...)
	}
	if f.untouched {
		f.failed(err)
		return r
	}
	f.aside = broken(err, len(r.Conditions))
	if failed := f.setAside(); failed != nil { // Save tries again
		f.log.Warn(f.aside.message, "file", f.path, "error", oneLine(errors.Join(err, failed)))
	}
	return r
}

// patiently is text, tried again for a while if it fails: a process may have too many files open for a moment, and a
// disk may come up late.
func (f *File) patiently() ([]byte, error) {
	began := time.Now()
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		text, err := f.text()
		_, content := errors.AsType[contentError](err)
		switch {
		case err == nil || content || f.untouched || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR),
			time.Since(began)+pause > readAgainFor:
			return text, err
		case pause == firstPause:
			f.log.Warn("health history can't be read, trying again", "for", readAgainFor, "error", err)
		}
		<-time.After(pause) // without a context: a caller that does not want to wait leaves this goroutine behind
	}
}

func (f *File) text() ([]byte, error) {
	file, err := os.Open(f.path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // nothing was written
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, contentError{fmt.Errorf("%s is no file", f.path)}
	}
	text, err := io.ReadAll(io.LimitReader(file, maxSize+1))
	if err == nil && len(text) > maxSize {
		err = contentError{fmt.Errorf("larger than %d bytes", maxSize)}
	}
	return text, err
}

// goOnWithout enters that the history could not be read. The file may be good: it is not replaced.
func (f *File) goOnWithout(err error) {
	if f.untouched {
		f.failed(err)
		return
	}
	f.aside = unread(err)
	f.log.Error("health history can't be read: this agent goes on without it", "file", f.path, "error", err)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unread = "could not be read, what was known before this start is not: " + oneLine(err)
}
