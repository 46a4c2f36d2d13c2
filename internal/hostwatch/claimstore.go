package hostwatch

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/filelock"
	"github.com/tandem-gpu/tandem/internal/statefile"
)

const lockAtMost = 5 * time.Second // another agent holds the lock of the folder for milliseconds

// claimStore is one agent's view of the folder in which the agents of a host record what they offer.
//
//	<state_dir>/claims/             locked while an agent reads, decides and writes
//	                   nomad-gpu.json   what nomad-gpu claims; outlives it
//	                   nomad-gpu.lock   locked while a nomad-gpu runs
//	                   k8s-gpu.json ...
//
// Two agents that start together, with refuse, on a host without claims:
//
//	nomad-gpu  lock, reads nothing, claims GPU 3 as turn 1, unlock
//	k8s-gpu      waits for the lock .............................. lock, reads turn 1, leaves GPU 3 alone, unlock
//
// An agent claims the devices of an inventory some milliseconds after it was published. Claims of others that exist by then
// count immediately; only if both agents read a new device at the same time, the later one offers it for those milliseconds.
//
// It is used by one goroutine.
type claimStore struct {
	folder  string
	agent   string
	boot    string
	refuse  bool
	started time.Time
	log     *slog.Logger

	liveness *os.File          // lock file of this agent, locked; nil = not yet acquired
	logged   map[string]string // error of a file that can't be used, by its name
	tidy     bool              // files left by crashes are removed

	decoded map[string]decodedFile // by name of a file

	assigner *assigner // nil = no GPU moves between APIs
	former   claimFile // claims of this agent in an earlier boot: for the assignments only
}

// decodedFile is a file as it was decoded last.
type decodedFile struct {
	text []byte
	file claimFile
}

// view is what an agent reads from the claims.
type view struct {
	claims    []inventory.Claim
	numbering inventory.Numbering // of all agents
	others    []otherAgent        // by name

	assignments      inventory.Assignments
	assignmentsError error // the last good file of assignments is in force, or none
}

type otherAgent struct {
	agent, file string
	running     bool
	devices     int // of this agent, that it claims
}

// writeError is a failure to write the claims of this agent; the claims of others were read.
type writeError struct{ error }

func (e writeError) Unwrap() error { return e.error }

// errDuplicateAgent is returned while another process runs under the same agent's name.
var errDuplicateAgent = errors.New("another agent of this name is running")

// update claims what is offered now and returns what the others claim. It fails with errDuplicateAgent while another process
// writes under the name of this agent, and with writeError if nothing can be written: the view is valid in both cases. With
// another error nothing was read.
func (s *claimStore) update(ctx context.Context, o offer) (view, error) {
	mkdirErr := os.MkdirAll(s.folder, 0o700)
	unlock, err := lockFolder(ctx, s.folder)
	if err != nil {
		return view{}, cmp.Or(mkdirErr, err)
	}
	defer unlock()
	failed := s.acquireLiveness()
	mine, others, err := s.read()
	if err != nil {
		return view{}, err
	}
	if s.assigner != nil {
		o = s.assigner.keeping(o)
	}
	if failed == nil {
		next := mine
		next.started, next.boot = s.started, s.boot
		next.claims = nextClaims(mine, s.counting(others), o, s.refuse, time.Now())
		if len(o.numbering.Numbers) > 0 { // else the numbers in the file stay
			next.numbering = mergeNumbering(o.numbering, mine.numbering, others)
		}
		if !next.equal(mine) {
			failed = s.write(next)
		}
		if failed == nil {
			mine = next
		}
	}
	// The numbers that this agent has written count, too: its history may be older, or of another node.
	v := view{numbering: numberingOf(append(slices.Clone(others), mine))}
	if s.assigner != nil {
		c := hostClaims{mine: mine, others: others, running: s.isRunning, started: s.started, follows: errors.Is(failed, errDuplicateAgent)}
		c.mine.claims = append(slices.Clone(mine.claims), s.former.claims...)
		v.assignments, v.assignmentsError = s.assigner.assign(o.inventory, c)
		s.former.claims = slices.DeleteFunc(s.former.claims, func(c claim) bool { return v.assignments.Elsewhere(c.at.GPU) })
	}
	v.claims = coreClaims(mine, s.counting(others), o)
	for _, f := range others {
		v.others = append(v.others, otherAgent{
			agent: f.agent, file: s.path(f.agent, ".json"),
			running: s.isRunning(f.agent), devices: countOverlaps(mine, f, o),
		})
	}
	return v, failed
}

