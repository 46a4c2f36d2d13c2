package ownership

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
)

// An agent that can't write its file goes on if no other agent of the node has one. It then offers GPUs that are not
// recorded, and shows that to agents that start later. They offer nothing until its file is complete:
//
//	nomad-gpu  disk full, no other agent: link, offers all GPUs . . . . . . room: file with all GPUs, no link
//	k8s-gpu        starts, finds the link: offers nothing . . . . . . . . . . . . . reads the file, offers the others
//
// The link <agent>.unrecorded needs no block of the disk, and stays when the agent is killed. Its target is the boot.
// On a disk that takes no link either (read-only, no inode), the agent locks the state directory instead. If that is
// missing and can't be made, it locks the nearest directory above. The lock ends with the process:
//
//   - An agent waits for half a minute before it takes the lock, because another agent may be restarting.
//   - An agent that can't write and finds the lock held for some seconds keeps away. It waits for a complete file.
//   - An agent whose work has a GPU takes the lock at once: it had the lock before.
//
// No agent can see another one that made no link and ended more than half a minute ago.

// unrecordedSuffix is the suffix of the link by which an agent shows that it offers GPUs that its file does not have.
const unrecordedSuffix = ".unrecorded"

const (
	// stateLockAtMost is how long an agent waits for the lock of the state directory. An agent that only looks holds it
	// for microseconds.
	stateLockAtMost = 100 * time.Millisecond

	// unseenAtMost is how long a restart of an agent takes, or its first file after the fault.
	unseenAtMost = 30 * time.Second
)

var (
	errUnrecorded = errors.New("the agent offers GPUs that it could not record")
	errUnseen     = errors.New("the directory is locked, or was: an agent offers GPUs that it could not record")
	errUnready    = errors.New("an earlier process offered GPUs without a record: the file waits until the GPUs are read")
)

// isUnrecorded reports whether an agent has a link of this boot. A link that can't be read counts as one.
func (s *store) isUnrecorded(agent string) bool {
	target, err := os.Readlink(s.path(agent, unrecordedSuffix))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false
	case err != nil:
		return true
	}
	return target == bootTarget(s.boot) || target == bootTarget("") || s.boot == ""
}

// bootTarget returns the target of a link of a boot.
func bootTarget(boot string) string { return "bootID=" + boot }

// offers notes what this agent offers, for its first file after the fault.
func (s *store) offers(at []gpu.Placement) {
	if !s.unrecorded {
		s.offered = nil
	}
	s.offered = sortedPlacements(append(s.offered, at...))
}

// showUnrecorded shows other agents that this one offers GPUs that its file does not have. If it returns false, another
// agent may offer them, and this one must not. The caller has locked the folder.
func (s *store) showUnrecorded(ctx context.Context) bool {
	if s.link() != nil && !s.lockStateDir(ctx) {
		return false
	}
	s.unrecorded = true
	return true
}

// link makes the link.
func (s *store) link() error {
	path := s.path(s.agent, unrecordedSuffix)
	err := os.Symlink(bootTarget(s.boot), path)
	switch {
	case !errors.Is(err, fs.ErrExist):
		return err
	case s.isUnrecorded(s.agent):
		return nil
	}
	return cmp.Or(os.Remove(path), os.Symlink(bootTarget(s.boot), path)) // it is of an earlier boot
}

// endUnrecorded ends what showUnrecorded has begun. The file is complete.
func (s *store) endUnrecorded() error {
	if !s.unrecorded {
		return nil
	}
	if err := os.Remove(s.path(s.agent, unrecordedSuffix)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return writeError{err}
	}
	s.unlockStateDir()
	s.unrecorded = false
	s.offered = nil
	return nil
}

// statePath returns the path for the lock of the state directory. If that is missing, the lock is of the nearest
// directory above it. It follows a symbolic link.
func (s *store) statePath() string {
	dir := filepath.Dir(s.folder)
	for {
		info, err := os.Stat(dir)
		missing := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || err == nil && !info.IsDir()
		if !missing || dir == filepath.Dir(dir) {
			return dir + "/."
		}
		dir = filepath.Dir(dir)
	}
}

// lockStateDir locks the state directory. It returns false if another agent has it locked, or may be restarting. It
// returns true if no agent can lock it, because its file system has no locks.
func (s *store) lockStateDir(ctx context.Context) bool {
	if s.stateLock != nil && filelock.IsAt(s.stateLock, s.statePath()) {
		return true
	}
	s.unlockStateDir()
	f, err := s.tryStateLock(ctx)
	held := errors.Is(err, context.DeadlineExceeded)
	s.lockSeen = s.lockHeld.over(held) || s.lockSeen
	if held || s.unseen.IsZero() {
		s.unseen = time.Now()
	}
	if err != nil {
		return hasNoLock(err) && !s.lockSeen
	}
	s.stateLock = f
	if s.refuse && (s.lockSeen || time.Since(s.unseen) < unseenAtMost) && !s.hasWork() {
		s.unlockStateDir()
		return false
	}
	s.inherits = s.inherits || !s.unrecorded // an earlier process may have had it
	return true
}

