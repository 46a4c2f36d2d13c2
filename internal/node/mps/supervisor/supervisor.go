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
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
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

// Options configure a Supervisor.
type Options struct {
	Root  string   // folder of the daemons, as this process sees it
	Locks []string // files that one supervisor can lock: another one waits. All lock them in the same order

	// Pools has for each agent of the node a function that returns which of its pools need a daemon now. With an error those of before still do;
	// ErrNoAgent means that there may be no such agent.
	Pools map[string]func(context.Context) ([]Pool, error)
	Log   *slog.Logger
}

// ErrNoAgent is the error of the pools of an agent that does not run.
var ErrNoAgent = errors.New("no agent runs")

// Supervisor keeps a daemon running for each pool. A daemon is ended, because its pool is gone or has other settings, when it has no client
// left; one that runs without a record is another program's, and is left alone. Make one with New, then call Run once.
type Supervisor struct {
	opts    Options
	locks   map[string]*os.File // that it holds, by path
	offered map[string][]Pool   // by agent: what it has answered last
	known   bool                // every agent that runs has answered, and there is one
	wanted  map[string]Pool     // by name
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
	Pool Pool `json:"pool"`
}

// New returns a supervisor. It reads and starts nothing yet.
func New(o Options) *Supervisor {
	return &Supervisor{opts: o, locks: map[string]*os.File{}, offered: map[string][]Pool{}, retry: map[string]*attempt{}, logged: map[string]string{}}
}

// Run supervises the daemons until ctx ends, from when it has the locks. It then ends those that have no client, within atMost; the others stay
// as they are, for the next supervisor.
func (s *Supervisor) Run(ctx context.Context, atMost time.Duration) {
	defer func() {
		for path, f := range s.locks {
			filelock.Release(f, path)
		}
	}()
	locked := false
	reconcile.Loop{}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		if locked = locked || s.lock(); locked {
			s.read(ctx)
			s.pass(context.WithoutCancel(ctx)) // a daemon that is half started would have no limits
		}
		return lookEvery
	})
	if locked {
		s.endAll(context.WithoutCancel(ctx), atMost)
	}
}

// lock takes the locks that it does not hold so far, and reports whether it has all.
func (s *Supervisor) lock() bool {
	for _, path := range s.opts.Locks {
		if s.locks[path] != nil {
			continue
		}
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			s.locks[path], err = filelock.Take(path)
		}
		if errors.Is(err, filelock.ErrHeld) {
			s.logOnce("lock", path, func() {
				s.opts.Log.Info("another mps-daemon of this node runs the daemons, this one waits for its end", "lock", path)
			})
			return false
		}
		if err != nil {
			s.logOnce("lock", err.Error(), func() { s.opts.Log.Warn("no daemon is started without the lock", "error", err) })
			return false
		}
	}
	return true
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
}

