package limitserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/component"
	"github.com/tandem-gpu/tandem/internal/node/limits"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

const (
	driverWithin = 15 * time.Second // for the driver: to open it can take seconds where no process has a GPU open
	queueWithin  = 15 * time.Second // for the requests before: the driver is open once at a time
)

// StopWithin is how long a server may take to end after a signal: for the requests that it has.
const StopWithin = queueWithin + driverWithin + component.RequestTimeout

// Path returns the path of the socket in a state directory.
func Path(stateDir string) string { return filepath.Join(stateDir, "limits.sock") }

// Driver is the driver, open in this process. Its calls may hang.
type Driver interface {
	Snapshot() (gpu.Snapshot, error)
	LimitsUnsupported() string // why the driver has no limits, after Snapshot; "" = it may have them
	SetMemoryLimit(gpu.LimitChange) error
	MemoryLimits([]gpu.LimitQuery) ([]gpu.LimitAnswer, error)
	Close() error // an error means that a call is still in the driver
}

// Server answers the requests of the agents of a node. Its fields must not change while it is used.
type Server struct {
	StateDir string // of the agents
	Groups   cgroup.FS
	Open     func() (Driver, error)
	Log      *slog.Logger

	DriverWithin time.Duration // for the driver to open, set and close; 0 = 15 s

	turn chan struct{} // capacity 1: the driver is open
}

// ErrHung is that a call of the driver has not returned.
var ErrHung = errors.New("the driver has not answered in time")

// Run serves the socket until ctx ends, and the requests that it has then. It fails with ErrHung if a call of the driver has not returned: then the process is to
// end, and to be started again.
func (s *Server) Run(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	if err := s.Groups.Check(); err != nil { // the agents show it, too
		s.Log.Warn("no limits can be set", "error", err)
	}
	s.turn = make(chan struct{}, 1)
	if err := s.serve(s.endTry); errors.Is(err, ErrHung) {
		return err
	} else if err != nil { // the next try takes it
		s.Log.Warn("the limit of a try that was cut off is not ended", "error", err)
	}
	component.Run(ctx, Path(s.StateDir), s.handler(end), StopWithin, s.Log)
	if err := context.Cause(ctx); errors.Is(err, ErrHung) {
		return err
	}
	return nil
}

func (s *Server) handler(end context.CancelCauseFunc) http.Handler {
	const only = "only root may set limits"
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+readyURL, component.Handle(s.Log, only, nil, func(context.Context, request, http.ResponseWriter) any {
		return answer{encode(s.Groups.Check())}
	}))
	done := func(err error, log *slog.Logger, made, not string) answer {
		if err != nil {
			log.Warn(not, "error", err)
		} else {
			log.Info(made)
		}
		if errors.Is(err, ErrHung) {
			end(err)
		}
		return answer{encode(err)}
	}
	mux.HandleFunc("POST "+setURL, component.Handle(s.Log, only, request.check, func(_ context.Context, r request, _ http.ResponseWriter) any {
		err := s.serve(func() error { return s.set(r) })
		return done(err, s.Log.With("group", r.Group, "id", r.GPU, "hard", r.Hard, "soft", r.Soft), "limit set", "limit not set")
	}))
	mux.HandleFunc("POST "+tryURL, component.Handle(s.Log, only, request.checkTry, func(_ context.Context, r request, _ http.ResponseWriter) any {
		err := s.serve(func() error { return s.try(r.GPU) })
		return done(err, s.Log.With("id", r.GPU), "limits can be set: tried on an empty group", "limits can't be set: tried on an empty group")
	}))
	return mux
}

