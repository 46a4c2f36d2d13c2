// Package history saves the health history of an agent on disk, so that faults and recoveries outlive a restart. An agent
// whose file can't be written works on with a warning. A file whose content can't be used, or that can't be read, is never
// replaced: it is renamed first.
package history

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

var _ monitor.Store = (*File)(nil)

// File is the history of one agent in <dir>/<agent>.json. Make one with Open or OpenReadOnly. Load comes before the first Save, and
// both are called from one goroutine at a time; Problem and Warnings are safe for concurrent use.
type File struct {
	agent, path, proc string
	label             string // file with the SELinux context of this process, if SELinux is on (proc(5): attr/current)
	log               *slog.Logger
	last              []byte // content of the file; nil = unknown
	readOnly          bool   // made by OpenReadOnly
	aside             *aside // the present file is set aside before the next Save; nil = it is replaced
	now               func() time.Time

	mu          sync.Mutex
	saveProblem string   // why the latest Save failed
	bootProblem string   // why the boot ID is unknown
	notRead     string   // what this process has not read of the history, and why; "" = it has read all of it
	kept        []string // files that were set aside, by this process or an earlier one
}

// Open names the file; its folder is created by the first Save. Boot ID and uptime are read beneath procRoot; "" is /proc.
func Open(dir, agent, procRoot string, log *slog.Logger) *File {
	return &File{
		agent: agent, path: filepath.Join(dir, agent+".json"), log: log, proc: procRoot, now: time.Now,
		label: filepath.Join(cmp.Or(procRoot, "/proc"), "self/attr/current"),
	}
}

// OpenReadOnly names the file of an agent for a process that is not that agent: it is read, and nothing is changed, created or
// logged. Problems has why it could not be read completely.
func OpenReadOnly(dir, agent, procRoot string) *File {
	f := Open(dir, agent, procRoot, slog.New(slog.DiscardHandler))
	f.readOnly = true
	return f
}

// SetWallClock replaces time.Now as the wall clock, which may jump. Call it before Load.
func (f *File) SetWallClock(now func() time.Time) { f.now = now }

// Problem is why the history is not saved, or why a reboot is not detected, in one line; "" if both work.
func (f *File) Problem() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return cmp.Or(f.saveProblem, f.bootProblem)
}

// readProblem is why a history was not read; "" if all were, or an operator has removed the files that were set aside.
func (f *File) readProblem() string {
	if f.notRead == "" && len(f.kept) == 0 {
		return ""
	}
	text := cmp.Or(f.notRead, "an earlier one was not used, or not completely")
	if len(f.kept) > 0 {
		text += "; kept aside: " + strings.Join(f.kept, ", ")
	}
	return text
}

// Problems are those of the history; nil if there are none, or f is nil.
func (f *File) Problems() (all []problem.Problem) {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	add := func(code problem.Code, text string) {
		if text != "" {
			all = append(all, problem.Problem{Code: code, Object: f.path, Text: "health history: " + text})
		}
	}
	if add(problem.HistorySave, f.saveProblem); f.saveProblem == "" {
		add(problem.Boot, f.bootProblem)
	}
	if text := f.readProblem(); text != "" {
		all = append(all, problem.Problem{
			Code: problem.HistoryLoad, Object: f.path, Text: "health history: " + text, Remedy: f.readRemedy(),
		})
	}
	return all
}

// readRemedy is what an operator does about a history that was not read.
func (f *File) readRemedy() string {
	if len(f.kept) == 0 {
		return "check the GPUs, and run clear for each with the cause FAULTS_UNKNOWN"
	}
	return "check the GPUs, run clear for each with the cause FAULTS_UNKNOWN, then remove the files that are kept aside"
}

// Load returns the saved history, empty if there is none, and the boot ID of the node. Its times are by the present
// wall clock. A file that can't be read is read again for some seconds. One whose content can't be used completely is
// set aside as <file>.broken, one that can't be read at all as <file>.unread. Then each GPU that may
// have had a fault has the condition health.ReasonFaultUnknown. Where one of the two boot IDs is unknown the other is
// used for both: an unknown boot ID is no sign of a reboot.
func (f *File) Load() (core.Checkpoint, string) {
	if !f.readOnly {
		statefile.RemoveTemporary(f.path)
	}
	d := f.read()
	f.lookAside()
	now := f.now()
	boot, err := readBoot(f.proc, now)
	if err != nil {
		f.log.Warn("boot ID can't be read, a reboot is not detected", "error", err)
		f.mu.Lock()
		f.bootProblem = "a reboot is not detected: " + err.Error()
		f.mu.Unlock()
	}
	r := d.record.Rebase(boot, now)
	for _, id := range slices.Sorted(maps.Keys(d.faults)) {
		r = r.WithUnknownFault(now, id, d.faults[id])
	}
	if d.anyFaults {
		r = r.WithUnknownFaults(now)
	}
	switch {
	case boot.ID == "":
		boot.ID = r.BootID
	case r.BootID == "":
		r.BootID = boot.ID
	}
	return r, boot.ID
}

// errReadOnly is returned by Save of a File made by OpenReadOnly.
var errReadOnly = errors.New("the history belongs to an agent: it is read only")

// Save replaces the file if it differs. A failure is logged once, and again when Save succeeds.
func (f *File) Save(r core.Checkpoint) error {
	if f.readOnly {
		return errReadOnly
	}
	text, err := encode(r, f.agent)
	if err == nil {
		err = f.setAside()
	}
	if err == nil {
		err = f.write(text)
	}
	f.lookAside()
	f.setSaveProblem(err)
	return err
}

// Missing reports whether the file was removed since it was saved or read.
func (f *File) Missing() bool { return f.last != nil && !f.readOnly && statefile.IsMissing(f.path) }

func (f *File) write(text []byte) error {
	if bytes.Equal(text, f.last) && !f.Missing() {
		return nil
	}
	f.last = nil
	if err := statefile.Write(f.path, text); err != nil {
		return err
	}
	f.last = text
	return nil
}

// setSaveProblem records why the history is not saved, nil if it is, and logs when that begins and ends.
func (f *File) setSaveProblem(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		if f.saveProblem != "" {
			f.log.Info("health history saved again", "file", f.path)
		}
		f.saveProblem = ""
		return
	}
	err = f.explain(err)
	if f.saveProblem == "" {
		f.log.Warn("health history not saved, a restart of the agent loses it", "error", err)
	}
	f.saveProblem = oneLine(err)
}

// explain adds the likely cause to a denial: user 0 without capabilities is an ordinary user, and SELinux denies what the mode
// of a folder allows.
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

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
