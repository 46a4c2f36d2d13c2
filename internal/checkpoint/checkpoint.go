// Package checkpoint keeps the health history of an agent on disk, so that a restart neither heals a sick GPU
// nor forgets one. An agent whose file can't be written works on, and says so. A file whose content can't be used, or that
// can't be read, is never replaced: it gets another name first.
package checkpoint

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/renameio/v2"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

var _ monitor.Store = (*File)(nil)

// File is the history of one agent in <dir>/<agent>.json. Make one with Open. Load comes before the first
// Save, and both are called from one goroutine at a time; Problem may be called from any.
type File struct {
	agent, path, proc string
	label             string // file with the SELinux context of this process, if there is SELinux (proc(5): attr/current)
	log               *slog.Logger
	last              []byte // what the file holds; nil = unknown
	untouched         bool   // it is another's: read only
	aside             *aside // what is there is set aside before the next Save; nil = it is replaced
	now               func() time.Time

	mu     sync.Mutex
	unkept string // why the latest Save failed
	noBoot string // why the boot id is unknown
	unread string // that this process goes on without the history, and why
}

// Open names the file; the folder is made when there is something to keep. Boot id and uptime are read beneath
// procRoot; "" is /proc.
func Open(dir, agent, procRoot string, log *slog.Logger) *File {
	return &File{
		agent: agent, path: filepath.Join(dir, agent+".json"), log: log, proc: procRoot, now: time.Now,
		label: filepath.Join(cmp.Or(procRoot, "/proc"), "self/attr/current"),
	}
}

// Read names the file of an agent for one who is not the agent: it is read, and nothing is changed, made or
// logged. Problem says then why it could not be read completely.
func Read(dir, agent, procRoot string) *File {
	f := Open(dir, agent, procRoot, slog.New(slog.DiscardHandler))
	f.untouched = true
	return f
}

// SetWallClock replaces time.Now as the wall clock, which may jump. Call it before Load.
func (f *File) SetWallClock(now func() time.Time) { f.now = now }

// Problem says in one line why the history is not kept, or of how little use it is; "" if all is well.
func (f *File) Problem() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unkept != "" {
		return f.unkept
	}
	return f.noBoot
}

// Warnings say in a line each what is wrong with the history; none if all is well.
func (f *File) Warnings() (notes []string) {
	if problem := f.Problem(); problem != "" {
		notes = append(notes, problem)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unread != "" {
		notes = append(notes, f.unread)
	}
	return notes
}

// Load returns what was kept, empty if that is nothing, and the machine's boot id. Its times are on the wall clock as it
// is now. A file that can't be read is read
// again for some seconds. One whose content can't be used completely is set aside as <file>.broken, one that can't be
// read at all as <file>.unread. Where either boot id is unknown the other one is taken for both: not to know is no
// sign of a reboot.
func (f *File) Load() (core.Checkpoint, string) {
	if !f.untouched {
		f.tidy()
	}
	r := f.read()
	now := f.now()
	boot, err := readBoot(f.proc, now)
	if err != nil {
		f.log.Warn("the boot id can't be read: a reboot is not noticed", "error", err)
		f.mu.Lock()
		f.noBoot = "a reboot is not noticed: " + err.Error()
		f.mu.Unlock()
	}
	r = r.Rebase(boot, now)
	switch {
	case boot.ID == "":
		boot.ID = r.BootID
	case r.BootID == "":
		r.BootID = boot.ID
	}
	return r, boot.ID
}

// errPeek says that a file was named only to be looked at.
var errPeek = errors.New("the history belongs to an agent, and this is none")

// Save replaces the file if it would change. A failure is logged once, until it works again.
func (f *File) Save(r core.Checkpoint) error {
	if f.untouched {
		return errPeek
	}
	text, err := encode(r, f.agent)
	if err == nil {
		err = f.setAside()
	}
	if err == nil {
		err = f.write(text)
	}
	if err != nil {
		f.failed(err)
		return err
	}
	f.succeeded()
	return nil
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
	err = f.explain(err)
	if f.unkept == "" {
		f.log.Warn("health history is not kept, a restart of the agent forgets it", "error", err)
	}
	f.unkept = oneLine(err)
}

// explain adds to a denial what may be behind it: user 0 without capabilities is an ordinary user, and SELinux denies
// what the mode allows.
func (f *File) explain(err error) error {
	if !errors.Is(err, syscall.EACCES) {
		return err
	}
	dir := filepath.Dir(f.path)
	label, _ := os.ReadFile(f.label)
	if parts := strings.Split(string(label), ":"); len(parts) >= 4 { // user:role:type:level
		return fmt.Errorf("%w; SELinux has this process as %s: that type needs the right to write to %s, by another label "+
			"of the folder (ls -Z) or as another type (component selinux of the deployment)", err, parts[2], dir)
	}
	return fmt.Errorf("%w; this process is user %d: give %s that owner", err, os.Geteuid(), dir)
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
