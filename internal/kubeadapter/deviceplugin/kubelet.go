package deviceplugin

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/pluginsocket"
	"github.com/tandem-gpu/tandem/internal/util/dirwatch"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// kubelet is the kubelet's plugin directory and its registration socket, which is replaced when the kubelet restarts.
type kubelet struct {
	dir        string
	socket     string // the registration socket; "" = serve without registration
	nonce      string // part of the names of the plugin's sockets, different in each process
	log        *slog.Logger
	changes    *watch.Value[struct{}]            // stored when a socket in dir may have changed
	newWatcher func() (*fsnotify.Watcher, error) // nil = fsnotify.NewWatcher
}

func newKubelet(dir, socket string, log *slog.Logger) *kubelet {
	return &kubelet{dir: filepath.Clean(dir), socket: socket, nonce: pluginsocket.Nonce(), log: log, changes: watch.NewValue(struct{}{})}
}

// watch stores to changes when a socket in the plugin directory may have changed, until ctx ends.
func (k *kubelet) watch(ctx context.Context, t timings, task *watchdog.Task) {
	defer task.Done()
	isSocket := func(name string) bool { // the kubelet also writes its checkpoint here after each list
		return filepath.Ext(name) == ".sock" || name == filepath.Base(k.socket)
	}
	dirwatch.Directory{
		Path: k.dir, Interval: t.pollInterval, PollInterval: t.pollIntervalNoEvents, Relevant: isSocket,
		Log: k.log.With("directory", k.dir), Task: task, NewWatcher: k.newWatcher,
	}.Watch(ctx, func() { k.changes.Store(struct{}{}) })
}

// waitForKubelet returns when the kubelet accepts connections, which is after it has removed all sockets in the directory.
// The file alone is not enough, because it remains when a kubelet is killed. The result is the socket before the connection
// attempt. waiting is called with the error of each failed attempt.
func (k *kubelet) waitForKubelet(ctx context.Context, waiting func(error)) (statefile.Identity, error) {
	var previous statefile.Identity
	var retry time.Duration
	for {
		_, changed := k.changes.LoadNext()
		id := statefile.IdentityOf(k.socket)
		err := pluginsocket.Accepts(ctx, k.socket)
		switch {
		case ctx.Err() != nil:
			return id, ctx.Err()
		case err == nil:
			if id == (statefile.Identity{}) { // created after the stat
				id = statefile.IdentityOf(k.socket)
			}
			return id, nil
		}
		waiting(err)
		// inotify reports bind(2). Until listen(2) the socket refuses connections, and there is no event for that.
		if retry = min(2*retry, time.Second); id != previous {
			previous, retry = id, time.Millisecond
		}
		var due <-chan time.Time
		if id != (statefile.Identity{}) {
			due = time.After(retry)
		}
		select {
		case <-changed:
		case <-due:
		case <-ctx.Done():
		}
	}
}

// waitRetry waits for d, or until the registration socket is another than previous: then it reports true.
func (k *kubelet) waitRetry(ctx context.Context, d time.Duration, previous statefile.Identity) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		_, changed := k.changes.LoadNext()
		if id := statefile.IdentityOf(k.socket); id != (statefile.Identity{}) && previous != (statefile.Identity{}) && id != previous {
			return true
		}
		select {
		case <-changed:
		case <-t.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// register calls Register for a plugin socket. The kubelet connects to that socket before it answers.
func (k *kubelet) register(ctx context.Context, resource, socket string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := pluginsocket.Dial(k.socket)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_, err = v1beta1.NewRegistrationClient(conn).Register(ctx, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: filepath.Base(socket), ResourceName: resource,
	})
	if err != nil {
		return &registerError{filepath.Base(socket), status.Convert(err)}
	}
	return nil
}

// registerError is the error of a Register call.
type registerError struct {
	socket string
	status *status.Status
}

func (e *registerError) Error() string { return "register " + e.socket + ": " + e.status.Message() }

// answered reports whether a failed Register is finished in the kubelet, too. One that was canceled here may still run there:
//
//	plugin    Register 1 ... canceled    Register 2 succeeds
//	kubelet                                                   1 fails: deletes the client of the resource (up to 1.36)
func answered(err error) bool {
	e, ok := errors.AsType[*registerError](err)
	return ok && e.status.Code() != codes.DeadlineExceeded && e.status.Code() != codes.Canceled
}

// socketPrefix begins the name of each plugin socket.
const socketPrefix = "tandem-"
