package history

import (
	"errors"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

const (
	// maxSize bounds what is read, in bytes. A node with 16 GPUs that all have every fault needs an eighth, and a fifth
	// while each has a storm of twelve XIDs.
	maxSize = 8 << 20

	// A file that can't be read (EMFILE, ENFILE, EIO, EACCES ...) is read again for retryFor. That is short, because no
	// device is offered meanwhile and the error may last forever.
	retryFor     = 10 * time.Second
	firstPause   = 250 * time.Millisecond // between two tries; doubled each time
	longestPause = 2 * time.Second
)

// read returns what can be used of the file.
func (f *File) read() decoded {
	text, err := f.readWithRetry()
	if isMissing(err) {
		return f.readMissing()
	}
	if err != nil && !statefile.IsContent(err) {
		f.startWithout(err)
		return decoded{anyFaults: true}
	}
	var d decoded
	if err == nil {
		if d, err = decode(text, f.agent); err == nil && len(d.skipped) == 0 {
			f.last = text
			return d
		}
		if err != nil {
			d = decoded{record: core.Checkpoint{BootID: bootOf(text)}, anyFaults: true}
		}
	} else {
		d.anyFaults = true
	}
	err = errors.Join(append(d.skipped, err)...)
	f.setNotRead("could not be read completely, faults from before this start may be unknown", err)
	if f.readOnly {
		return d
	}
	f.aside = broken(err, len(d.record.Conditions))
	if failed := f.setAside(); failed != nil { // Save tries again
		f.log.Warn(f.aside.message, "file", f.path, "error", oneLine(errors.Join(err, failed)))
	}
	return d
}

// readMissing returns the record of a node without a file: empty on a first start. A file that was set aside, because
// it could not be read, is the last one if the agent ended before it wrote another one.
func (f *File) readMissing() decoded {
	lost, err := f.keptAside(brokenSuffix, unreadSuffix)
	if err == nil && len(lost) == 0 {
		return decoded{}
	}
	f.setNotRead("is missing, faults from before this start are unknown", nil)
	d := decoded{anyFaults: true}
	if len(lost) == 1 { // else it is not known which of them is the latest
		text, _ := statefile.Read(lost[0], maxSize, 0) // what can't be read has no boot
		d.record.BootID = bootOf(text)
	}
	return d
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
	f.setNotRead("could not be read, faults from before this start are unknown", err)
	if f.readOnly {
		return
	}
	f.aside = unread(err)
	f.log.Error("health history can't be read, the agent starts without it", "file", f.path, "error", err)
}

// setNotRead records what this process has not read of the history.
func (f *File) setNotRead(what string, err error) {
	if err != nil {
		what += ": " + oneLine(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.notRead = what
}
