// Package component has what the components of a node have in common. A component is a process that does for the agents of a node one thing for which they have no
// rights, as on Kubernetes: it has these rights, and the agents keep none.
//
//	agent                                     component, root on the node
//	Call --- POST, JSON --- socket in the state directory --- Run --- Handle
//
// Only root can connect to the socket, and Handle checks it for each connection. A component trusts the agents in nothing else.
package component

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"
	"unicode"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/httpserver"
)

// RequestTimeout is how long a client may take to send its request.
const RequestTimeout = 5 * time.Second

const maxRequest = 4 << 10 // bytes

// Run serves a socket until ctx ends, and then the requests in progress, for at most stopWithin.
func Run(ctx context.Context, path string, h http.Handler, stopWithin time.Duration, log *slog.Logger) {
	socket := httpserver.Socket{
		Path: path, Handler: h, ReadTimeout: RequestTimeout, WriteTimeout: stopWithin, StopWithin: stopWithin, Log: log,
		Served: func() { log.Info("listening", "socket", path) },
		Failed: func(err error) { log.Warn("socket unavailable, retrying", "socket", path, "error", err) },
	}
	socket.Run(ctx)
}

// Handle returns what answers requests of root, each of which is a Q. A request that check refuses is not served; a nil check refuses none. only is the answer
// to all other users: "only root may reset GPUs".
func Handle[Q any](log *slog.Logger, only string, check func(Q) error, do func(context.Context, Q, http.ResponseWriter) any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if peer, ok := httpserver.Peer(r.Context()); !ok || peer.Uid != 0 {
			log.Warn("request refused: its process is not root", "uid", peer.Uid, "pid", peer.Pid)
			http.Error(w, only, http.StatusForbidden)
			return
		}
		var q Q
		err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest)).Decode(&q)
		if err != nil {
			err = fmt.Errorf("want the request as JSON: %w", err)
		} else if check != nil {
			err = check(q)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		_ = json.NewEncoder(w).Encode(do(r.Context(), q, w)) // a client that has left does not read it
	}
}

// CheckGPU returns an error for what is not the UUID of one whole GPU.
func CheckGPU(id gpu.DeviceID) error {
	rest, ok := strings.CutPrefix(string(id), "GPU-")
	if !ok || rest == "" || strings.ContainsFunc(rest, func(c rune) bool { return c != '-' && !unicode.IsLetter(c) && !unicode.IsDigit(c) }) {
		return fmt.Errorf("%q is not the UUID of a whole GPU", id)
	}
	return nil
}
