package history

import (
	"errors"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
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

// read returns the record in the file.
func (f *File) read() core.Checkpoint {
	text, err := f.readWithRetry()
	if isMissing(err) { // nothing was saved; Save fails if nothing can be
		return core.Checkpoint{}
	}
	if err != nil && !statefile.IsContent(err) {
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

// readWithRetry reads the file, repeatedly for a while if it fails: a process may have too many files open for a moment, and a disk
// may be mounted late.
func (f *File) readWithRetry() ([]byte, error) {
	began := time.Now()
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		text, err := statefile.Read(f.path, maxSize, 0)
		switch {
		case err == nil || statefile.IsContent(err) || f.readOnly || isMissing(err), time.Since(began)+pause > retryFor:
			return text, err
		case pause == firstPause:
			f.log.Warn("health history can't be read, trying again", "for", retryFor, "error", err)
		}
		<-time.After(pause) // without a context: a caller that does not wait leaves this goroutine behind
	}
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