// read reads which pools need a daemon. A pool that several agents offer has one daemon.
func (s *Supervisor) read(ctx context.Context) {
	var missing []error
	unclear := false
	for _, agent := range slices.Sorted(maps.Keys(s.opts.Pools)) {
		pools, err := s.opts.Pools[agent](ctx)
		if err == nil {
			s.offered[agent] = pools
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
	s.wanted = map[string]Pool{}
	for _, p := range slices.Concat(slices.Collect(maps.Values(s.offered))...) {
		if before, both := s.wanted[p.Name]; both {
			p = before.and(p)
		}
		s.wanted[p.Name] = p
	}
	if ctx.Err() == nil {
		s.logMissing(errors.Join(missing...))
	}
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

// pass ends the daemons that are not wanted as they are, and then starts those that are missing: a GPU has one MPS server.
func (s *Supervisor) pass(ctx context.Context) {
	if !s.known {
		return
	}
	for name, r := range s.records() {
		want, ok := s.wanted[name]
		stays := ok && want.equal(r.Pool)
		r = s.mark(r, stays)
		if unlimited := r.State == mps.Starting && s.folders(name).check() == nil; unlimited || !stays {
			s.try(name, func() error { return s.end(ctx, r) })
		}
	}
	records := s.records()
	for _, name := range slices.Sorted(maps.Keys(s.wanted)) {
		if s.folders(name).check() != nil {
			s.try(name, func() error { return s.start(ctx, s.wanted[name], records) })
			continue
		}
		if r, own := records[name]; !own || r.PID != s.folders(name).pid() {
			s.logOnce(name, "foreign", func() {
				s.opts.Log.Info("MPS control daemon was started by another program, and is left to it", "pool", name)
			})
		}
	}
}

// mark records whether a daemon stays as it is. From when it does not, the agents give its GPUs no work, so that its clients become fewer.
func (s *Supervisor) mark(r record, stays bool) record {
	state := mps.Ending
	if stays {
		state = mps.Ready
	}
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
	if time.Now().Before(a.next) {
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
	if err := errors.Join(os.MkdirAll(f.pipe, 0o755), os.MkdirAll(f.log, 0o755), labelForContainers(f.pipe)); err != nil {
		return err
	}
	// Before the daemon: whatever follows, it is known whose GPUs have another compute mode.
	r := record{mps.Record{State: mps.Starting}, p}
	if err := s.write(r); err != nil {
		return err
	}
	if err := setComputeMode(ctx, p.Devices, modeExclusive); err != nil {
		return err
	}
	if err := f.startDaemon(ctx, p.Devices); err != nil {
		return err
	}
	r.PID = f.pid()
	if err := errors.Join(s.write(r), f.limit(ctx, p)); err != nil { // without limits it would give a client all of a GPU
		return errors.Join(err, f.abort(ctx))
	}
	s.opts.Log.Info("MPS control daemon started", "pool", p.Name, "gpus", joinIDs(p.Devices), "threads", p.Threads, "folder", f.pipe)
	r.State = mps.Ready
	return s.write(r)
}

// end ends a daemon that has no client, gives its GPUs back the compute mode that they have by default, and removes the record.
func (s *Supervisor) end(ctx context.Context, r record) error {
	f := s.folders(r.Pool.Name)
	if f.check() == nil {
		if r.PID != f.pid() { // it has taken the place of ours
			return os.Remove(s.recordPath(r.Pool.Name))
		}
		switch n, err := f.clients(ctx); {
		case err != nil:
			return err
		case n > 0:
			return &waitError{fmt.Sprintf("its clients have not ended: %d", n)}
		}
		if _, err := f.command(ctx, "quit"); err != nil {
			return err
		}
		if err := f.awaitEnd(ctx); err != nil {
			return err
		}
		s.opts.Log.Info("MPS control daemon ended", "pool", r.Pool.Name)
	}
	if err := setComputeMode(ctx, r.Pool.Devices, modeDefault); err != nil {
		s.opts.Log.Warn("the GPUs of a pool without a daemon keep their compute mode", "pool", r.Pool.Name, "error", err)
	}
	return os.Remove(s.recordPath(r.Pool.Name))
}

// awaitEnd waits until a daemon that was told to quit has ended.
func (f folders) awaitEnd(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, quitAtMost)
	defer cancel()
	for f.check() == nil {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return &waitError{"it was told to quit, and has not ended"}
		}
	}
	return nil
}

// records returns the records by pool.
func (s *Supervisor) records() map[string]record {
	records := map[string]record{}
	entries, _ := os.ReadDir(s.folder("")) // without the folder there are none
	for _, e := range entries {
		text, err := statefile.Read(s.recordPath(e.Name()), mps.RecordLimit, statefile.SharedDir)
		if err != nil {
			continue
		}
		var r record
		if json.Unmarshal(text, &r) == nil && r.Pool.Name == e.Name() {
			records[r.Pool.Name] = r
		}
	}
	return records
}

func (s *Supervisor) write(r record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return statefile.Write(s.recordPath(r.Pool.Name), text)
}

// folder is that of a pool, in the layout of NVIDIA's mps-control-daemon; "" = the parent of all.
func (s *Supervisor) folder(pool string) string {
	return filepath.Join(s.opts.Root, inventory.ResourceDomain, pool)
}

func (s *Supervisor) recordPath(pool string) string {
	return filepath.Join(s.folder(pool), mps.RecordName)
}

func (f folders) pid() string { return mps.PID(f.pipe) }

func (s *Supervisor) folders(pool string) folders {
	return folders{pipe: mps.Pipe(s.opts.Root, pool), log: filepath.Join(s.folder(pool), "log")}
}

// logOnce logs what is about something, unless it is the same as before.
func (s *Supervisor) logOnce(about, text string, log func()) {
	if s.logged[about] != text {
		s.logged[about] = text
		log()
	}
}
