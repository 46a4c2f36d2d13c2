// Package supervisor starts, restarts and ends MPS control daemons. No agent imports it: a daemon would inherit the files of a plugin, by whose end
// its orchestrator knows that the plugin has ended.
package supervisor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
)

// Times of a Supervisor, which are not configurable.
const (
	lookEvery  = 2 * time.Second // for the pools, and for daemons that have ended: they cause no event
	retryFirst = time.Second     // before another attempt to start or end a daemon
	retryMost  = time.Minute
	quitAtMost = 10 * time.Second // for a daemon without clients to end

	// idleFor is for how long a daemon has no client and its GPUs have no work, while no work is added, before it is
	// ended for a GPU that an agent has taken: what was given out before is in the agents' reports by then.
	idleFor = 5 * time.Second

	// takenAtMost is for how long the GPU of an agent that does not run counts as taken: a reset goes on without it
	// (gpureset.AtMost). For as long it may have given out more than its latest answer has.
	takenAtMost = 5 * time.Minute
)

// Pool is what the daemon of a pool is started with.
type Pool struct {
	Name    string   `json:"name"`
	Devices []Device `json:"devices"` // sorted by ID, not empty
	Threads int      `json:"threads"` // percent of a GPU's threads for one client
}

// Device is a GPU that the clients of a daemon share.
type Device struct {
	ID  gpu.DeviceID `json:"id"`
	MiB uint64       `json:"mib"` // device memory of one client; 0 = not limited
}

func (p Pool) equal(o Pool) bool {
	return p.Name == o.Name && p.Threads == o.Threads && slices.Equal(p.Devices, o.Devices)
}

// and returns a pool that two agents offer: with the GPUs of both, and the lower limits.
func (p Pool) and(o Pool) Pool {
	p.Threads = min(p.Threads, o.Threads)
	devices := slices.Concat(p.Devices, o.Devices)
	slices.SortFunc(devices, func(a, b Device) int { // of two limits the lower one is first: 0, which is none, becomes the greatest number
		return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.MiB-1, b.MiB-1))
	})
	p.Devices = slices.CompactFunc(devices, func(a, b Device) bool { return a.ID == b.ID })
	return p
}

// overlaps reports whether both have a GPU.
func (p Pool) overlaps(o Pool) bool {
	return slices.ContainsFunc(p.Devices, func(d Device) bool {
		return slices.ContainsFunc(o.Devices, func(e Device) bool { return d.ID == e.ID })
	})
}

// Offer is what an agent offers by MPS.
type Offer struct {
	Pools []Pool         // that need a daemon
	Held  []gpu.DeviceID // GPUs that work has, or may have
}

// Options configure a Supervisor.
type Options struct {
	Root     string // folder of the daemons, as this process sees it. Clients can write in it
	StateDir string // of the agents: for the records of the daemons
	Lock     string // a file that one supervisor can lock: another one waits

	// Offers has for each agent of the node a function that returns what it offers now. After an error the
	// earlier offer still counts. ErrNoAgent means that there may be no such agent.
	Offers map[string]func(context.Context) (Offer, error)

	// Taken returns the GPUs that agents have taken from all APIs for a proof or a reset, with the agents. After
	// an error the earlier ones still count.
	Taken func() (map[gpu.DeviceID]string, error)

	// Hold waits until no nvidia-smi of the node may reset a GPU, and keeps others from that until release is called;
	// nil = none may.
	Hold func(context.Context) (release func(), err error)

	Log *slog.Logger
}

// ErrNoAgent is the error of the offer of an agent that does not run.
var ErrNoAgent = errors.New("no agent runs")

// Supervisor keeps a daemon running for each pool. A daemon is ended, because its pool is gone or has other settings, when it has no client
// left; and for as long as an agent has taken one of its GPUs, when no GPU of the pool has work either. One that runs
// without a record is another program's, and is left alone. Make one with New, then call Run once.
//
// What a daemon's clients can write decides nothing: its process and its control file are in the record.
type Supervisor struct {
	opts    Options
	lock    *os.File         // nil = it does not hold it
	offered map[string]Offer // by agent: what it has answered last
	known   bool             // every agent that runs has answered, there is one, and it is known what they have taken
	wanted  map[string]Pool  // by name
	held    map[gpu.DeviceID]bool
	taken   map[gpu.DeviceID]string // with the agent
	ran     map[string]time.Time    // when an agent ran last
	idle    map[string]time.Time    // since when the daemon of a pool is idle and takes no clients
	idleFor time.Duration           // that of all but tests is the constant
	retry   map[string]*attempt
	logged  map[string]string // what was logged last, by what it is about
}

// New returns a supervisor. It reads and starts nothing yet.
func New(o Options) *Supervisor {
	return &Supervisor{
		opts: o, offered: map[string]Offer{}, ran: map[string]time.Time{}, idle: map[string]time.Time{}, idleFor: idleFor,
		retry: map[string]*attempt{}, logged: map[string]string{},
	}
}

