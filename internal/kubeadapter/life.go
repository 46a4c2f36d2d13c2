package kubeadapter

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// life is one incarnation.
type life struct {
	*endpoint
	path         string   // its socket
	own          socketID // the file at path
	with         socketID // the kubelet's socket that it registered with
	known        bool     // the kubelet may have it in its books
	watchedSince time.Time
}

// What ends an incarnation, beside the failures of others.
var (
	errStreamEnded  = errors.New("the kubelet's stream ended")
	errNoStream     = errors.New("registered, but the kubelet has not opened the stream")
	errSocketGone   = errors.New("own socket was removed")
	errOtherKubelet = errors.New("kubelet.sock was replaced")
)

// live serves and registers until something ends it; then the server is stopped, every stream handler
// has returned and the socket is gone.
func (l *life) live(ctx context.Context) error {
	if err := l.meet(ctx); err != nil {
		return err
	}
	listener, err := l.listen(ctx)
	if err != nil {
		return err
	}
	s := &server{resource: l.resource, src: l.src, opts: l.opts, pace: l.pace, lister: l.lister, count: &l.count, streams: newStreams()}
	g := grpc.NewServer(grpc.WaitForHandlers(true))
	v1beta1.RegisterDevicePluginServer(g, s)

	ctx, cancel := context.WithCancel(ctx)
	served, registered := make(chan error, 1), make(chan error, 1)
	var running sync.WaitGroup
	defer running.Wait()
	defer g.Stop() // closes the listener, which removes the socket
	defer cancel()
	running.Go(func() { served <- g.Serve(listener) })
	if l.opts.KubeletSocket != "" {
		l.enter(l.path, "registering")
		l.known = true
		running.Go(func() { registered <- l.kubelet.register(ctx, l.resource, l.path, l.pace.register) })
	} else {
		l.enter(l.path, "")
		l.log.Info("serving without a kubelet", "socket", l.path)
	}
	return l.hold(ctx, s, served, registered)
}

// meet waits for the kubelet.
func (l *life) meet(ctx context.Context) error {
	if l.opts.KubeletSocket == "" {
		return nil
	}
	told := ""
	l.turns.Heartbeat(l.pace.look)
	with, err := l.kubelet.accepts(ctx, func(err error) {
		l.turns.Heartbeat(l.pace.look)
		if why := "waiting for the kubelet: " + err.Error(); why != told {
			told = why
			l.enter("", why)
			l.log.Info(why)
		}
	})
	l.with = with
	return err
}

// hold returns why the incarnation is over.
func (l *life) hold(ctx context.Context, s *server, served, registered <-chan error) error {
	var deadline <-chan time.Time
	opened := s.streams.opened
	defer l.turns.Heartbeat(l.pace.look) // the server has to stop
	for {
		l.turns.Heartbeat(l.pace.look)
		heard := l.kubelet.bell.heard()
		if err := l.replaced(registered == nil); err != nil {
			return err
		}
		select {
		case <-heard:
		case err := <-served:
			return fmt.Errorf("serve: %w", err)
		case err := <-registered:
			if err != nil {
				l.count.registrationErrors.Add(1)
				l.known = opened == nil || !answered(err)
				return err
			}
			// Looked up only now: the kubelet that has just answered is this one or an older one. If it is
			// older, the new one has wiped our socket or will not have our stream.
			now := identify(l.kubelet.socket)
			if identify(l.path) != l.own {
				return errSocketGone
			}
			if registered = nil; now != (socketID{}) { // gone: then the next one is another
				l.with = now
			}
			l.count.registrations.Add(1)
			l.log.Info("registered", "socket", filepath.Base(l.path))
			if opened != nil {
				l.enter(l.path, errNoStream.Error())
				deadline = time.After(l.pace.open)
			}
		case <-opened:
			opened, deadline, l.watchedSince = nil, nil, time.Now()
			l.enter(l.path, "")
		case <-deadline:
			return errNoStream
		case <-s.streams.ended:
			return errStreamEnded
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// replaced looks at the two sockets. Ours is wiped by a kubelet that starts, also while Register is in
// flight: then there is nothing to wait for.
func (l *life) replaced(registered bool) error {
	if identify(l.path) != l.own {
		return errSocketGone
	}
	if now := identify(l.kubelet.socket); registered && now != l.with && now != (socketID{}) {
		return errOtherKubelet
	}
	return nil
}

// listen makes the socket. Its name was never used before, by this process or another; without a kubelet it
// is stable, so that it can be found.
func (l *life) listen(ctx context.Context) (net.Listener, error) {
	name := socketPrefix + short(strings.TrimPrefix(l.resource, vendor))
	if l.opts.KubeletSocket != "" {
		name = fmt.Sprintf("%s-%s-%d", name, l.kubelet.nonce, l.count.incarnations.Load()+1)
	} else if err := os.MkdirAll(l.kubelet.dir, 0o750); err != nil { // else the kubelet makes its folder
		return nil, err
	}
	l.path = filepath.Join(l.kubelet.dir, name+".sock")
	if len(l.path) > maxSocketPath {
		return nil, fmt.Errorf("socket path %s: longer than %d bytes", l.path, maxSocketPath)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", l.path)
	if err != nil {
		return nil, err
	}
	l.count.incarnations.Add(1)
	// A kubelet that starts may have wiped it by now, and would wait 10 s for it inside Register.
	if l.own = identify(l.path); l.own == (socketID{}) {
		return nil, errors.Join(errSocketGone, listener.Close())
	}
	return listener, nil
}

// short is a pool's name, cut if it is long: a resource name may have 63 characters, and a path in the kubelet's folder
// has room for 32 of them beside what makes it unique. The end of a name that is cut tells it from others.
func short(pool string) string {
	const most = 32
	if len(pool) <= most {
		return pool
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(pool)) // never fails
	return fmt.Sprintf("%s-%08x", pool[:most-9], h.Sum32())
}

// maxSocketPath is what sun_path holds beside its final NUL (unix(7)).
const maxSocketPath = 107
