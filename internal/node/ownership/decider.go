package ownership

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
)

// movePause is the time between checks while a GPU moves: the records of holders cause no event.
const movePause = time.Second

// decider decides through which API each GPU is offered, from the file of the node, under the lock of the folder of the agents. It is used by
// the goroutine of watchAgents, but for the methods that lock mu.
type decider struct {
	stateDir string
	agent    string
	apis     []inventory.API // that this process serves, that of the settings first
	readers  Readers
	clock    Clock
	log      *slog.Logger
	resets   func() (bool, error) // see Input.ResetRuns

	state State
	good  File // the latest one that was read or written
	read  bool // good was read at least once

	mu       sync.Mutex
	reserved map[gpu.DeviceID]time.Duration
	status   []Status
	takes    map[gpu.DeviceID]*Taken // GPUs that this process wants, or has, for itself
	marked   bool                    // the file has marks of this agent
	wants    uint64                  // calls of want
	ending   bool                    // no more GPU is taken
}

func (a *decider) now() time.Duration { return time.Since(a.clock.Began) } // of the monotonic clock

// reservedAt records that this agent gives devices out.
func (a *decider) reservedAt(devices []gpu.Device) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range devices {
		a.reserved[devices[i].At.GPU] = a.now()
	}
}

func (a *decider) latest() []Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.status)
}

// hostRecords is what the decision needs of the files of the agents.
type hostRecords struct {
	mine     agentFile // with those of an earlier boot
	now      agentFile // of this agent, of this boot
	others   []agentFile
	running  func(agent string) bool
	previous map[gpu.DeviceID]bool // that earlier processes of this agent have offered
	refuse   bool

	// follows means that another process of this agent runs, as in an update without a gap: it changes the file, and this process serves
	// the same APIs.
	follows bool
}

// recorded reports whether this agent has recorded a GPU or an instance of it.
func (c hostRecords) recorded(id gpu.DeviceID) bool { return c.mine.oldestOn(gpu.WholeGPU(id)) != nil }

// of returns the overlaps of other agents on a GPU. With refuse an agent whose file can't be read has none on a GPU that this agent has recorded.
func (c hostRecords) of(id gpu.DeviceID) (all []Overlap) {
	whole := gpu.WholeGPU(id)
	mine := c.mine.oldestOn(whole)
	for _, f := range c.others {
		switch theirs := f.oldestOn(whole); {
		case theirs != nil:
			all = append(all, Overlap{
				Agent: f.agent, Running: c.running(f.agent), Earlier: mine == nil || before(*theirs, f.agent, *mine, c.mine.agent),
			})
		case f.mayOffer(id) && (!c.refuse || c.now.oldestOn(whole) == nil):
			all = append(all, Overlap{Agent: f.agent, Running: c.running(f.agent), Earlier: mine == nil, Unread: true})
		}
	}
	return all
}

// oldestOn is the first recorded device of a GPU; nil if there is none.
func (f agentFile) oldestOn(whole gpu.Placement) (oldest *device) {
	for i, c := range f.devices {
		if whole.Covers(c.at) && (oldest == nil || c.order < oldest.order) {
			oldest = &f.devices[i]
		}
	}
	return oldest
}

// decide returns the owners that follow from the file of the node, those of the agents and the inventory. A changed owner is on disk
// before they are applied. While the file can't be read the last good one is in force, and without one no GPU takes new work.
func (a *decider) decide(inv *inventory.Allocatable, c hostRecords) (inventory.Ownership, error) {
	file, err := Read(a.stateDir)
	switch {
	case err == nil && c.follows:
		a.good, a.read = file, true
	case err == nil:
		file = file.Restore(a.agent, a.good)
	case !a.read:
		return inventory.Ownership{Required: true}, err
	default:
		file = a.good
	}
	in := Input{
		Clock: a.clock, Now: a.now(), // before the records are read: one without a time is of then
		Agent: a.agent, APIs: a.apis, Default: a.apis[0], GPUs: inv.GPUs(), File: file, ReadOnly: err != nil || c.follows, Follows: c.follows, Takes: a.wanted(), ResetRuns: a.resets,
		Running: c.running, Overlaps: c.of, Recorded: c.recorded,
		OfferedBefore: func(id gpu.DeviceID) bool { return c.previous[id] }, Records: a.readers.Read(), Applied: inv.Owner, Reserved: a.lastReserved,
	}
	if d := inv.Driver(); d.State != gpu.DriverReady {
		in.NoDriver = cmp.Or(d.Reason, d.State.String())
	}
	state, next, status := Next(a.state, in)
	if !in.ReadOnly {
		if onDisk, readErr := Read(a.stateDir); readErr != nil || !next.Equal(onDisk) {
			if err = Write(a.stateDir, next); err != nil { // what is on disk counts: no owner changes
				in.ReadOnly, in.File = true, file
				state, next, status = Next(a.state, in)
			}
		}
		a.good, a.read = next, true
		a.noteMarks(a.log, file, a.good)
	}
	a.state = state
	a.tell(state)
	logMoves(a.log, a.latest(), status)
	a.mu.Lock()
	a.status = status
	a.mu.Unlock()
	out := ownershipFrom(status, len(a.apis) > 1)
	out.DriverReleased = state.released
	return out, err
}