// Run supervises the daemons until ctx ends, from when it has the lock. It then ends those that have no client, within
// atMost; the others stay as they are, for the next supervisor.
func (s *Supervisor) Run(ctx context.Context, atMost time.Duration) {
	defer func() { filelock.Release(s.lock, s.opts.Lock) }()
	reconcile.Loop{}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		if s.lock != nil || s.takeLock() {
			s.read(ctx)
			s.pass(context.WithoutCancel(ctx)) // a daemon that is half started would have no limits
		}
		return lookEvery
	})
	if s.lock != nil {
		s.endAll(context.WithoutCancel(ctx), atMost)
	}
}

// takeLock reports whether it has the lock.
func (s *Supervisor) takeLock() bool {
	path := s.opts.Lock
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		s.lock, err = filelock.Take(path)
	}
	switch {
	case errors.Is(err, filelock.ErrHeld):
		s.logOnce("lock", path, func() {
			s.opts.Log.Info("another mps-daemon of this node runs the daemons, this one waits for its end", "lock", path)
		})
	case err != nil:
		s.logOnce("lock", err.Error(), func() { s.opts.Log.Warn("no daemon is started without the lock", "error", err) })
	}
	return s.lock != nil
}

// endAll ends the daemons that have no client.
func (s *Supervisor) endAll(ctx context.Context, atMost time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	for _, r := range s.records() {
		if err := s.end(ctx, r); err != nil {
			s.opts.Log.Warn("MPS control daemon is left running", "pool", r.Pool.Name, "reason", err)
		}
	}
	_ = os.Remove(filepath.Join(s.opts.StateDir, mps.RecordFolder)) // it has the records of daemons that are left
}

// read reads what the agents offer and have taken. A pool that several agents offer has one daemon.
func (s *Supervisor) read(ctx context.Context) {
	var missing []error
	unclear, late := false, map[string]bool{}
	for _, agent := range slices.Sorted(maps.Keys(s.opts.Offers)) {
		offer, err := s.opts.Offers[agent](ctx)
		if !errors.Is(err, ErrNoAgent) {
			s.ran[agent] = time.Now()
		}
		if err == nil {
			s.offered[agent] = offer
			continue
		}
		late[agent] = time.Since(s.ran[agent]) < takenAtMost
		_, answered := s.offered[agent]
		unclear = unclear || !answered && !errors.Is(err, ErrNoAgent)
		if answered || !errors.Is(err, ErrNoAgent) {
			missing = append(missing, fmt.Errorf("%s: %w", agent, err))
		}
	}
	if len(s.offered) == 0 && len(missing) == 0 {
		missing = append(missing, ErrNoAgent)
	}
	s.known = len(s.offered) > 0 && !unclear
	s.combine(late)
	if err := s.readTaken(); err != nil {
		missing = append(missing, err)
		s.known = s.known && s.taken != nil
	}
	if ctx.Err() == nil {
		s.logMissing(errors.Join(missing...))
	}
}

// combine finds the wanted pools and the GPUs with work in what the agents have offered. A late agent has not answered
// now: it may have given out any of its GPUs since.
func (s *Supervisor) combine(late map[string]bool) {
	s.wanted, s.held = map[string]Pool{}, map[gpu.DeviceID]bool{}
	for agent, offer := range s.offered {
		for _, p := range offer.Pools {
			if late[agent] {
				for _, d := range p.Devices {
					s.held[d.ID] = true
				}
			}
			if before, both := s.wanted[p.Name]; both {
				p = before.and(p)
			}
			s.wanted[p.Name] = p
		}
		for _, id := range offer.Held {
			s.held[id] = true
		}
	}
}

// readTaken reads which GPUs agents have taken.
func (s *Supervisor) readTaken() error {
	taken, err := s.opts.Taken()
	if err != nil {
		return fmt.Errorf("which GPUs are taken: %w", err)
	}
	s.taken = map[gpu.DeviceID]string{}
	maps.Copy(s.taken, taken)
	maps.DeleteFunc(s.taken, func(_ gpu.DeviceID, agent string) bool { return time.Since(s.ran[agent]) > takenAtMost })
	return nil
}

// logMissing logs why the pools of an agent are unknown, and that they are known again.
func (s *Supervisor) logMissing(err error) {
	switch {
	case err != nil:
		s.logOnce("pools", err.Error(), func() {
			s.opts.Log.Warn("the pools of an agent are unknown: their daemons stay as they are", "error", err)
		})
	case s.logged["pools"] != "":
		s.opts.Log.Info("the pools are known again")
		delete(s.logged, "pools")
	}
}

// logOnce logs what is about something, unless it is the same as before.
func (s *Supervisor) logOnce(about, text string, log func()) {
	if s.logged[about] != text {
		s.logged[about] = text
		log()
	}
}
