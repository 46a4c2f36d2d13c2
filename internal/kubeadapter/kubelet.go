package kubeadapter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// kubelet is the other side: a folder that it owns and a socket in it that comes and goes.
type kubelet struct {
	dir    string
	socket string // "" = there is no kubelet to register with
	log    *slog.Logger
	bell   *bell // rung when something in dir may have changed
}

// watch rings the bell after file events in the folder and every so often without. The folder may be
// missing, appear later or be replaced, and events may get lost: a ring only says "look again".
func (k *kubelet) watch(ctx context.Context, every time.Duration) {
	events, errs := (<-chan fsnotify.Event)(nil), (<-chan error)(nil)
	w, err := fsnotify.NewWatcher()
	if err != nil {
		k.log.Warn("no file events, looking every "+every.String(), "error", err)
	} else {
		defer func() { _ = w.Close() }()
		events, errs = w.Events, w.Errors
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if w != nil {
			_ = w.Add(k.dir) // no folder yet: the next tick tries again
		}
		select {
		case e := <-events:
			if filepath.Ext(e.Name) == ".sock" { // the kubelet's checkpoint changes with every list
				k.bell.ring()
			}
		case err := <-errs: // such as too many events at once
			k.log.Debug("file events", "error", err)
			k.bell.ring()
		case <-tick.C:
			k.bell.ring()
		case <-ctx.Done():
			return
		}
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
// file alone says nothing, as it outlives a kubelet that was killed. waiting is told what is the matter.
func (k *kubelet) accepts(ctx context.Context, waiting func(error)) error {
	for {
		heard := k.bell.heard()
		err := knock(ctx, k.socket)
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		waiting(err)
		select {
		case <-heard:
		case <-ctx.Done():
			return ctx.Err()
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

// rest waits for d, or until another kubelet listens than the one whose socket was last.
func (k *kubelet) rest(ctx context.Context, d time.Duration, last socketID) {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		heard := k.bell.heard()
		if now := identify(k.socket); now != (socketID{}) && last != (socketID{}) && now != last {
			return
		}
		select {
		case <-heard:
		case <-t.C:
			return
		case <-ctx.Done():
			return
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
		return fmt.Errorf("register %s: %s", filepath.Base(socket), status.Convert(err).Message())
	}
	return nil
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

// bell wakes everybody who listens. Take heard before looking at what may have changed: a ring between
// the look and the wait is then not lost.
type bell struct {
	mu   sync.Mutex
	next chan struct{}
}

func newBell() *bell { return &bell{next: make(chan struct{})} }

func (b *bell) heard() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.next
}

func (b *bell) ring() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.next)
	b.next = make(chan struct{})
}
