package ownership

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

const lockAtMost = 5 * time.Second // another agent holds the lock of the folder for milliseconds

// store is one agent's view of the folder in which the agents of a node record what they offer.
//
//	<state_dir>/agents/             locked while an agent reads, decides and writes
//	                   nomad-gpu.json   what nomad-gpu offers; outlives it
//	                   nomad-gpu.lock   locked while a nomad-gpu runs
//	                   nomad-gpu.unrecorded   while it offers GPUs that its file does not have
//	                   k8s-gpu.json ...
//
// Two agents that start together, with refuse, on a node without files:
//
//	nomad-gpu  lock, reads nothing, records GPU 3 in order 1, unlock
//	k8s-gpu      waits for the lock .............................. lock, reads order 1, leaves GPU 3 alone, unlock
//
// An agent records the devices of an inventory some milliseconds after it was published. With refuse they take work from then on
// (inventory.Host.Recorded). With warn devices of others that are recorded by then count immediately.
//
// It is used by one goroutine.
type store struct {
	folder  string
	agent   string
	boot    string
	refuse  bool
	started time.Time
	log     *slog.Logger

	liveness *os.File // lock file of this agent, locked; nil = not yet acquired
	tidy     bool     // files left by crashes are removed

	decoded map[string]decodedFile // by agent
	removed time.Time              // when the folder was found removed, with the lock of this agent; zero = it never was

	decider *decider // nil = no GPU moves between APIs

	former []device // of this agent in an earlier boot: for the decision about owners only

	// previous are the GPUs that earlier processes of this agent offered: those in its file until this process changes that for the first time.
	previous map[gpu.DeviceID]bool
	lost     bool // the file could not be read: they are not known
	written  bool

	left map[gpu.Placement]time.Duration // since when recorded devices are not offered

	unreadPeers grace // since when the file of another agent can't be read

	unrecorded bool            // this agent offers GPUs that its file does not have: all that no other agent has recorded
	inherits   bool            // an earlier process was, and what it offered is not in offered yet
	offered    []gpu.Placement // by this agent since it is unrecorded
	stateLock  *os.File        // the state directory, locked, where no link can be made; nil = it is not locked
	unseen     time.Time       // since when this process has found that lock free; zero = it has not looked
	lockHeld   grace           // since when another agent has it
	lockSeen   bool            // another agent had it for seconds, and has written no complete file since
	heldSince  time.Time       // when it was found held for the first time
	failing    bool            // the last file of this agent could not be written
}

// view is what an agent reads from the files.
type view struct {
	overlaps  []inventory.PeerDevice
	numbering inventory.Numbering // of all agents
	others    []otherAgent        // by name
	own       inventory.Recorded
	faults    []fault
	kept      []kept
	alone     bool // no other agent has a file

	numbersWait bool // new devices have no number so far: see newNumbersWait

	ownership      inventory.Ownership
	ownershipError error // the last good file of the node is in force, or none
}

type otherAgent struct {
	agent, file string
	running     bool
	devices     int // of this agent, that it offers, too
}

// writeError is a failure to write the file of this agent; those of others were read.
type writeError struct{ error }

func (e writeError) Unwrap() error { return e.error }

// errDuplicateAgent is returned while another process runs under the same agent's name.
var errDuplicateAgent = errors.New("another agent of this name is running")

