// Package supervisor starts, restarts and ends MPS control daemons. No agent imports it: a daemon would inherit the files of a plugin, by whose end
// its orchestrator knows that the plugin has ended.
package supervisor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// Times of a Supervisor, which are not configurable.
const (
	lookEvery  = 2 * time.Second // for the pools, and for daemons that have ended: they cause no event
	retryFirst = time.Second     // before another attempt to start or end a daemon
	retryMost  = time.Minute
	quitAtMost = 10 * time.Second // for a daemon without clients to end

	// idleFor is for how long a daemon has no client and its GPUs have no work, while no work is added, before it is ended for a GPU that an
	// agent has taken: what was given out before is in the agents' reports by then.
	idleFor = 5 * time.Second

	// takenAtMost is for how long the GPU of an agent that does not run counts as taken: a reset goes on without it (gpureset.AtMost).
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

	// Offers has for each agent of the node a function that returns what it offers now. With an error that of before still counts; ErrNoAgent means
	// that there may be no such agent.
	Offers map[string]func(context.Context) (Offer, error)

	// Taken returns the GPUs that agents have taken from all APIs for a proof or a reset, with the agents. With an error those of before still are.
	Taken func() (map[gpu.DeviceID]string, error)
	Log   *slog.Logger
}

// ErrNoAgent is the error of the offer of an agent that does not run.
var ErrNoAgent = errors.New("no agent runs")

// Supervisor keeps a daemon running for each pool. A daemon is ended, because its pool is gone or has other settings, when it has no client
// left; and for as long as an agent has taken one of its GPUs, when no GPU of the pool has work either. One that runs without a record is
// another program's, and is left alone. Make one with New, then call Run once.
//
// What a daemon's clients can write decides nothing: its process and its control file are in the record.
type Supervisor struct {
	opts    Options
	lock    *os.File         // nil = it does not hold it
	offered map[string]Offer // by agent: what it has answered last
	known   bool             // every agent that runs has answered, and there is one
	wanted  map[string]Pool  // by name
	held    map[gpu.DeviceID]bool
	taken   map[gpu.DeviceID]string // with the agent
	ran     map[string]time.Time    // when an agent ran last
	idle    map[string]time.Time    // since when the daemon of a pool is idle and takes no clients
	idleFor time.Duration           // that of all but tests is the constant
	retry   map[string]*attempt
	logged  map[string]string // what was logged last, by what it is about
}

// attempt is when the daemon of a pool may be started or ended, after a failure or while it has clients.
type attempt struct {
	backoff *backoff.ExponentialBackOff
	next    time.Time
}

// record is the file in the folder of a pool with what its daemon was started with.
type record struct {
	mps.Record
	Process process `json:"process"` // of the daemon; zero = it is not known yet
	Pool    Pool    `json:"pool"`
}

// New returns a supervisor. It reads and starts nothing yet.
func New(o Options) *Supervisor {
	return &Supervisor{
		opts: o, offered: map[string]Offer{}, ran: map[string]time.Time{}, idle: map[string]time.Time{}, idleFor: idleFor,
		retry: map[string]*attempt{}, logged: map[string]string{},
	}
}

// Run supervises the daemons until ctx ends, from when it has the lock. It then ends those that have no client, within atMost; the others stay
// as they are, for the next supervisor.
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
	unclear := false
	for _, agent := range slices.Sorted(maps.Keys(s.opts.Offers)) {
		offer, err := s.opts.Offers[agent](ctx)
		if !errors.Is(err, ErrNoAgent) {
			s.ran[agent] = time.Now()
		}
		if err == nil {
			s.offered[agent] = offer
			continue
		}
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
	s.wanted, s.held = map[string]Pool{}, map[gpu.DeviceID]bool{}
	for _, offer := range s.offered {
		for _, p := range offer.Pools {
			if before, both := s.wanted[p.Name]; both {
				p = before.and(p)
			}
			s.wanted[p.Name] = p
		}
		for _, id := range offer.Held {
			s.held[id] = true
		}
	}
	if err := s.readTaken(); err != nil {
		missing = append(missing, err)
	}
	if ctx.Err() == nil {
		s.logMissing(errors.Join(missing...))
	}
}