// tryStateLock locks the state directory. It fails with context.DeadlineExceeded if another agent has it locked, or a
// directory above it: that agent has not found the state directory yet, which was missing.
func (s *store) tryStateLock(ctx context.Context) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, stateLockAtMost)
	defer cancel()
	path := s.statePath()
	f, err := filelock.Wait(ctx, path)
	if err != nil {
		return nil, err
	}
	dir := filepath.Dir(path)
	for dir != filepath.Dir(dir) {
		dir = filepath.Dir(dir)
		if held, _ := filelock.IsHeld(dir + "/."); held { // with an error no agent can lock it
			_ = f.Close() // which unlocks
			return nil, fmt.Errorf("%s is locked: %w", dir, context.DeadlineExceeded)
		}
	}
	return f, nil
}

// hasNoLock reports whether an error means that no agent can lock the directory.
func hasNoLock(err error) bool {
	none := []error{syscall.ENOLCK, syscall.ENOSYS, syscall.EOPNOTSUPP}
	return slices.ContainsFunc(none, func(e error) bool { return errors.Is(err, e) })
}

func (s *store) unlockStateDir() {
	if s.stateLock != nil {
		_ = s.stateLock.Close() // which unlocks
		s.stateLock = nil
	}
}

// hasWork reports whether work has a GPU from this agent, by what is known.
func (s *store) hasWork() bool {
	if s.decider == nil {
		return false
	}
	for _, read := range s.decider.readers {
		if r := read(); len(r.Holders) > 0 && !r.MayHaveEnded {
			return true
		}
	}
	return false
}

// findUnseen adds the agent that has the state directory locked. Every local user can lock it. So the lock counts for a
// short time only while this agent can write, because the other one then can, too.
func (s *store) findUnseen(ctx context.Context, r *reading) {
	if !s.refuse || s.unrecorded {
		return
	}
	f, err := s.tryStateLock(ctx)
	if err == nil {
		_ = f.Close() // which unlocks
	}
	held := errors.Is(err, context.DeadlineExceeded)
	complete := !held && slices.ContainsFunc(r.others, func(f agentFile) bool { return f.unknown == nil })
	s.lockSeen = (s.lockHeld.over(held && s.failing) || s.lockSeen) && !complete
	if held {
		s.unseen = time.Now()
		s.heldSince = cmp.Or(s.heldSince, s.unseen)
	}
	if s.lockSeen || held && time.Since(s.heldSince) < unseenAtMost {
		r.addUnseen(s.otherAgent(), filepath.Dir(s.folder))
	}
}

// addUnseen adds that an agent may offer any GPU, by its lock of the state directory.
func (r *reading) addUnseen(agent, stateDir string) {
	r.alone = false
	if len(r.unknown()) > 0 {
		return
	}
	i := slices.IndexFunc(r.others, func(f agentFile) bool { return f.agent == agent })
	if i < 0 {
		i = len(r.others)
		r.others = append(r.others, agentFile{agent: agent})
	}
	r.others[i].unknown = func(gpu.DeviceID) bool { return true }
	r.faults = append(r.faults, fault{agent: agent, path: stateDir, err: errUnseen})
}

// otherAgent returns the name of the agent that may run beside this one.
func (s *store) otherAgent() string {
	names := Agents()
	return names[slices.IndexFunc(names, func(name string) bool { return name != s.agent })]
}

// withUnrecorded returns the file of this agent with what it may have given out without a record.
func (s *store) withUnrecorded(r reading) agentFile {
	mine := r.mine
	if !s.unrecorded {
		return mine
	}
	mine.devices = slices.Clone(mine.devices)
	order := nextOrder(append(slices.Clone(r.others), mine))
	for _, p := range s.offered {
		if mine.oldestOver(p) == nil {
			mine.devices = append(mine.devices, device{at: p, order: order, since: time.Now().UTC()})
		}
	}
	mine.devices = normalized(mine.devices)
	return mine
}

// ownAlone returns what this agent may offer while the files can't be read: everything if no other agent has any.
func (s *store) ownAlone(ctx context.Context, why error) inventory.Recorded {
	own, missing := s.ownUnread(why)
	if own.Reason != "" {
		return own
	}
	if s.lockStateDir(ctx) {
		// Another agent may have made the folder before the lock.
		if again, still := s.ownUnread(why); again.Reason == "" && still == missing {
			s.unrecorded = true
			return own
		}
	}
	if !s.refuse {
		return own
	}
	return s.ownRecorded(elseUnseen)
}
