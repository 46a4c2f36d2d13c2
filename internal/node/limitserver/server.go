package limitserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/component"
	"github.com/tandem-gpu/tandem/internal/node/limits"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	driverWithin = 15 * time.Second // for the driver: to open it can take seconds where no process has a GPU open
	queueWithin  = 15 * time.Second // for the requests before: the driver is open once at a time
)

// StopWithin is how long a server may take to end after a signal: for the requests that it has.
const StopWithin = queueWithin + driverWithin + component.RequestTimeout

// Path returns the path of the socket in a state directory.
func Path(stateDir string) string { return filepath.Join(stateDir, "limits.sock") }

// closeEvery is between attempts to close the driver while a call has not returned.
const closeEvery = time.Second

// Driver is the driver, open in this process. A call about one GPU that hangs is given up, and is an error; others may hang.
type Driver interface {
	Snapshot() (gpu.Snapshot, error)
	ReadGPU(gpu.DeviceID) (gpu.Device, error) // before the calls about limits of the GPU; it makes no call about another
	LimitsUnsupported() string                // why the driver has no limits, after one of these; "" = it may have them
	SetMemoryLimit(gpu.LimitChange) error
	MemoryLimits([]gpu.LimitQuery) ([]gpu.LimitAnswer, error)
	Close() error // an error means that a call is still in the driver, which stays open until another Close
}

// Server answers the requests of the agents of a node. Its fields must not change while it is used.
type Server struct {
	StateDir string // of the agents
	Groups   cgroup.FS
	Open     func() (Driver, error)
	Log      *slog.Logger

	DriverWithin time.Duration // for the driver to open, set and close; 0 = 15 s

	turn  chan struct{} // capacity 1: the driver is in use
	left  Driver        // that could not be closed; of the one who has the turn
	stuck chan struct{} // capacity 1: left is another one
}

// ErrHung is that a call of the driver has not returned.
var ErrHung = errors.New("the driver has not answered in time")

// Run serves the socket until ctx ends, and the requests that it has then. It fails with ErrHung if the driver as a whole does not answer, or if a call that has not
// returned is in the way of a reset: then the process is to end, and to be started again.
func (s *Server) Run(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	if err := s.Groups.Check(); err != nil { // the agents show it, too
		s.Log.Warn("no limits can be set", "error", err)
	}
	s.turn, s.stuck = make(chan struct{}, 1), make(chan struct{}, 1)
	if err := s.serve(request{}.until(), s.endTry); errors.Is(err, ErrHung) {
		return err
	} else if err != nil { // the next try takes it
		s.Log.Warn("the limit of a try that was cut off is not ended", "error", err)
	}
	var closing sync.WaitGroup
	closing.Go(func() { s.closeLeft(ctx, end) })
	defer closing.Wait()
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
		return answer{encode(s.checkMount())}
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
		until := r.until()
		err := s.serve(until, func() error { return s.set(r, until) })
		return done(err, s.Log.With("group", r.Group, "id", r.GPU, "hard", r.Hard, "soft", r.Soft), "limit set", "limit not set")
	}))
	mux.HandleFunc("POST "+tryURL, component.Handle(s.Log, only, request.checkTry, func(_ context.Context, r request, _ http.ResponseWriter) any {
		until := r.until()
		err := s.serve(until, func() error { return s.try(r.GPU, until) })
		return done(err, s.Log.With("id", r.GPU), "limits can be set: tried on an empty group", "limits can't be set: tried on an empty group")
	}))
	return mux
}

// serve does something with the driver when it is its turn, if that is in time.
func (s *Server) serve(until time.Time, do func() error) error {
	select {
	case s.turn <- struct{}{}:
	case <-time.After(min(queueWithin, time.Until(until))):
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

// set sets a limit. The group and the clock are looked at last, right before the call.
func (s *Server) set(r request, until time.Time) error {
	if err := s.checkGroup(r); err != nil { // before the driver is opened for nothing
		return err
	}
	return s.withGPU(r, until, func(d Driver) error {
		if err := s.checkGroup(r); err != nil {
			return err
		}
		return d.SetMemoryLimit(gpu.LimitChange{LimitQuery: gpu.LimitQuery{GPU: r.GPU, Group: s.Groups.Path(r.Group)}, Soft: r.Soft, Hard: r.Hard})
	})
}

// try tries whether a limit can be set on a GPU.
func (s *Server) try(id gpu.DeviceID, until time.Time) error {
	if err := s.checkMount(); err != nil {
		return err
	}
	b, err := limits.Backend(s.Groups)
	if err != nil {
		return err
	}
	if b == limit.NoBackend {
		return unsupported(limit.WithoutBackend)
	}
	return s.withGPU(request{GPU: id}, until, func(d Driver) error {
		return limits.Try(s.Groups, limits.ServerTry, b, id, d.SetMemoryLimit, d.MemoryLimits)
	})
}

// endTry ends what a try of a server before this one has left, on the GPUs that answer.
func (s *Server) endTry() error {
	if err := s.Groups.Check(); err != nil || !limits.LeftTry(s.Groups, limits.ServerTry) {
		return nil //nolint:nilerr // without control groups none is left
	}
	return s.withDriver(func(d Driver) error {
		snapshot, err := d.Snapshot()
		if err != nil {
			return err
		}
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

// withGPU opens the driver for a function, if the GPU of a request can have the limit and it is not too late.
func (s *Server) withGPU(r request, until time.Time, do func(Driver) error) error {
	return s.withDriver(func(d Driver) error {
		device, err := d.ReadGPU(r.GPU)
		if why := d.LimitsUnsupported(); why != "" {
			return unsupported(why)
		}
		if err != nil {
			return fmt.Errorf("%s can't be read: %w", r.GPU, err)
		}
		if err := checkGPU(r, device); err != nil {
			return err
		}
		if time.Now().After(until) {
			return &UnavailableError{"try again", errors.New("the driver was not open in time")}
		}
		return do(d)
	})
}

// withDriver opens the driver for a function, and closes it. If it can't be closed, because a call about a GPU has not returned, it stays open for the time being:
// calls about other GPUs are made as before.
func (s *Server) withDriver(do func(Driver) error) error {
	if err := s.mayOpen(); err != nil {
		return err
	}
	d, err := s.Open()
	if err != nil {
		return &UnavailableError{"see the agent's doctor", fmt.Errorf("the driver can't be opened: %w", err)}
	}
	defer func() {
		if d.Close() != nil {
			s.left = d
			watch.Notify(s.stuck)
		}
	}()
	return do(d)
}

// closeLeft closes what a request could not close, as soon as the call has returned, until ctx ends. While the driver is released for a reset the process is in the
// way, and ends.
func (s *Server) closeLeft(ctx context.Context, end context.CancelCauseFunc) {
	for {
		select {
		case <-s.stuck:
		case <-ctx.Done():
			return
		}
		for closed := false; !closed && watch.Sleep(ctx, closeEvery); {
			select {
			case s.turn <- struct{}{}:
			case <-ctx.Done():
				return
			}
			closed = s.left.Close() == nil // the latest session, which closes those before it, too
			<-s.turn
			if _, released := errors.AsType[*UnavailableError](s.mayOpen()); released && !closed {
				end(fmt.Errorf("%w, and is to be reset", ErrHung))
			}
		}
	}
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
