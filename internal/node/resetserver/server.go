package resetserver

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/component"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// StopWithin is how long a server may take to end after a signal: for the reset that runs.
const StopWithin = atMost + 5*time.Second

// atMost is for how long a reset is answered.
const atMost = gpureset.LookAtMost + gpureset.AtMost

// Path returns the path of the socket in a state directory.
func Path(stateDir string) string { return filepath.Join(stateDir, "reset.sock") }

// Server answers the requests of the agents of a node. Its fields must not change while it is used.
type Server struct {
	StateDir string // of the agents
	Resetter gpureset.Resetter
	Lock     *gpureset.Lock // that of Resetter; nil = none
	Log      *slog.Logger

	running sync.Mutex // held for a reset, and to restore a persistence mode
}

// Run serves the socket until ctx ends, and the reset that runs then.
func (s *Server) Run(ctx context.Context) {
	if err := s.Resetter.Ready(ctx); err != nil { // the agents show it, too
		s.Log.Warn("GPUs can't be reset", "error", err)
	}
	component.Run(ctx, Path(s.StateDir), s.handler(), StopWithin, s.Log)
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	handle := func(url string, check func(gpureset.Target) error, do func(context.Context, gpureset.Target, http.ResponseWriter) (gpureset.Look, error)) {
		mux.HandleFunc("POST "+url, component.Handle(s.Log, "only root may reset GPUs", check, func(ctx context.Context, t gpureset.Target, w http.ResponseWriter) any {
			look, err := do(ctx, t, w)
			return answer{Look: look, Errors: encode(err)}
		}))
	}
	whole := func(t gpureset.Target) error { return component.CheckGPU(t.GPU) } // nvidia-smi takes lists, too
	handle(readyURL, nil, func(ctx context.Context, _ gpureset.Target, _ http.ResponseWriter) (gpureset.Look, error) {
		return gpureset.Look{}, s.Resetter.Ready(ctx)
	})
	handle(lookURL, whole, func(ctx context.Context, t gpureset.Target, _ http.ResponseWriter) (gpureset.Look, error) {
		return s.Resetter.Look(ctx, t)
	})
	handle(resetURL, whole, s.reset)
	handle(restoreURL, whole, s.restore)
	return mux
}

// begin keeps other requests, and other processes of the node, from touching a GPU until end is called. A request whose
// agent was killed is found out by them: they see the lock before the file of the node is read.
func (s *Server) begin(ctx context.Context) (end func(), err error) {
	if !s.running.TryLock() {
		return nil, &gpureset.BusyError{}
	}
	release, err := s.Lock.Hold(ctx)
	if err != nil {
		s.running.Unlock()
		return nil, err
	}
	return func() { release(); s.running.Unlock() }, nil
}

// restore turns a persistence mode on. An agent that was killed during a reset asks for that when it starts again, and the reset may go on: it would fail.
func (s *Server) restore(ctx context.Context, t gpureset.Target, _ http.ResponseWriter) (look gpureset.Look, err error) {
	end, err := s.begin(ctx)
	if err != nil {
		return look, err
	}
	defer end()
	if err = s.Resetter.Restore(ctx, t.GPU); err != nil {
		s.Log.Warn("persistence mode not restored", "id", t.GPU, "error", err)
	} else {
		s.Log.Info("persistence mode restored", "id", t.GPU)
	}
	return look, err
}

// reset resets a GPU. A client that leaves does not cancel it.
func (s *Server) reset(ctx context.Context, t gpureset.Target, w http.ResponseWriter) (look gpureset.Look, err error) {
	end, err := s.begin(ctx)
	if err != nil {
		return look, err
	}
	defer end()
	ctx = context.WithoutCancel(ctx)
	log, began := s.Log.With("id", t.GPU), time.Now()
	if err = s.permitted(t.GPU); err == nil {
		look, err = s.Resetter.Look(ctx, t)
	}
	if err != nil || len(look.Clients) > 0 {
		log.Warn("GPU is not reset", "error", err, "open_in", look.Clients)
		if err == nil {
			err = &gpureset.InUseError{GPU: t.GPU, Clients: look.Clients}
		}
		return gpureset.Look{}, err
	}
	if look.Persistence {
		w.Header().Set(persistenceHeader, "on")
		if err := http.NewResponseController(w).Flush(); err != nil {
			return gpureset.Look{}, err // the client has left before the reset
		}
	}
	log.Info("GPU is reset", "persistence_mode", look.Persistence)
	if err = s.Resetter.Reset(ctx, t); err != nil {
		log.Warn("GPU was not reset, or not as it was to be", "took", time.Since(began), "error", strings.ReplaceAll(err.Error(), "\n", "; "))
	} else {
		log.Info("GPU was reset", "took", time.Since(began))
	}
	return gpureset.Look{}, err
}

// permitted returns why a GPU may not be reset: no agent has taken it for that.
func (s *Server) permitted(id gpu.DeviceID) error {
	f, err := ownership.Read(s.StateDir)
	if err != nil {
		return fmt.Errorf("whether an agent has taken the GPU is not known: %w", err)
	}
	if f.Taken[id].Purpose != inventory.Reset {
		return &gpureset.UnavailableError{
			Remedy: "agents and component need the same state directory, which is a folder of the node",
			Err:    fmt.Errorf("no agent has taken %s for a reset, by the file of the node in %s", id, s.StateDir),
		}
	}
	return nil
}