func ownershipFrom(status []Status, required bool) inventory.Ownership {
	out := inventory.Ownership{Required: required}
	for _, st := range status {
		out.GPUs = append(out.GPUs, st.GPUOwner)
	}
	return out
}

func (a *decider) lastReserved(id gpu.DeviceID) (time.Duration, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at, ok := a.reserved[id]
	return at, ok
}

// moving reports whether a GPU moves, waits or is taken, or the driver is released, so that the records must be read again soon.
func (a *decider) moving() bool {
	if a == nil {
		return false
	}
	return len(a.wanted()) > 0 || a.state.released != "" || slices.ContainsFunc(a.latest(), func(st Status) bool { return cordoned(st) || st.Taken != "" })
}

// Reserved reports that this agent gives devices out for new work. It never blocks.
func (w *Watcher) Reserved(devices []gpu.Device) {
	if w.decider != nil {
		w.decider.reservedAt(devices)
	}
}

// Status returns the latest decisions about GPUs that have an entry in the file, or that the APIs of this agent share.
func (w *Watcher) Status() []Status {
	if w.decider == nil {
		return nil
	}
	return w.decider.latest()
}

// Draining returns the GPUs that wait for the end of their work: those that move, those that this agent wants for itself, and those that are not
// offered any more and stay recorded.
func (w *Watcher) Draining() (all []gpu.DeviceID) {
	if w.decider != nil {
		all = slices.Collect(maps.Keys(w.decider.wanted()))
	}
	for _, st := range w.Status() {
		if cordoned(st) {
			all = append(all, st.GPU)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range w.kept {
		all = append(all, k.at.GPU)
	}
	return all
}

// Serve sets the APIs that this process serves, that of the settings first, and the readers of their records. Call it before Run.
// Without it one API is served, and no GPU moves.
func (w *Watcher) Serve(apis []inventory.API, readers Readers) {
	if w.store == nil || len(apis) == 0 {
		return
	}
	w.decider = &decider{
		stateDir: filepath.Dir(w.store.folder), agent: w.store.agent, apis: apis, readers: readers, clock: Clock{time.Now()}, log: w.log,
		reserved: map[gpu.DeviceID]time.Duration{}, resets: w.resets,
	}
	w.store.decider = w.decider
}

// Change replaces the file of the node in a state directory by what change returns of it, under the lock of the folder of the agents, and
// wakes the agents.
func Change(ctx context.Context, stateDir string, change func(File) (File, error)) error {
	folder := filepath.Join(stateDir, FolderName)
	mkdirErr := os.MkdirAll(folder, 0o700)
	unlock, err := lockFolder(ctx, folder)
	if err != nil {
		return errors.Join(mkdirErr, err)
	}
	defer unlock()
	f, err := Read(stateDir)
	if err != nil {
		return err
	}
	next, err := change(f)
	if err != nil || next.Equal(f) {
		return err
	}
	if err := Write(stateDir, next); err != nil {
		return err
	}
	now := time.Now()
	return os.Chtimes(folder, now, now) // an event for those that watch it; without, they look within 30 s
}

// unread is the ownership until the files of the agents are read for the first time, for which their lock is needed: with a file that has some, or that
// can't be read, no GPU takes work, since any may be another agent's. With overlap = warn an agent works with one that it can't open.
func (a *decider) unread(refuse bool) inventory.Ownership {
	f, err := Read(a.stateDir)
	unknown := err != nil && (refuse || errors.Is(err, ErrFormat))
	return inventory.Ownership{Required: len(a.apis) > 1 || unknown || err == nil && !f.Empty()}
}

// isRunning reports whether an agent runs, or that may be. The folder is locked.
func (s *store) isRunning(agent string) bool {
	held, err := filelock.IsHeld(s.path(agent, ".lock"))
	return held || err != nil
}
