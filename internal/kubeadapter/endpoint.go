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
	"strings"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// endpoint offers one resource, incarnation after incarnation.
type endpoint struct {
	resource string
	src      Source
	opts     Options
	kubelet  *kubelet
	pace     pace
	log      *slog.Logger
	count    counters

	mu    sync.Mutex
	stand standing
}

// standing is where an endpoint is in its life.
type standing struct {
	Socket string // being served; "" between incarnations
	Why    string // why the kubelet does not watch; "" if it does
}

// ResourceStats are the standing and the counters of one resource since the process started.
type ResourceStats struct {
	Resource           string
	Watched            bool // the kubelet has the stream open
	Registrations      uint64
	RegistrationErrors uint64
	Allocations        uint64
	AllocationErrors   uint64
	Preferences        uint64 // GetPreferredAllocation
	Lists              uint64 // sent to the kubelet
}

func (e *endpoint) status() standing {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.stand
}

func (e *endpoint) enter(s standing) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stand = s
}

func (e *endpoint) stats() ResourceStats {
	return ResourceStats{
		Resource:           e.resource,
		Watched:            e.status().Why == "",
		Registrations:      e.count.registrations.Load(),
		RegistrationErrors: e.count.registrationErrors.Load(),
		Allocations:        e.count.allocations.Load(),
		AllocationErrors:   e.count.allocationErrors.Load(),
		Preferences:        e.count.preferences.Load(),
		Lists:              e.count.lists.Load(),
	}
}

// run lives one incarnation after another until ctx ends.
func (e *endpoint) run(ctx context.Context) {
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval, retry.Multiplier = e.pace.settle, e.pace.retryMax, 2
	for {
		l := life{endpoint: e}
		err := l.live(ctx)
		if ctx.Err() != nil {
			return
		}
		e.enter(standing{Why: err.Error()})
		e.log.Warn("no longer offered to the kubelet, trying again", "reason", err)
		if !l.watchedSince.IsZero() && time.Since(l.watchedSince) >= e.pace.stable {
			retry.Reset()
		}
		e.kubelet.rest(ctx, max(e.pace.settle, retry.NextBackOff()), l.with)
	}
}

// life is one incarnation.
type life struct {
	*endpoint
	path         string   // its socket
	own          socketID // the file at path
	with         socketID // the kubelet's socket that it registered with
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
	s := &server{resource: l.resource, src: l.src, opts: l.opts, pace: l.pace, count: &l.count, streams: newStreams()}
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
		l.enter(standing{Socket: l.path, Why: "registering"})
		running.Go(func() { registered <- l.kubelet.register(ctx, l.resource, l.path, l.pace.register) })
	} else {
		l.enter(standing{Socket: l.path})
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
	err := l.kubelet.accepts(ctx, func(err error) {
		if why := "waiting for the kubelet: " + err.Error(); why != told {
			told = why
			l.enter(standing{Why: why})
			l.log.Info(why)
		}
	})
	l.with = identify(l.kubelet.socket)
	return err
}

// hold returns why the incarnation is over.
func (l *life) hold(ctx context.Context, s *server, served, registered <-chan error) error {
	var deadline <-chan time.Time
	opened := s.streams.opened
	for {
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
				return err
			}
			// Looked up only now: the kubelet that has just answered is this one or an older one, and
			// in the latter case its end ends our stream.
			registered, l.with = nil, identify(l.kubelet.socket)
			l.count.registrations.Add(1)
			l.log.Info("registered", "socket", filepath.Base(l.path))
			if opened != nil {
				l.enter(standing{Socket: l.path, Why: errNoStream.Error()})
				deadline = time.After(l.pace.open)
			}
		case <-opened:
			opened, deadline, l.watchedSince = nil, nil, time.Now()
			l.enter(standing{Socket: l.path})
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

// listen makes the socket. Without a kubelet its name is stable, so that it can be found.
func (l *life) listen(ctx context.Context) (net.Listener, error) {
	name := socketPrefix + strings.TrimPrefix(l.resource, vendor)
	if l.opts.KubeletSocket != "" {
		name += "-" + nonce()
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
	l.own = identify(l.path)
	return listener, nil
}

// maxSocketPath is what sun_path holds beside its final NUL (unix(7)).
const maxSocketPath = 107

func nonce() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}
