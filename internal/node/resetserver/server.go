package resetserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/util/httpserver"
)

const (
	requestTimeout = 5 * time.Second
	maxRequest     = 4 << 10 // bytes
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
	Log      *slog.Logger

	running sync.Mutex // held for a reset, and to restore a persistence mode
}

// Run serves the socket until ctx ends, and the reset that runs then.
func (s *Server) Run(ctx context.Context) {
	path := Path(s.StateDir)
	socket := httpserver.Socket{
		Path: path, Handler: s.handler(), ReadTimeout: requestTimeout, WriteTimeout: StopWithin, StopWithin: StopWithin, Log: s.Log,
		Served: func() { s.Log.Info("listening", "socket", path) },
		Failed: func(err error) { s.Log.Warn("socket unavailable, retrying", "socket", path, "error", err) },
	}
	if err := s.Resetter.Ready(ctx); err != nil { // the agents show it, too
		s.Log.Warn("GPUs can't be reset", "error", err)
	}
	socket.Run(ctx)
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+readyURL, s.handle(func(ctx context.Context, _ gpureset.Target, _ http.ResponseWriter) (a gpureset.Look, err error) {
		return a, s.Resetter.Ready(ctx)
	}))
	mux.HandleFunc("POST "+lookURL, s.handle(func(ctx context.Context, t gpureset.Target, _ http.ResponseWriter) (gpureset.Look, error) {
		return s.Resetter.Look(ctx, t)
	}))
	mux.HandleFunc("POST "+resetURL, s.handle(s.reset))
	mux.HandleFunc("POST "+restoreURL, s.handle(s.restore))
	return mux
}

// handle answers a request of root.
func (s *Server) handle(do func(context.Context, gpureset.Target, http.ResponseWriter) (gpureset.Look, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if peer, ok := httpserver.Peer(r.Context()); !ok || peer.Uid != 0 {
			s.Log.Warn("request refused: its process is not root", "uid", peer.Uid, "pid", peer.Pid)
			http.Error(w, "only root may reset GPUs", http.StatusForbidden)
			return
		}
		var t gpureset.Target
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest)).Decode(&t); err != nil {
			http.Error(w, "want a GPU as JSON: "+err.Error(), http.StatusBadRequest)
			return
		}
		if r.URL.Path != readyURL && !isUUID(t.GPU) {
			http.Error(w, fmt.Sprintf("%q is not the UUID of a whole GPU", t.GPU), http.StatusBadRequest)
			return
		}
		look, err := do(r.Context(), t, w)
		_ = json.NewEncoder(w).Encode(answer{Look: look, Errors: encode(err)}) // a client that has left does not read it
	}
}

// isUUID keeps all else from nvidia-smi, which takes lists, too.
func isUUID(id gpu.DeviceID) bool {
	rest, ok := strings.CutPrefix(string(id), "GPU-")
	return ok && rest != "" && !strings.ContainsFunc(rest, func(c rune) bool { return c != '-' && !unicode.IsLetter(c) && !unicode.IsDigit(c) })
}

// errBusy is why nothing is changed while a GPU is reset.
var errBusy = &gpureset.UnavailableError{Remedy: "try again after its end", Err: errors.New("a GPU of the node is reset")}

// restore turns a persistence mode on. An agent that was killed during a reset asks for that when it starts again, and the reset may go on: it would fail.
func (s *Server) restore(ctx context.Context, t gpureset.Target, _ http.ResponseWriter) (look gpureset.Look, err error) {
	if !s.running.TryLock() {
		return look, errBusy
	}
	defer s.running.Unlock()
	if err = s.Resetter.Restore(ctx, t.GPU); err != nil {
		s.Log.Warn("persistence mode not restored", "id", t.GPU, "error", err)
	} else {
		s.Log.Info("persistence mode restored", "id", t.GPU)
	}
	return look, err
}

// reset resets a GPU. A client that leaves does not cancel it.
func (s *Server) reset(ctx context.Context, t gpureset.Target, w http.ResponseWriter) (look gpureset.Look, err error) {
	if !s.running.TryLock() {
		return look, errBusy
	}
	defer s.running.Unlock()
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