// update records what is offered now and returns what the others offer. It fails with errDuplicateAgent while another process
// writes under the name of this agent, and with writeError if nothing can be written: the view is valid in both cases. With
// another error nothing was read.
func (s *store) update(ctx context.Context, o localDevices) (view, error) {
	s.offers(o.at)
	mkdirErr := os.MkdirAll(s.folder, 0o700)
	unlock, err := lockFolder(ctx, s.folder)
	if err != nil {
		s.failing = !errors.Is(err, context.DeadlineExceeded)
		return view{}, cmp.Or(mkdirErr, err)
	}
	defer unlock()
	failed := s.acquireLiveness()
	r, err := s.read(s.isRunning)
	if err != nil {
		return view{}, err
	}
	s.findUnseen(ctx, &r)
	s.takeOver(r, o, failed)
	if failed == nil {
		failed = s.notYet(r, o.ready)
	}
	s.notePrevious(r)
	counting := s.counting(r.others)
	wait := s.newNumbersWait(r)
	if wait {
		o.numbering = o.numbering.In(r.mine.numbering)
	}
	var keep []kept
	if failed == nil {
		mine := s.withUnrecorded(r)
		if s.decider != nil {
			o.held = s.held()
			o, keep = s.keeping(mine, o)
		}
		r.mine, failed = s.record(r, mine, counting, o)
	}
	if failed == nil {
		failed = s.endUnrecorded()
	} else if s.mayGoOn(r, o, failed) {
		s.showUnrecorded(ctx)
	}
	_, s.failing = errors.AsType[writeError](failed)
	s.written = s.written || failed == nil
	// The numbers that this agent has written count, too: its history may be older, or of another node.
	v := view{numbering: numberingOf(append(slices.Clone(r.others), r.mine)), alone: r.alone, faults: r.faults, kept: keep, numbersWait: wait}
	if s.decider != nil {
		v.ownership, v.ownershipError = s.decide(r, o, failed)
	}
	v.overlaps, v.own = overlapsOf(r.mine, s.counting(r.others), o), s.own(r, failed)
	for _, f := range r.others {
		v.others = append(v.others, otherAgent{
			agent: f.agent, file: s.path(f.agent, ".json"),
			running: s.isRunning(f.agent), devices: countOverlaps(r.mine, f, o),
		})
	}
	return v, failed
}

// takeOver continues what another process of this agent offers, or offered, without a record.
func (s *store) takeOver(r reading, o localDevices, failed error) {
	if errors.Is(failed, errDuplicateAgent) { // that process ends it, too
		s.unrecorded = r.unrecorded || s.stateLock != nil
		s.inherits = r.unrecorded
		return
	}
	if r.unrecorded && !s.unrecorded {
		s.unrecorded = true
		s.inherits = true
	}
	if s.inherits && o.ready { // any GPU that exists
		s.inherits = false
		s.offers(o.excluded)
	}
}

// notYet returns why the file of this agent must not be written yet: it would lack devices. nil = it can be written.
func (s *store) notYet(r reading, ready bool) error {
	switch {
	case s.inherits:
		return writeError{errUnready}
	case r.lost && !s.unrecorded && (!ready || s.refuse && len(r.unknown()) > 0):
		const text = "%s can't be read, and is written again when the GPUs and the files of all agents are: %w"
		return writeError{fmt.Errorf(text, s.path(s.agent, ".json"), r.broken)}
	}
	return nil
}

// newNumbersWait reports whether new devices get no number yet: another agent may have numbered them, and its file can't be read. It writes
// it again in a moment, unless it does not run; then this agent does not wait for longer than for a restart.
func (s *store) newNumbersWait(r reading) bool {
	unread := len(r.unknown()) > 0
	return !s.unreadPeers.over(unread) && unread
}

// mayGoOn reports whether this agent may offer GPUs that it could not record: it has some, and no other agent has a file.
// With overlap = warn the files of others are no reason against it.
func (s *store) mayGoOn(r reading, o localDevices, failed error) bool {
	if _, notWritten := errors.AsType[writeError](failed); !notWritten || s.refuse && !r.alone {
		return s.unrecorded && notWritten
	}
	return slices.ContainsFunc(o.at, func(p gpu.Placement) bool { return r.mine.oldestOver(p) == nil })
}

// held returns a function that reports whether work has a GPU from this agent.
func (s *store) held() func(gpu.DeviceID) bool {
	records := s.decider.readers.Read()
	return func(id gpu.DeviceID) bool { return len(records.HoldersOf(id)) > 0 }
}

