package kubeadapter

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
)

// server answers the kubelet for one incarnation of an endpoint. Apart from its streams it has no
// state: a request is answered from the latest inventory, without a lock and without the driver, since
// the kubelet calls inside its sync loop and without a deadline.
type server struct {
	v1beta1.UnimplementedDevicePluginServer
	resource string
	src      Source
	opts     Options
	pace     pace
	lister   *lister
	count    *counters
	streams  streams
}

var _ v1beta1.DevicePluginServer = (*server)(nil)

// counters outlive incarnations.
type counters struct {
	incarnations                      atomic.Uint64
	registrations, registrationErrors atomic.Uint64
	allocations, allocationErrors     atomic.Uint64
	preferences, lists                atomic.Uint64
}

// GetDevicePluginOptions is called back while Register is pending.
func (s *server) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch sends the whole list at once, then as soon as it changed, and now and then regardless. Only a
// change makes the next one wait: after the first list or a heartbeat, bad news goes out as ever. What leaves the
// list while it is healthy is listed once more as unhealthy.
func (s *server) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	s.streams.open()
	defer s.streams.close()
	s.lister.held.ask() // the kubelet may be another one
	ctx, cancel := context.WithCancel(stream.Context())
	var follower sync.WaitGroup
	defer follower.Wait()
	defer cancel()
	changed := make(chan struct{}, 1)
	follower.Go(func() { s.follow(ctx, changed) })

	turns := s.opts.Watchdog.Register("list " + s.resource)
	defer turns.Done()
	heartbeat := time.NewTicker(s.pace.heartbeat)
	defer heartbeat.Stop()
	var sent []listing
	for first, due := true, true; ; first = false {
		turns.Heartbeat(s.pace.heartbeat)
		heard := s.lister.changed()
		list, leaving := farewell(sent, s.lister.all(s.src.Current())[s.resource])
		news := !first && !slices.Equal(list, sent)
		if due || news {
			if err := stream.Send(listResponse(list)); err != nil {
				return err
			}
			s.count.lists.Add(1)
			sent = list
		}
		if news && !pause(ctx, s.pace.quiet) { // a change meanwhile waits in its channel
			return nil
		}
		if leaving {
			due = false
			continue
		}
		select {
		case <-changed:
			due = false
		case <-heard:
			due = false
		case <-heartbeat.C:
			due = true
		case <-ctx.Done():
			return nil
		}
	}
}

// follow makes changed readable after each new inventory.
func (s *server) follow(ctx context.Context, changed chan<- struct{}) {
	for range s.src.Watch(ctx) {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}

// GetPreferredAllocation chooses among fungible units. It never fails, because the kubelet would reject
// the pod for good: with less than it asked for the kubelet fills up by itself.
func (s *server) GetPreferredAllocation(_ context.Context, r *v1beta1.PreferredAllocationRequest) (*v1beta1.PreferredAllocationResponse, error) {
	s.count.preferences.Add(1)
	inv := s.lister.offered(s.src.Current())
	response := &v1beta1.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		best := inv.Prefer(unitIDs(c.GetAvailableDeviceIDs()), unitIDs(c.GetMustIncludeDeviceIDs()), int(c.GetAllocationSize()))
		ids := make([]string, len(best))
		for i, id := range best {
			ids[i] = string(id)
		}
		response.ContainerResponses = append(response.ContainerResponses,
			&v1beta1.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// Allocate says what the containers need. It takes nothing: the kubelet keeps the books, may ask twice
// for the same units, and never tells when they are free again. It can't come before the first reading
// of the machine, since only a unit that was seen makes an endpoint register. A kubelet that has gone
// meanwhile gets no answer, and so gave nothing to new work.
func (s *server) Allocate(ctx context.Context, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	inv := s.lister.offered(s.src.Current())
	response := &v1beta1.AllocateResponse{}
	var devices []core.Device
	var units []core.Unit
	for _, c := range r.GetContainerRequests() {
		ids := unitIDs(c.GetDevicesIds())
		plan, err := inv.Reserve(ids...)
		if err == nil {
			err = s.foreign(inv, ids)
		}
		if err != nil {
			s.count.allocationErrors.Add(1)
			return nil, refusal(s.resource, err)
		}
		response.ContainerResponses = append(response.ContainerResponses, allocateResponse(plan, s.opts))
		devices = append(devices, plan.Devices...)
		for _, id := range ids {
			u, _ := inv.Unit(id) // Reserve found it
			units = append(units, u)
		}
	}
	if err := ctx.Err(); err != nil {
		s.count.allocationErrors.Add(1)
		return nil, status.FromContextError(err).Err()
	}
	s.count.allocations.Add(1)
	s.lister.held.grant(units)
	if s.opts.Reserved != nil && len(devices) > 0 {
		s.opts.Reserved(devices)
	}
	return response, nil
}

// foreign is an error if a unit counts for another resource than the one that is served: a MIG instance in the
// place of another can have its ID, a GPU keeps its ID in another pool, and the kubelet may not know yet.
func (s *server) foreign(inv *core.Inventory, ids []core.UnitID) error {
	var errs []error
	for _, id := range ids {
		if u, ok := inv.Unit(id); ok && ResourceOf(u) != s.resource {
			errs = append(errs, fmt.Errorf("%s is %s now, not %s", id, ResourceOf(u), s.resource))
		}
	}
	return errors.Join(errs...)
}

// streams tells when the first stream of an incarnation opened and when the last one ended.
type streams struct {
	mu     sync.Mutex
	n      int
	opened chan struct{} // closed when a stream first opens
	ended  chan struct{} // closed when none is left
}

func newStreams() streams {
	return streams{opened: make(chan struct{}), ended: make(chan struct{})}
}

func (s *streams) open() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n++; s.n == 1 && !closed(s.opened) {
		close(s.opened)
	}
}

func (s *streams) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n--; s.n == 0 && !closed(s.ended) {
		close(s.ended)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// pause waits for d; false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
