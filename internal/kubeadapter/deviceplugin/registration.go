package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/pluginsocket"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// registration of an endpoint has a server and a socket of its own.
type registration struct {
	*endpoint
	path        string // of the plugin socket
	socket      *pluginsocket.Socket
	kubeletID   statefile.Identity // of the registration socket in use
	recorded    bool               // the kubelet may have a record of this registration
	connectedAt time.Time          // when the first stream opened; zero = not yet
}

// Reasons for the end of a registration, beside errors of Register and of the server.
var (
	errStreamEnded     = errors.New("ListAndWatch stream ended")
	errNoStream        = errors.New("registered, but the kubelet has not opened ListAndWatch")
	errSocketRemoved   = errors.New("plugin socket removed")
	errKubeletReplaced = errors.New("kubelet.sock replaced")
)

// run serves and registers until the registration ends. Then the server is stopped, all stream handlers have returned and the
// socket is removed.
func (r *registration) run(ctx context.Context) error {
	if err := r.waitForKubelet(ctx); err != nil {
		return err
	}
	if err := r.listen(ctx); err != nil {
		return err
	}
	s := &server{endpoint: r.endpoint, streams: newStreams()}
	g := grpc.NewServer(grpc.WaitForHandlers(true))
	v1beta1.RegisterDevicePluginServer(g, s)

	ctx, cancel := context.WithCancel(ctx)
	served, registered := make(chan error, 1), make(chan error, 1)
	var running sync.WaitGroup
	defer running.Wait()
	defer g.Stop() // closes the listener, which removes the socket
	defer cancel()
	running.Go(func() { served <- g.Serve(r.socket) })
	if r.opts.KubeletSocket != "" {
		r.setStatus(r.path, "registering")
		r.recorded = true
		running.Go(func() { registered <- r.kubelet.register(ctx, r.resource, r.path, r.timings.register) })
	} else {
		r.setStatus(r.path, "")
		r.log.Info("serving without a kubelet", "socket", r.path)
	}
	return r.supervise(ctx, s, served, registered)
}

// waitForKubelet waits until the kubelet accepts connections, and reports for what it waits.
func (r *registration) waitForKubelet(ctx context.Context) error {
	if r.opts.KubeletSocket == "" {
		return nil
	}
	logged := ""
	r.task.Heartbeat(r.timings.pollInterval)
	id, err := r.kubelet.waitForKubelet(ctx, func(err error) {
		r.task.Heartbeat(r.timings.pollInterval)
		if text := err.Error(); text != logged {
			logged = text
			r.setStatus("", "waiting for the kubelet: "+text)
			r.log.Info("waiting for the kubelet", "error", text)
		}
	})
	r.kubeletID = id
	return err
}

// supervise returns the reason for the end of the registration.
func (r *registration) supervise(ctx context.Context, s *server, served, registered <-chan error) error {
	var deadline <-chan time.Time
	opened := s.streams.opened
	defer r.task.Heartbeat(r.timings.pollInterval) // for the stop of the server
	for {
		r.task.Heartbeat(r.timings.pollInterval)
		_, changed := r.kubelet.changes.LoadNext()
		if err := r.checkSockets(registered == nil); err != nil {
			return err
		}
		select {
		case <-changed:
		case err := <-served:
			return fmt.Errorf("serve: %w", err)
		case err := <-registered:
			if err != nil {
				r.count(&r.current.RegistrationErrors)
				r.recorded = opened == nil || !answered(err)
				return err
			}
			// The kubelet that has answered has this registration socket or an earlier one. In the second case the present
			// kubelet has removed the plugin socket, or will not open the stream.
			id := statefile.IdentityOf(r.kubelet.socket)
			if !r.socket.Present() {
				return errSocketRemoved
			}
			if registered = nil; id != (statefile.Identity{}) { // without a file the next one differs from kubeletID
				r.kubeletID = id
			}
			r.count(&r.current.Registrations)
			r.log.Info("registered", "socket", filepath.Base(r.path))
			if opened != nil {
				r.setStatus(r.path, errNoStream.Error())
				deadline = time.After(r.timings.openStream)
			}
		case <-opened:
			opened, deadline, r.connectedAt = nil, nil, time.Now()
			r.setStatus(r.path, "")
		case <-deadline:
			return errNoStream
		case <-s.streams.ended:
			return errStreamEnded
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// checkSockets returns an error if the plugin socket is gone or the kubelet's was replaced. A kubelet that starts removes
// the plugin socket also during a Register call, which then can't succeed.
func (r *registration) checkSockets(registered bool) error {
	if !r.socket.Present() {
		return errSocketRemoved
	}
	if id := statefile.IdentityOf(r.kubelet.socket); registered && id != r.kubeletID && id != (statefile.Identity{}) {
		return errKubeletReplaced
	}
	return nil
}

// listen creates the plugin socket. Its name was never used before, by this process or another one. Without a kubelet the
// name is constant, so that clients can find it.
func (r *registration) listen(ctx context.Context) (err error) {
	name := socketPrefix + shorten(strings.TrimPrefix(r.resource, inventory.ResourceDomain))
	if r.opts.KubeletSocket != "" {
		name = fmt.Sprintf("%s-%s-%d", name, r.kubelet.nonce, r.stats().Sockets+1)
	} else if err := os.MkdirAll(r.kubelet.dir, 0o750); err != nil { // else the kubelet creates its directory
		return err
	}
	r.path = filepath.Join(r.kubelet.dir, name+".sock")
	if len(r.path) > pluginsocket.MaxPath {
		return &pluginsocket.PathError{Path: r.path, Remedy: "the path of the kubelet's folder must be shorter"}
	}
	if r.socket, err = pluginsocket.Listen(ctx, r.path); err != nil {
		return err
	}
	r.count(&r.current.Sockets)
	// A kubelet that starts may have removed it already. Its Register would wait 10 s for the socket.
	if !r.socket.Present() {
		return errors.Join(errSocketRemoved, r.socket.Close())
	}
	return nil
}

// shorten cuts a pool's name to 32 characters. A resource name may have 63, and a path in the kubelet's directory has room for
// 32 beside the unique part. A hash replaces the end of a name that is cut.
func shorten(pool string) string {
	const limit = 32
	if len(pool) <= limit {
		return pool
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(pool)) // never fails
	return fmt.Sprintf("%s-%08x", pool[:limit-9], h.Sum32())
}
