package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// server is the device plugin service of one registration. Requests are answered from the latest device list without a driver
// call, because the kubelet calls within its sync loop and without a deadline.
type server struct {
	v1beta1.UnimplementedDevicePluginServer
	*endpoint
	streams streams
}

var _ v1beta1.DevicePluginServer = (*server)(nil)

// GetDevicePluginOptions implements the API. The kubelet calls it before it answers Register.
func (s *server) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch implements the API. It sends the list immediately, after each change, when the kubelet is to write its checkpoint, and as a
// heartbeat. Only after a change the next one waits for listInterval, so that a device that fails after the first list or a heartbeat is
// reported without delay. A device that is removed while it is healthy is listed as unhealthy first.
func (s *server) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	s.streams.open()
	defer s.streams.close()
	s.tracker.pods.Request() // the kubelet may have restarted
	task := s.opts.Watchdog.Register("ListAndWatch " + s.resource)
	defer task.Done()
	heartbeat := time.NewTicker(s.timings.heartbeat)
	defer heartbeat.Stop()
	var sent []listedDevice
	for first, due := true, true; ; first = false {
		task.Heartbeat(s.timings.heartbeat)
		latest, replaced := s.tracker.published.LoadNext()
		list, removing := markRemoved(sent, latest.byResource[s.resource])
		changed := !first && !slices.Equal(list, sent)
		if due || changed {
			if err := stream.Send(listResponse(list)); err != nil {
				return err
			}
			s.count(&s.current.Lists)
			sent = list
		}
		if changed && !watch.Sleep(stream.Context(), s.timings.listInterval) {
			return nil
		}
		if removing {
			due = false
			continue
		}
		select {
		case <-replaced:
			due = false
		case <-heartbeat.C:
			due = true
		case <-s.tracker.resend:
			due = true
		case <-stream.Context().Done():
			return nil
		}
	}
}