// record writes what this agent offers, and returns what is on disk then. mine is what the agent has recorded and what it
// has offered without a record.
func (s *store) record(r reading, mine agentFile, counting []agentFile, o localDevices) (agentFile, error) {
	next := mine
	next.started, next.boot = s.started, s.boot
	next.devices = nextDevices(mine, counting, o, s.refuse, time.Now())
	if len(o.numbering.Numbers) > 0 { // else the numbers in the file stay
		next.numbering = mergeNumbering(o.numbering, r.mine.numbering, r.others)
	}
	if next.equal(r.mine) && r.broken == nil {
		return r.mine, nil
	}
	if err := s.write(next); err != nil {
		return r.mine, err
	}
	if r.broken != nil {
		s.log.Warn("file of this agent could not be read, written again", "file", s.path(s.agent, ".json"), "error", oneLine(r.broken))
	}
	return next, nil
}

// decide returns which API has each GPU.
func (s *store) decide(r reading, o localDevices, failed error) (inventory.Ownership, error) {
	c := hostRecords{
		mine: r.mine, now: r.mine, others: r.others, running: s.isRunning, previous: s.previous, refuse: s.refuse, follows: errors.Is(failed, errDuplicateAgent),
	}
	c.mine.devices = append(slices.Clone(r.mine.devices), s.former...)
	a, err := s.decider.decide(o.allocatable, c)
	s.former = slices.DeleteFunc(s.former, func(c device) bool { return a.Remote(c.at.GPU) })
	return a, err
}

// notePrevious notes what earlier processes of this agent have offered, until this one changes the file.
func (s *store) notePrevious(r reading) {
	if r.former.agent != "" {
		s.former = slices.Clone(r.former.devices) // the file is kept as decoded
	}
	if s.written {
		return
	}
	s.lost = s.lost || r.lost
	if s.previous == nil {
		s.previous = map[gpu.DeviceID]bool{}
	}
	for _, c := range slices.Concat(r.mine.devices, r.former.devices) {
		s.previous[c.at.GPU] = true
	}
}

// counting are the devices of others that count: without those on GPUs that were taken from an agent by force.
func (s *store) counting(others []agentFile) []agentFile {
	if s.decider == nil {
		return others
	}
	others = slices.Clone(others)
	for i, f := range others {
		taken := func(id gpu.DeviceID) bool { return s.decider.state.AgentGone(f.agent, id) }
		others[i].devices = slices.DeleteFunc(slices.Clone(f.devices), func(c device) bool { return taken(c.at.GPU) })
		if f.unknown != nil {
			others[i].unknown = func(id gpu.DeviceID) bool { return f.unknown(id) && !taken(id) }
		}
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

func (s *store) path(agent, suffix string) string { return filepath.Join(s.folder, agent+suffix) }

// acquireLiveness locks the lock file that shows that this agent runs, unless it is locked and still at its path. The folder
// must be locked: an agent that checks whether another one runs locks that file for a moment, too (filelock.IsHeld).
func (s *store) acquireLiveness() error {
	path := s.path(s.agent, ".lock")
	if s.liveness != nil {
		if filelock.IsAt(s.liveness, path) {
			return nil
		}
		s.removed = time.Now()
	}
	s.releaseLiveness()
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

// close unlocks what this agent has locked. Files stay.
func (s *store) close() {
	s.releaseLiveness()
	s.unlockStateDir()
}

func (s *store) releaseLiveness() {
	if s.liveness != nil {
		_ = s.liveness.Close() // which unlocks
		s.liveness = nil
	}
}

// write replaces the file of this agent.
func (s *store) write(f agentFile) error {
	path := s.path(s.agent, ".json")
	if !s.tidy {
		statefile.RemoveTemporary(path)
		if !s.unrecorded {
			_ = os.Remove(s.path(s.agent, unrecordedSuffix)) // of an earlier boot
		}
		s.tidy = true
	}
	text, err := f.encode()
	if err != nil {
		return writeError{err}
	}
	if err := statefile.Write(path, text); err != nil {
		return writeError{fmt.Errorf("%s: %w", path, err)}
	}
	s.remember(text, f)
	return nil
}
