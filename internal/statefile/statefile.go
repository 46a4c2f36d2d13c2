// Package statefile keeps the health history of an agent on disk, so that a restart neither heals a sick GPU
// nor forgets one. An agent whose file can't be kept works on, and says so.
package statefile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/google/renameio/v2"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// maxSize bounds what is read, in bytes. A machine with 16 GPUs of which everything is wrong needs a tenth.
const maxSize = 8 << 20

var _ monitor.Store = (*File)(nil)

// File is the history of one agent in <dir>/<agent>.json. Make one with Open. Load comes before the first
// Save, and both are called from one goroutine at a time; Problem may be called from any.
type File struct {
	agent, path, proc string
	log               *slog.Logger
	last              []byte // what the file holds; nil = unknown
	untouched         bool   // it is another's: read only

	mu     sync.Mutex
	unkept string // why the latest Save failed
	noBoot string // why the boot id is unknown
}

// Open names the file; the folder is made when there is something to keep. Boot id and uptime are read beneath
// procRoot; "" is /proc.
func Open(dir, agent, procRoot string, log *slog.Logger) *File {
	return &File{agent: agent, path: filepath.Join(dir, agent+".json"), log: log, proc: procRoot}
}

// Peek names the file of an agent for one who is not the agent: it is read, and nothing is changed, made or
// logged. Problem says then why it could not be read completely.
func Peek(dir, agent, procRoot string) *File {
	f := Open(dir, agent, procRoot, slog.New(slog.DiscardHandler))
	f.untouched = true
	return f
}

// Problem says in one line why the history is not kept, or of how little use it is; "" if all is well.
func (f *File) Problem() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unkept != "" {
		return f.unkept
	}
	return f.noBoot
}

// Load returns what was kept, empty if that is nothing, and the machine's boot id. Its times are on the wall clock as it is
// now. What can't be read is kept aside as <file>.broken. Where either boot id is unknown the other one is taken for both:
// not to know is no sign of a reboot.
func (f *File) Load() (core.Record, string) {
	if !f.untouched {
		f.tidy()
	}
	r := f.read()
	boot, err := ReadBoot(f.proc)
	if err != nil {
		f.log.Warn("the boot id can't be read: a reboot is not noticed", "error", err)
		f.mu.Lock()
		f.noBoot = "a reboot is not noticed: " + err.Error()
		f.mu.Unlock()
	}
	r = r.Rebase(boot, time.Now())
	switch {
	case boot.ID == "":
		boot.ID = r.Boot
	case r.Boot == "":
		r.Boot = boot.ID
	}
	return r, boot.ID
}

// read is the record in the file.
func (f *File) read() core.Record {
	text, err := f.text()
	if errors.Is(err, fs.ErrNotExist) {
		return core.Record{}
	}
	var r core.Record
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
	aside := f.path + ".broken"
	if failed := os.Rename(f.path, aside); failed != nil {
		err, aside = errors.Join(err, failed), f.path
	}
	f.log.Warn("health history can't be read completely, the file is kept aside",
		"file", aside, "conditions", len(r.Conditions), "error", oneLine(err))
	return r
}

func (f *File) text() ([]byte, error) {
	file, err := os.Open(f.path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // nothing was written
	text, err := io.ReadAll(io.LimitReader(file, maxSize+1))
	if err == nil && len(text) > maxSize {
		err = fmt.Errorf("larger than %d bytes", maxSize)
	}
	return text, err
}

// Save replaces the file if it would change. A failure is said once, until it works again.
func (f *File) Save(r core.Record) {
	if f.untouched {
		return
	}
	text, err := encode(r, f.agent)
	if err == nil {
		err = f.write(text)
	}
	if err != nil {
		f.failed(err)
		return
	}
	f.succeeded()
}

func (f *File) write(text []byte) error {
	if bytes.Equal(text, f.last) {
		if _, err := os.Stat(f.path); err == nil {
			return nil
		}
	}
	dir := filepath.Dir(f.path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f.last = nil
	pending, err := renameio.TempFile(dir, f.path) // mode 0600
	if err != nil {
		return err
	}
	defer func() { _ = pending.Cleanup() }() // the next Load tidies what is left
	if _, err := pending.Write(text); err != nil {
		return err
	}
	if err := pending.CloseAtomicallyReplace(); err != nil {
		return err
	}
	f.last = text
	return nil
}

// tidy removes what a write left that a crash cut short.
func (f *File) tidy() {
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(f.path), "."+filepath.Base(f.path)+"[0-9]*")) // its only error is a bad pattern
	for _, path := range left {
		_ = os.Remove(path) // if it stays, it is in nobody's way
	}
}

func (f *File) failed(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unkept == "" {
		f.log.Warn("health history is not kept, a restart of the agent forgets it", "error", err)
	}
	f.unkept = oneLine(err)
}

func (f *File) succeeded() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unkept != "" {
		f.log.Info("health history is kept again", "file", f.path)
	}
	f.unkept = ""
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