// GetPreferredAllocation implements the API. It never fails, because the kubelet would reject the pod permanently. If there
// are fewer units than requested, the kubelet adds others.
func (s *server) GetPreferredAllocation(ctx context.Context, r *v1beta1.PreferredAllocationRequest) (*v1beta1.PreferredAllocationResponse, error) {
	defer s.observe("GetPreferredAllocation", time.Now())
	s.count(&s.current.PreferredAllocations)
	call := s.tracker.pods.BeginCall(ctx)
	defer call.End()
	inv := s.tracker.published.Load().allocatable
	response := &v1beta1.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		request := preferredRequest{unitIDs(c.GetAvailableDeviceIDs()), unitIDs(c.GetMustIncludeDeviceIDs()), int(c.GetAllocationSize())}
		preferred := inv.Prefer(s.tracker.preferable(ctx, call, s.resource, request), request.must, request.size)
		ids := make([]string, len(preferred))
		for i, id := range preferred {
			ids[i] = string(id)
		}
		response.ContainerResponses = append(response.ContainerResponses,
			&v1beta1.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// observe reports a call that began at a time, and ends now.
func (s *server) observe(method string, began time.Time) {
	if s.opts.Observe != nil {
		s.opts.Observe(method, time.Since(began))
	}
}

// Allocate implements the API. The kubelet records allocations: it may request the same units twice and does not report their
// release. Units have been read from the driver before, since only an offered unit makes an endpoint register. If the kubelet
// has canceled the call, nothing is allocated.
func (s *server) Allocate(ctx context.Context, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	defer s.observe("Allocate", time.Now())
	began := time.Now() // before it waits for a List: a call that waits with it may allocate first
	defer s.tracker.pods.BeginCall(ctx).End()
	free := s.checkFree(ctx, r) // without the lock: the kubelet may take a second to answer, and claims are prepared meanwhile
	s.opts.Lock.Lock()
	defer s.opts.Lock.Unlock()
	inv := s.tracker.published.Load().allocatable
	response := &v1beta1.AllocateResponse{}
	var devices []gpu.Device
	var units []inventory.Unit
	for _, c := range r.GetContainerRequests() {
		plan, err := inv.Reserve(unitIDs(c.GetDevicesIds())...)
		if err == nil {
			err = errors.Join(checkResource(s.resource, plan.Units), s.checkAPI(plan.Units), s.tracker.checkSince(began, plan.Units))
		}
		if err == nil {
			err = free
		}
		if err == nil && s.opts.Check != nil {
			err = s.checkReservation(plan.Units)
		}
		if err != nil {
			s.count(&s.current.AllocationErrors)
			return nil, allocateError(s.resource, err)
		}
		response.ContainerResponses = append(response.ContainerResponses, allocateResponse(s.resource, plan, s.opts))
		if units == nil {
			devices, units = plan.Devices, plan.Units // the kubelet requests one container at a time
			continue
		}
		devices, units = append(devices, plan.Devices...), append(units, plan.Units...)
	}
	if err := ctx.Err(); err != nil {
		s.count(&s.current.AllocationErrors)
		return nil, status.FromContextError(err).Err()
	}
	s.count(&s.current.Allocations)
	s.tracker.allocated(units)
	if s.opts.Reserved != nil && len(devices) > 0 {
		s.opts.Reserved(devices)
	}
	return response, nil
}

// checkResource fails if one of the units belongs to another resource: a MIG instance can have the ID of the one that
// was in its place, a GPU in another pool has the same ID, and the kubelet may not have the latest list.
func checkResource(resource string, units []inventory.Unit) error {
	var errs []error
	pool := strings.TrimPrefix(resource, inventory.ResourceDomain)
	for i := range units {
		if u := &units[i]; u.Pool != pool {
			errs = append(errs, fmt.Errorf("device ID %s: belongs to %s now, not %s", u.ID, kubeadapter.ResourceOf(*u), resource))
		}
	}
	return errors.Join(errs...)
}

// checkAPI fails if one of the units is offered through another API, or if a resource claim has, or may have, its hardware: an orchestrator may
// have placed work on the device before it was moved to another API.
func (s *server) checkAPI(units []inventory.Unit) error {
	var errs []error
	claims := holders.Record{Complete: true}
	if s.opts.ClaimHolders != nil {
		claims = s.opts.ClaimHolders()
	}
	held := holders.NewSet(claims.Holders)
	for i := range units {
		u := &units[i]
		if !ofDevicePlugin(u.API) {
			errs = append(errs, fmt.Errorf("device ID %s: offered through %s now, not through a device plugin", u.ID, u.API))
			continue
		}
		holder := claims.Missing
		if h, conflict := held.Conflict(wanted(u)); conflict {
			holder = h.Work.String()
		} else if claims.Complete {
			continue
		}
		s.log.Warn("allocation refused: a resource claim has the device", "id", u.ID, "holder", holder)
		errs = append(errs, fmt.Errorf("device ID %s: a resource claim has it", u.ID))
	}
	return errors.Join(errs...)
}

// checkFree fails if a pod has a device of a request. It logs that, because only an event of the pod has it otherwise.
func (s *server) checkFree(ctx context.Context, r *v1beta1.AllocateRequest) error {
	var keys []deviceKey
	for _, c := range r.GetContainerRequests() {
		for _, id := range c.GetDevicesIds() {
			keys = append(keys, deviceKey{s.resource, inventory.UnitID(id)})
		}
	}
	err := s.tracker.checkFree(ctx, keys)
	if held, ok := errors.AsType[*HeldByPodError](err); ok {
		s.log.Warn("allocation refused: the kubelet gives a device out a second time", "id", held.ID, "pod", held.Pod)
	}
	return err
}

// checkReservation logs what the check of a reservation has found, unless that fails the reservation.
func (s *server) checkReservation(units []inventory.Unit) error {
	findings, err := s.opts.Check(units)
	for _, f := range findings {
		s.log.Warn("device reserved despite the reservation check", "id", f.Device.ID, "pci", f.Device.PCI, "reason", f.Reason())
	}
	if err != nil {
		s.log.Warn("reservation refused", "error", err)
	}
	return err
}

// streams signals the start of the first stream of a registration and the end of the last one.
type streams struct {
	mu     sync.Mutex
	n      int
	opened chan struct{} // closed when the first stream opens
	ended  chan struct{} // closed when no stream is left
}

func newStreams() streams {
	return streams{opened: make(chan struct{}), ended: make(chan struct{})}
}

func (s *streams) open() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n++; s.n == 1 {
		closeOnce(s.opened)
	}
}

func (s *streams) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n--; s.n == 0 {
		closeOnce(s.ended)
	}
}

func closeOnce(c chan struct{}) {
	select {
	case <-c:
	default:
		close(c)
	}
}
