package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// record is the file of a pool with what its daemon was started with.
type record struct {
	mps.Record
	Process process `json:"process"` // of the daemon; zero = it is not known yet
	Pool    Pool    `json:"pool"`
}

// start starts the daemon of a pool, as NVIDIA's mps-control-daemon does, and records it.
func (s *Supervisor) start(ctx context.Context, p Pool, records map[string]record) error {
	for name, r := range records {
		if name != p.Name && r.Pool.overlaps(p) {
			return &waitError{text: fmt.Sprintf("a GPU of the pool still has the daemon of pool %s", name)}
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
	if err := s.setComputeMode(ctx, p.Devices, modeExclusive); err != nil {
		return err
	}
	if err := f.startDaemon(ctx, p.Devices); err != nil {
		return err
	}
	if err := s.setUp(ctx, &r); err != nil { // without limits it would give a client all of a GPU
		return errors.Join(err, f.abort(ctx, r.Process))
	}
	s.opts.Log.Info("MPS control daemon started",
		"pool", p.Name, "gpus", joinIDs(p.Devices), "threads", p.Threads, "folder", f.pipe)
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

// end ends a daemon that has no client, gives its GPUs back the compute mode that they have by default, and removes the
// record.
func (s *Supervisor) end(ctx context.Context, r record) error {
	f := s.folders(r.Pool.Name)
	at := s.look(r.Pool.Name, r, true)
	switch at {
	case serving:
		switch n, err := f.clients(ctx); {
		case err != nil:
			return err
		case n > 0:
			return &waitError{text: fmt.Sprintf("its clients have not ended: %d", n)}
		}
		if _, err := f.command(ctx, "quit"); err != nil {
			return err
		}
	case unreachable: // nothing is known of its clients
		if held := s.heldOf(r.Pool); held != "" {
			const why = "its control socket is gone or another one, so no client finds it, and work may have "
			return &waitError{text: why + string(held)}
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
	err := s.setComputeMode(ctx, r.Pool.Devices, modeDefault)
	if held, ok := errors.AsType[*heldError](err); ok {
		return held
	}
	if err != nil {
		s.opts.Log.Warn("the GPUs of a pool without a daemon keep their compute mode", "pool", r.Pool.Name, "error", err)
	}
	// Else another process that has taken its place would be another program's daemon.
	if err := f.removeControl(); err != nil {
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

// folders has the folders of a pool, in the layout of NVIDIA's mps-control-daemon.
func (s *Supervisor) folders(pool string) folders {
	pipe := mps.Pipe(s.opts.Root, pool)
	return folders{
		root: s.opts.Root, pipe: pipe, log: filepath.Join(filepath.Dir(pipe), "log"),
		printed: filepath.Join(s.opts.StateDir, mps.RecordFolder, pool+".log"),
	}
}