// serve does something with the driver when it is its turn, also if the agent that sent the request has ended.
func (s *Server) serve(do func() error) error {
	select {
	case s.turn <- struct{}{}:
	case <-time.After(queueWithin):
		return &UnavailableError{"try again", errors.New("other requests have the driver")}
	}
	within := s.DriverWithin
	if within == 0 {
		within = driverWithin
	}
	ended := make(chan error, 1)
	go func() { // abandoned if the driver hangs, with its turn
		ended <- do()
		<-s.turn
	}()
	select {
	case err := <-ended:
		return err
	case <-time.After(within):
		return fmt.Errorf("%w (%v): whether the limit is set is not known", ErrHung, within)
	}
}

// set sets a limit. The group is looked at last, right before the call.
func (s *Server) set(r request) error {
	if err := s.checkGroup(r); err != nil { // before the driver is opened for nothing
		return err
	}
	return s.withDriver(func(d Driver, snapshot gpu.Snapshot) error {
		if why := d.LimitsUnsupported(); why != "" {
			return unsupported(why)
		}
		if err := checkGPU(r, snapshot); err != nil {
			return err
		}
		if err := s.checkGroup(r); err != nil {
			return err
		}
		return d.SetMemoryLimit(gpu.LimitChange{LimitQuery: gpu.LimitQuery{GPU: r.GPU, Group: s.Groups.Path(r.Group)}, Soft: r.Soft, Hard: r.Hard})
	})
}

// try tries whether a limit can be set on a GPU.
func (s *Server) try(id gpu.DeviceID) error {
	if err := s.checkMount(); err != nil {
		return err
	}
	b := limits.Backend(s.Groups)
	if b == limit.NoBackend {
		return unsupported(limit.WithoutBackend)
	}
	return s.withDriver(func(d Driver, snapshot gpu.Snapshot) error {
		if why := d.LimitsUnsupported(); why != "" {
			return unsupported(why)
		}
		if err := checkGPU(request{GPU: id}, snapshot); err != nil {
			return err
		}
		return limits.Try(s.Groups, limits.ServerTry, b, id, d.SetMemoryLimit, d.MemoryLimits)
	})
}

// endTry ends what a try of a server before this one has left.
func (s *Server) endTry() error {
	if err := s.Groups.Check(); err != nil || !limits.LeftTry(s.Groups, limits.ServerTry) {
		return nil //nolint:nilerr // without control groups none is left
	}
	return s.withDriver(func(d Driver, snapshot gpu.Snapshot) error {
		var ids []gpu.DeviceID
		for _, one := range snapshot.Devices {
			if one.At == gpu.WholeGPU(one.ID) {
				ids = append(ids, one.ID)
			}
		}
		return limits.EndTry(s.Groups, limits.ServerTry, ids, d.SetMemoryLimit, d.MemoryLimits)
	})
}

func unsupported(why string) error {
	return &UnavailableError{"install a driver with limits, or remove them from the policy", errors.New(why)}
}

// withDriver opens the driver for a function, and closes it.
func (s *Server) withDriver(do func(Driver, gpu.Snapshot) error) (err error) {
	if err := s.mayOpen(); err != nil {
		return err
	}
	d, err := s.Open()
	if err != nil {
		return &UnavailableError{"see the agent's doctor", fmt.Errorf("the driver can't be opened: %w", err)}
	}
	defer func() {
		if left := d.Close(); left != nil { // a call is still in the driver
			err = fmt.Errorf("%w: %w: whether the limit is set is not known", ErrHung, errors.Join(left, err))
		}
	}()
	snapshot, err := d.Snapshot()
	if err != nil {
		return err
	}
	return do(d, snapshot)
}

// mayOpen returns why the driver must not be opened: it is released for a reset, and a process that has it open would be in the way.
func (s *Server) mayOpen() error {
	f, err := ownership.Read(s.StateDir)
	if err != nil {
		return fmt.Errorf("whether the driver is released for a reset is not known: %w", err)
	}
	for id, mark := range f.Taken {
		if mark.DriverReleased {
			return &UnavailableError{"try again after the reset", fmt.Errorf("the driver is released for the reset of %s", id)}
		}
	}
	return nil
}
