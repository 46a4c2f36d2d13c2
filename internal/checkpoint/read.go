package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

const (
	// maxSize bounds what is read, in bytes. A node with 16 GPUs that all have every fault needs a tenth.
	maxSize = 8 << 20

	// A file that can't be read (EMFILE, ENFILE, EIO, EACCES ...) is read again for retryFor. That is short, because no
	// device is offered meanwhile and the error may last forever.
	retryFor     = 10 * time.Second
	firstPause   = 250 * time.Millisecond // between two tries; doubled each time
	longestPause = 2 * time.Second
)

// contentError means that the content is no history, however often it is read.
type contentError struct{ error }

func (e contentError) Unwrap() error { return e.error }

func isContent(err error) bool {
	_, ok := errors.AsType[contentError](err)
	return ok
}

// read returns the record in the file.
func (f *File) read() core.Checkpoint {
	text, err := f.readWithRetry()
	if isMissing(err) { // nothing was saved; Save fails if nothing can be
		return core.Checkpoint{}
	}
	if err != nil && !isContent(err) {
		f.startWithout(err)
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
	if f.readOnly {
		f.setSaveProblem(err)
		return r
	}
	f.aside = broken(err, len(r.Conditions))
	if failed := f.setAside(); failed != nil { // Save tries again
		f.log.Warn(f.aside.message, "file", f.path, "error", oneLine(errors.Join(err, failed)))
	}
	return r
}

// readWithRetry is readText, repeated for a while if it fails: a process may have too many files open for a moment, and a disk
// may be mounted late.
func (f *File) readWithRetry() ([]byte, error) {
	began := time.Now()
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		text, err := f.readText()
		switch {
		case err == nil || isContent(err) || f.readOnly || isMissing(err), time.Since(began)+pause > retryFor:
			return text, err
		case pause == firstPause:
			f.log.Warn("health history can't be read, trying again", "for", retryFor, "error", err)
		}
		<-time.After(pause) // without a context: a caller that does not wait leaves this goroutine behind
	}
}

func (f *File) readText() ([]byte, error) {
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
		return nil, contentError{fmt.Errorf("%s is not a regular file", f.path)}
	}
	text, err := io.ReadAll(io.LimitReader(file, maxSize+1))
	if err == nil && len(text) > maxSize {
		err = contentError{fmt.Errorf("larger than %d bytes", maxSize)}
	}
	return text, err
}

// startWithout records that the history could not be read. The file may be intact: it is not replaced.
func (f *File) startWithout(err error) {
	if f.readOnly {
		f.setSaveProblem(err)
		return
	}
	f.aside = unread(err)
	f.log.Error("health history can't be read, the agent starts without it", "file", f.path, "error", err)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.loadProblem = "could not be read, faults from before this start are unknown: " + oneLine(err)
}
