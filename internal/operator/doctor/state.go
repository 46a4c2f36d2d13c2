package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// stateDir is the state directory, or the folder in which it would be made.
type stateDir struct {
	Exists, Folder bool
	Mode           fs.FileMode
	Nearest        string // it, or the nearest folder above that exists
	Access         error  // of writing to Nearest
	Free, Inodes   uint64 // bytes and inodes; valid if FreeErr is nil
	FreeErr        error
}

func readState(_ context.Context, o *Options) func(*Facts) {
	if o.StateDir == "" {
		return func(*Facts) {}
	}
	s := stateDir{Nearest: o.StateDir}
	info, err := os.Stat(o.StateDir)
	if s.Exists = err == nil; s.Exists {
		s.Folder, s.Mode = info.IsDir(), info.Mode()
	}
	for !exists(s.Nearest) && s.Nearest != "/" {
		s.Nearest = filepath.Dir(s.Nearest)
	}
	s.Access = unix.Access(s.Nearest, unix.W_OK|unix.X_OK)
	s.Free, s.Inodes, s.FreeErr = o.system.free(s.Nearest)
	return func(f *Facts) { f.State = s }
}

// Less than this is a full disk: the files of an agent have some 10 kB.
const (
	minFree   = 1 << 20
	minInodes = 16
)

func decideState(f *Facts) []Finding {
	s := f.State
	place := f.StateDir
	switch {
	case f.StateDir == "":
		return []Finding{{"state", Note, "state_dir", "none: health is forgotten at a restart, and there is no control socket", ""}}
	case f.Late["state"]:
		return nil
	case s.Exists && !s.Folder:
		return []Finding{{"state", Problem, place, "the state directory is not a folder", "remove the file, or set another state directory: " + stateDirSetting(f.Options)}}
	case s.Access != nil && errors.Is(s.Access, unix.EACCES) && f.UID != 0 && f.Agent.Running:
		return []Finding{{"state", Note, place, fmt.Sprintf("not writable by user %d; the agent runs as another one", f.UID), ""}}
	case s.Access != nil:
		return []Finding{{"state", Problem, s.Nearest, "the state directory is not writable: " + s.Access.Error(),
			"mount it for writing" + remedyInPod(f, " (a hostPath in the pod)") + ", or set another state directory: " + stateDirSetting(f.Options) + "; without it health is forgotten at a restart"}}
	case s.FreeErr == nil && (s.Free < minFree || s.Inodes < minInodes):
		return []Finding{{"state", Problem, s.Nearest, fmt.Sprintf("the disk is full: %d kB and %d inodes are free", s.Free>>10, s.Inodes), "free some space; until then health is forgotten at a restart"}}
	case s.Exists && s.Mode.Perm()&0o022 != 0 && s.Mode&fs.ModeSticky == 0:
		return []Finding{{"state", Warning, place, fmt.Sprintf("other users may change its files (mode %04o)", s.Mode.Perm()), "chmod 0755 " + place}}
	case !s.Exists:
		return []Finding{{"state", OK, place, "is made when an agent first starts", ""}}
	}
	return append(historyFindings(f), Finding{"state", OK, place, fmt.Sprintf("writable, %d MB free", s.Free>>20), ""})
}

// historyFindings are the problems with the history of an agent that does not run: a running one reports them.
func historyFindings(f *Facts) (findings []Finding) {
	if f.Agent.Running {
		return nil
	}
	for _, p := range f.Driver.Problems {
		file := filepath.Join(f.StateDir, cmp.Or(f.Program, "*")+".json")
		findings = append(findings, Finding{"state", Warning, file, p.Text,
			cmp.Or(p.Remedy, "the agent sets a file that it can't use aside, and starts without it")})
	}
	return findings
}