// readTaken reads which GPUs agents have taken.
func (s *Supervisor) readTaken() error {
	taken, err := s.opts.Taken()
	if err != nil {
		return fmt.Errorf("which GPUs are taken: %w", err)
	}
	s.taken = maps.Clone(taken)
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

// presence is what is seen of the daemon of a pool.
type presence uint8

const (
	gone        presence = iota // none runs
	serving                     // ours serves its control file
	unreachable                 // ours runs, and its control file is gone or another one: no client finds it
	foreign                     // another program's serves its control file
)

// look looks for the daemon of a pool. One that has a record, and whose process has ended, is gone: what serves its control file then is not
// another program's daemon, which would have found ours running.
func (s *Supervisor) look(pool string, r record, recorded bool) presence {
	control, err := mps.FindControl(s.folders(pool).pipe)
	runs := recorded && r.Process.runs()
	switch {
	case runs && err == nil && control == r.Control:
		return serving
	case runs:
		return unreachable
	case !recorded && err == nil:
		return foreign
	}
	return gone
}

// pass ends the daemons that are not wanted as they are, and then starts those that are missing: a GPU has one MPS server.
func (s *Supervisor) pass(ctx context.Context) {
	if !s.known {
		return
	}
	for _, r := range s.records() {
		s.follow(ctx, r)
	}
	records := s.records()
	for _, name := range slices.Sorted(maps.Keys(s.wanted)) {
		r, recorded := records[name]
		switch s.look(name, r, recorded) {
		case gone:
			if s.takenOf(s.wanted[name]) == "" {
				s.try(name, func() error { return s.start(ctx, s.wanted[name], records) })
			}
		case foreign:
			s.logOnce(name, "foreign", func() {
				s.opts.Log.Info("MPS control daemon was started by another program, and is left to it", "pool", name)
			})
		case serving, unreachable:
		}
	}
}

// follow ends a daemon that is not wanted as it is.
func (s *Supervisor) follow(ctx context.Context, r record) {
	name := r.Pool.Name
	if r.State == mps.Starting && r.Process == (process{}) { // the one before ended while it started the daemon
		if r.Process, _ = findDaemon(s.folders(name).pipe); r.Process != (process{}) {
			r.Control, _ = mps.FindControl(s.folders(name).pipe)
		}
	}
	want, ok := s.wanted[name]
	stays := ok && want.equal(r.Pool)
	at, taken := s.look(name, r, true), s.takenOf(r.Pool)
	switch {
	case stays && at == serving && r.State != mps.Starting && taken != "":
		s.yield(ctx, r, taken)
	case stays && at == serving && r.State != mps.Starting:
		delete(s.idle, name)
		s.mark(r, mps.Ready)
	case stays && at == gone && taken == "": // it is started again
	default:
		r = s.mark(r, mps.Ending)
		s.try(name, func() error { return s.end(ctx, r) })
	}
}

// takenOf returns a GPU of a pool that an agent has taken; "" = there is none.
func (s *Supervisor) takenOf(p Pool) gpu.DeviceID {
	for _, d := range p.Devices {
		if _, taken := s.taken[d.ID]; taken {
			return d.ID
		}
	}
	return ""
}

// heldOf returns a GPU of a pool that work has, or may have while an agent has not answered; "" = there is none.
func (s *Supervisor) heldOf(p Pool) gpu.DeviceID {
	for _, d := range p.Devices {
		if s.held[d.ID] || !s.known {
			return d.ID
		}
	}
	return ""
}

// yield ends the daemon of a pool of which an agent has taken a GPU, when no work uses the daemon. Until then its pool takes work. Then the
// daemon takes no clients for idleFor, and is ended if it has none after that.
func (s *Supervisor) yield(ctx context.Context, r record, taken gpu.DeviceID) {
	name := r.Pool.Name
	held := s.heldOf(r.Pool)
	if held != "" || !s.due(name) {
		delete(s.idle, name)
		s.mark(r, mps.Ready)
		if held != "" {
			why := fmt.Sprintf("%s is taken for a proof or a reset, and work has %s of the same pool", taken, held)
			s.logOnce(name, why, func() { s.opts.Log.Info("MPS control daemon: waiting", "pool", name, "reason", why) })
		}
		return
	}
	if s.idle[name].IsZero() {
		s.idle[name] = time.Now()
	}
	r = s.mark(r, mps.Ending)
	if time.Since(s.idle[name]) < s.idleFor {
		return
	}
	s.try(name, func() error {
		err := s.end(ctx, r)
		if _, waits := errors.AsType[*waitError](err); waits && r.Process.runs() {
			delete(s.idle, name)
			s.mark(r, mps.Ready)
		}
		return err
	})
}

// mark records whether a daemon takes clients. From when it does not, the agents give its GPUs no work, so that its clients become fewer.
func (s *Supervisor) mark(r record, state mps.State) record {
	if r.State == state || r.State == mps.Starting {
		return r
	}
	r.State = state
	if err := s.write(r); err != nil {
		s.logOnce("record", err.Error(), func() { s.opts.Log.Warn("MPS control daemon: no record", "pool", r.Pool.Name, "error", err) })
	}
	return r
}

// try makes an attempt for a pool, if it is time, and logs each new reason for which it fails.
func (s *Supervisor) try(name string, do func() error) {
	a := s.retry[name]
	if a == nil {
		a = &attempt{backoff: backoff.NewExponentialBackOff()}
		a.backoff.InitialInterval, a.backoff.MaxInterval = retryFirst, retryMost
		s.retry[name] = a
	}
	if !s.due(name) {
		return
	}
	err := do()
	if err == nil {
		delete(s.retry, name)
		delete(s.logged, name)
		return
	}
	a.next = time.Now().Add(a.backoff.NextBackOff())
	s.logOnce(name, err.Error(), func() {
		if _, waits := errors.AsType[*waitError](err); waits {
			s.opts.Log.Info("MPS control daemon: waiting", "pool", name, "reason", err)
			return
		}
		s.opts.Log.Warn("MPS control daemon: failed, tried again", "pool", name, "error", err)
	})
}

// due reports whether it is time for an attempt for a pool.
func (s *Supervisor) due(name string) bool {
	a := s.retry[name]
	return a == nil || !time.Now().Before(a.next)
}

// waitError is why a daemon is not started or ended so far, which is no failure.
type waitError struct{ text string }

func (e *waitError) Error() string { return e.text }

// start starts the daemon of a pool, as NVIDIA's mps-control-daemon does, and records it.
func (s *Supervisor) start(ctx context.Context, p Pool, records map[string]record) error {
	for name, r := range records {
		if name != p.Name && r.Pool.overlaps(p) {
			return &waitError{fmt.Sprintf("a GPU of the pool still has the daemon of pool %s", name)}
		}
	}
	f := s.folders(p.Name)
	if err := f.create(); err != nil {
		return err
	}
	// Before the daemon: whatever follows, it is known whose GPUs have another compute mode.
	r := record{Record: mps.Record{State: mps.Starting}, Pool: p}
	if err := s.write(r); err != nil {
		return err
	}
	if err := setComputeMode(ctx, p.Devices, modeExclusive); err != nil {
		return err
	}
	if err := f.startDaemon(ctx, p.Devices); err != nil {
		return err
	}
	if err := s.setUp(ctx, &r); err != nil { // without limits it would give a client all of a GPU
		return errors.Join(err, f.abort(ctx, r.Process))
	}
	s.opts.Log.Info("MPS control daemon started", "pool", p.Name, "gpus", joinIDs(p.Devices), "threads", p.Threads, "folder", f.pipe)
	r.State = mps.Ready
	return s.write(r)
}

// setUp records which process and control file a daemon has that was just started, and sets its limits.
func (s *Supervisor) setUp(ctx context.Context, r *record) (err error) {
	f := s.folders(r.Pool.Name)
	found := false
	if r.Process, found = findDaemon(f.pipe); !found {
		return errNoProcess
	}
	if r.Control, err = mps.FindControl(f.pipe); err != nil {
		return err
	}
	if err := s.write(*r); err != nil {
		return err
	}
	return f.limit(ctx, r.Pool)
}

// end ends a daemon that has no client, gives its GPUs back the compute mode that they have by default, and removes the record.
func (s *Supervisor) end(ctx context.Context, r record) error {
	f := s.folders(r.Pool.Name)
	at := s.look(r.Pool.Name, r, true)
	switch at {
	case serving:
		switch n, err := f.clients(ctx); {
		case err != nil:
			return err
		case n > 0:
			return &waitError{fmt.Sprintf("its clients have not ended: %d", n)}
		}
		if _, err := f.command(ctx, "quit"); err != nil {
			return err
		}
	case unreachable: // nothing is known of its clients
		if held := s.heldOf(r.Pool); held != "" {
			return &waitError{fmt.Sprintf("its control socket is gone or another one, so no client finds it, and work has %s", held)}
		}
		if err := r.Process.signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
	case gone, foreign:
	}
	if err := r.Process.awaitEnd(ctx); err != nil {
		if at == unreachable {
			err = errors.Join(err, r.Process.signal(syscall.SIGKILL))
		}
		return err
	}
	if at != gone {
		s.opts.Log.Info("MPS control daemon ended", "pool", r.Pool.Name)
	}
	if err := setComputeMode(ctx, r.Pool.Devices, modeDefault); err != nil {
		s.opts.Log.Warn("the GPUs of a pool without a daemon keep their compute mode", "pool", r.Pool.Name, "error", err)
	}
	if err := f.removeControl(); err != nil { // else another process that has taken its place would be another program's daemon
		return err
	}
	delete(s.idle, r.Pool.Name)
	_ = os.Remove(f.printed)
	return os.Remove(mps.RecordPath(s.opts.StateDir, r.Pool.Name))
}

// records returns the records by pool.
func (s *Supervisor) records() map[string]record {
	records := map[string]record{}
	entries, _ := os.ReadDir(filepath.Join(s.opts.StateDir, mps.RecordFolder)) // without the folder there are none
	for _, e := range entries {
		pool, ok := strings.CutSuffix(e.Name(), mps.RecordSuffix)
		if !ok {
			continue
		}
		text, err := statefile.Read(mps.RecordPath(s.opts.StateDir, pool), mps.RecordLimit, statefile.SharedDir)
		if err != nil {
			continue
		}
		var r record
		if json.Unmarshal(text, &r) == nil && r.Pool.Name == pool {
			records[pool] = r
		}
	}
	return records
}

func (s *Supervisor) write(r record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return statefile.Write(mps.RecordPath(s.opts.StateDir, r.Pool.Name), text)
}

// folders are those of a pool, in the layout of NVIDIA's mps-control-daemon.
func (s *Supervisor) folders(pool string) folders {
	pipe := mps.Pipe(s.opts.Root, pool)
	return folders{
		root: s.opts.Root, pipe: pipe, log: filepath.Join(filepath.Dir(pipe), "log"),
		printed: filepath.Join(s.opts.StateDir, mps.RecordFolder, pool+".log"),
	}
}

// logOnce logs what is about something, unless it is the same as before.
func (s *Supervisor) logOnce(about, text string, log func()) {
	if s.logged[about] != text {
		s.logged[about] = text
		log()
	}
}
