package kubeadapter

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// kubelet is the other side: a folder that it owns and a socket in it that comes and goes.
type kubelet struct {
	dir    string
	socket string // "" = there is no kubelet to register with
	nonce  string // in the names of our sockets: an earlier process had another
	log    *slog.Logger
	bell   *bell // rung when something in dir may have changed
	events func() (*fsnotify.Watcher, error)
}

func newKubelet(dir, socket string, log *slog.Logger) *kubelet {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return &kubelet{
		dir: filepath.Clean(dir), socket: socket, nonce: hex.EncodeToString(b[:]), log: log, bell: newBell(), events: fsnotify.NewWatcher,
	}
}

// socketID tells one file under a name from the next one under it. Inode numbers are used again at
// once, so the time of making belongs to it. The zero value is "no file".
type socketID struct {
	dev, ino uint64
	made     syscall.Timespec
}

func identify(path string) socketID {
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return socketID{}
	}
	return socketID{st.Dev, st.Ino, st.Mtim}
}

// accepts returns when the kubelet accepts connections: then it has wiped the folder and not before. A
// file alone says nothing, as it outlives a kubelet that was killed. The result is the socket as it was
// before it was tried. waiting is told what is the matter.
func (k *kubelet) accepts(ctx context.Context, waiting func(error)) (socketID, error) {
	var last socketID
	var again time.Duration
	for {
		heard := k.bell.heard()
		now := identify(k.socket)
		err := knock(ctx, k.socket)
		switch {
		case ctx.Err() != nil:
			return now, ctx.Err()
		case err == nil && now == (socketID{}): // it came between the two
			return identify(k.socket), nil
		case err == nil:
			return now, nil
		}
		waiting(err)
		// A socket is bound, which is the file event, and then listens: between the two it refuses.
		if again = min(2*again, time.Second); now != last {
			last, again = now, time.Millisecond
		}
		var soon <-chan time.Time
		if now != (socketID{}) {
			soon = time.After(again)
		}
		select {
		case <-heard:
		case <-soon:
		case <-ctx.Done():
			return now, ctx.Err()
		}
	}
}

// knock reports whether anybody listens on a socket.
func knock(ctx context.Context, path string) error {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	return conn.Close()
}

// rest waits for d, or until another kubelet listens than the one whose socket was last; true if so.
func (k *kubelet) rest(ctx context.Context, d time.Duration, last socketID) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		heard := k.bell.heard()
		if now := identify(k.socket); now != (socketID{}) && last != (socketID{}) && now != last {
			return true
		}
		select {
		case <-heard:
		case <-t.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// register announces a socket. The kubelet calls back on it before it answers.
func (k *kubelet) register(ctx context.Context, resource, socket string, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn, err := dial(k.socket)
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

// registerError is a Register that failed.
type registerError struct {
	socket string
	status *status.Status
}

func (e *registerError) Error() string { return "register " + e.socket + ": " + e.status.Message() }

// answered reports whether a Register that failed is over on the kubelet's side too. One that was given up
// may still be under way there:
//
//	we       Register 1 ... give up    Register 2 ok
//	kubelet                                          1 fails: forgets the client of the resource (to 1.36)
func answered(err error) bool {
	e, ok := errors.AsType[*registerError](err)
	return ok && e.status.Code() != codes.DeadlineExceeded && e.status.Code() != codes.Canceled
}

// answers calls a plugin over its socket as the kubelet does.
func answers(ctx context.Context, socket string) error {
	conn, err := dial(socket)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_, err = v1beta1.NewDevicePluginClient(conn).GetDevicePluginOptions(ctx, &v1beta1.Empty{})
	if err != nil {
		return fmt.Errorf("own socket %s: %s", filepath.Base(socket), status.Convert(err).Message())
	}
	return nil
}

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// socketPrefix begins the name of every socket of ours.
const socketPrefix = "tandem-"

// sweep removes the sockets that an earlier process of ours left behind. One that accepts belongs to a
// living process, as during a rolling update, and anything else is not ours.
func (k *kubelet) sweep() {
	paths, _ := filepath.Glob(filepath.Join(k.dir, socketPrefix+"*.sock"))
	for _, path := range paths {
		if err := knock(context.Background(), path); errors.Is(err, syscall.ECONNREFUSED) {
			if err := os.Remove(path); err != nil {
				k.log.Warn("stale socket not removed", "error", err)
				continue
			}
			k.log.Info("stale socket removed", "socket", path)
		}
	}
}