// counting are the claims of others that count: without those on GPUs that were taken from an agent by force.
func (s *claimStore) counting(others []claimFile) []claimFile {
	if s.assigner == nil {
		return others
	}
	others = slices.Clone(others)
	for i, f := range others {
		others[i].claims = slices.DeleteFunc(slices.Clone(f.claims), func(c claim) bool { return s.assigner.state.Disregards(f.agent, c.at.GPU) })
	}
	return others
}

// lockFolder locks a folder for a change of its files until unlock is called or the process ends. No other user may be able to
// open the folder.
func lockFolder(ctx context.Context, path string) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lockAtMost)
	defer cancel()
	folder, err := filelock.Wait(ctx, path)
	if err != nil {
		return nil, err
	}
	return func() { _ = folder.Close() }, nil // which unlocks
}

func (s *claimStore) path(agent, suffix string) string { return filepath.Join(s.folder, agent+suffix) }

// acquireLiveness locks the lock file that shows that this agent runs, unless it is locked and still at its path. The folder
// must be locked: an agent that checks whether another one runs locks that file for a moment, too (filelock.IsHeld).
func (s *claimStore) acquireLiveness() error {
	path := s.path(s.agent, ".lock")
	if s.liveness != nil && filelock.IsAt(s.liveness, path) {
		return nil
	}
	s.close()
	f, err := filelock.Take(path)
	switch {
	case errors.Is(err, filelock.ErrHeld):
		return errDuplicateAgent
	case err != nil:
		return writeError{err}
	}
	s.liveness = f
	return nil
}

// close unlocks the lock file. The claims stay.
func (s *claimStore) close() {
	if s.liveness != nil {
		_ = s.liveness.Close() // which unlocks
		s.liveness = nil
	}
}

// read reads the claims of all agents. Claims of an earlier boot are void. A file that can't be read is logged once and
// ignored.
func (s *claimStore) read() (mine claimFile, others []claimFile, err error) {
	mine.agent = s.agent
	entries, err := os.ReadDir(s.folder) // sorted
	if err != nil {
		return mine, nil, err
	}
	for _, e := range entries {
		agent, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || !isAgentName(agent) {
			continue
		}
		f, err := s.readFile(e.Name(), agent)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		s.logOnce(e.Name(), err)
		switch {
		case err == nil && agent == s.agent && f.boot != s.boot && f.boot != "" && s.boot != "":
			s.former = f
			s.former.claims = slices.Clone(f.claims) // f is kept as decoded
		case err != nil || f.boot != s.boot && f.boot != "" && s.boot != "": // an unknown boot is no sign of a reboot
		case agent == s.agent:
			mine = f
		default:
			others = append(others, f)
		}
	}
	return mine, others, nil
}

// readFile reads the file of an agent, and decodes it unless it is the same as before.
func (s *claimStore) readFile(name, agent string) (claimFile, error) {
	text, err := statefile.Read(filepath.Join(s.folder, name), maxSize, statefile.SharedDir)
	if err != nil {
		return claimFile{}, err
	}
	if d, ok := s.decoded[name]; ok && bytes.Equal(d.text, text) {
		return d.file, nil
	}
	f, err := decode(text, agent)
	if err == nil {
		if s.decoded == nil {
			s.decoded = map[string]decodedFile{}
		}
		s.decoded[name] = decodedFile{text, f}
	}
	return f, err
}

// logOnce logs the error of a file when it changes.
func (s *claimStore) logOnce(name string, err error) {
	if err == nil {
		delete(s.logged, name)
		return
	}
	if s.logged == nil {
		s.logged = map[string]string{}
	}
	if s.logged[name] != err.Error() {
		s.logged[name] = err.Error()
		s.log.Warn("claims of an agent can't be read and do not count", "file", filepath.Join(s.folder, name), "error", err)
	}
}

// write replaces the file of this agent.
func (s *claimStore) write(f claimFile) error {
	path := s.path(s.agent, ".json")
	if !s.tidy {
		statefile.RemoveTemporary(path)
		s.tidy = true
	}
	text, err := f.encode()
	if err != nil {
		return writeError{err}
	}
	if err := statefile.Write(path, text); err != nil {
		return writeError{fmt.Errorf("%s: %w", path, err)}
	}
	return nil
}
