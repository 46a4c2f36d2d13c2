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

// incarnation is one registration of an endpoint, with a server and a socket of its own.
type incarnation struct {
	*endpoint
	path        string // of the plugin socket
	socket      *pluginsocket.Socket
	kubeletID   statefile.Identity // of the registration socket in use
	recorded    bool               // the kubelet may have a record of this incarnation
	connectedAt time.Time          // when the first stream opened; zero = not yet
}

// Reasons for the end of an incarnation, beside errors of Register and of the server.
var (
	errStreamEnded     = errors.New("ListAndWatch stream ended")
	errNoStream        = errors.New("registered, but the kubelet has not opened ListAndWatch")
	errSocketRemoved   = errors.New("plugin socket removed")
	errKubeletReplaced = errors.New("kubelet.sock replaced")
)

// run serves and registers until the incarnation ends. Then the server is stopped, all stream handlers have returned and the
// socket is removed.
func (in *incarnation) run(ctx context.Context) error {
	if err := in.waitForKubelet(ctx); err != nil {
		return err
	}
	if err := in.listen(ctx); err != nil {
		return err
	}
	s := &server{endpoint: in.endpoint, streams: newStreams()}
	g := grpc.NewServer(grpc.WaitForHandlers(true))
	v1beta1.RegisterDevicePluginServer(g, s)

	ctx, cancel := context.WithCancel(ctx)
	served, registered := make(chan error, 1), make(chan error, 1)
	var running sync.WaitGroup
	defer running.Wait()
	defer g.Stop() // closes the listener, which removes the socket
	defer cancel()
	running.Go(func() { served <- g.Serve(in.socket) })
	if in.opts.KubeletSocket != "" {
		in.setStatus(in.path, "registering")
		in.recorded = true
		running.Go(func() { registered <- in.kubelet.register(ctx, in.resource, in.path, in.timings.register) })
	} else {
		in.setStatus(in.path, "")
		in.log.Info("serving without a kubelet", "socket", in.path)
	}
	return in.supervise(ctx, s, served, registered)
}

// waitForKubelet waits until the kubelet accepts connections, and reports for what it waits.
func (in *incarnation) waitForKubelet(ctx context.Context) error {
	if in.opts.KubeletSocket == "" {
		return nil
	}
	logged := ""
	in.task.Heartbeat(in.timings.pollInterval)
	id, err := in.kubelet.waitForKubelet(ctx, func(err error) {
		in.task.Heartbeat(in.timings.pollInterval)
		if text := err.Error(); text != logged {
			logged = text
			in.setStatus("", "waiting for the kubelet: "+text)
			in.log.Info("waiting for the kubelet", "error", text)
		}
	})
	in.kubeletID = id
	return err
}

// supervise returns the reason for the end of the incarnation.
func (in *incarnation) supervise(ctx context.Context, s *server, served, registered <-chan error) error {
	var deadline <-chan time.Time
	opened := s.streams.opened
	defer in.task.Heartbeat(in.timings.pollInterval) // for the stop of the server
	for {
		in.task.Heartbeat(in.timings.pollInterval)
		_, changed := in.kubelet.changes.LoadNext()
		if err := in.checkSockets(registered == nil); err != nil {
			return err
		}
		select {
		case <-changed:
		case err := <-served:
			return fmt.Errorf("serve: %w", err)
		case err := <-registered:
			if err != nil {
				in.count(&in.current.RegistrationErrors)
				in.recorded = opened == nil || !answered(err)
				return err
			}
			// The kubelet that has answered has this registration socket or an earlier one. In the second case the present
			// kubelet has removed the plugin socket, or will not open the stream.
			id := statefile.IdentityOf(in.kubelet.socket)
			if !in.socket.Present() {
				return errSocketRemoved
			}
			if registered = nil; id != (statefile.Identity{}) { // without a file the next one differs from kubeletID
				in.kubeletID = id
			}
			in.count(&in.current.Registrations)
			in.log.Info("registered", "socket", filepath.Base(in.path))
			if opened != nil {
				in.setStatus(in.path, errNoStream.Error())
				deadline = time.After(in.timings.openStream)
			}
		case <-opened:
			opened, deadline, in.connectedAt = nil, nil, time.Now()
			in.setStatus(in.path, "")
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
func (in *incarnation) checkSockets(registered bool) error {
	if !in.socket.Present() {
		return errSocketRemoved
	}
	if id := statefile.IdentityOf(in.kubelet.socket); registered && id != in.kubeletID && id != (statefile.Identity{}) {
		return errKubeletReplaced
	}
	return nil
}

// listen creates the plugin socket. Its name was never used before, by this process or another one. Without a kubelet the
// name is constant, so that clients can find it.
func (in *incarnation) listen(ctx context.Context) (err error) {
	name := socketPrefix + shorten(strings.TrimPrefix(in.resource, inventory.ResourceDomain))
	if in.opts.KubeletSocket != "" {
		name = fmt.Sprintf("%s-%s-%d", name, in.kubelet.nonce, in.stats().Incarnations+1)
	} else if err := os.MkdirAll(in.kubelet.dir, 0o750); err != nil { // else the kubelet creates its directory
		return err
	}
	in.path = filepath.Join(in.kubelet.dir, name+".sock")
	if len(in.path) > pluginsocket.MaxPath {
		return &pluginsocket.PathError{Path: in.path, Remedy: "the path of the kubelet's folder must be shorter"}
	}
	if in.socket, err = pluginsocket.Listen(ctx, in.path); err != nil {
		return err
	}
	in.count(&in.current.Incarnations)
	// A kubelet that starts may have removed it already. Its Register would wait 10 s for the socket.
	if !in.socket.Present() {
		return errors.Join(errSocketRemoved, in.socket.Close())
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
