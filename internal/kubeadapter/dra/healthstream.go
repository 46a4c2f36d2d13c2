package dra

import (
	"time"

	"google.golang.org/grpc"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
)

// healthServer is the health service. Each stream has its own reader of the latest health, so that one that does not read delays nothing.
type healthServer struct {
	health.UnimplementedDRAResourceHealthServer
	*Adapter
}

// NodeWatchResources implements the API. The first message has all devices, and one with all follows at an interval: when another stream
// of the driver ends, the kubelet forgets what this one has sent. In between, a message has the devices of which the health has changed.
func (s *healthServer) NodeWatchResources(_ *health.NodeWatchResourcesRequest, stream grpc.ServerStreamingServer[health.NodeWatchResourcesResponse]) error {
	s.count(func(n *Stats) { n.HealthStreams++ })
	defer s.count(func(n *Stats) { n.HealthStreams-- })
	task := s.opts.Watchdog.Register("DRA health stream")
	defer task.Done()
	resend := time.NewTicker(s.limits.resend)
	defer resend.Stop()
	sent := map[string]resourceslice.DeviceHealth{}
	all := true
	for {
		task.Heartbeat(0) // the kubelet may not read
		latest, replaced := s.health.LoadNext()
		message, gone := changedHealth(latest, sent, all)
		for _, one := range gone {
			delete(sent, one.Device)
		}
		if len(message)+len(gone) > 0 {
			if err := stream.Send(s.response(append(message, gone...))); err != nil {
				return err
			}
			s.count(func(n *Stats) { n.HealthMessages++ })
			for _, one := range message {
				sent[one.Device] = one
			}
		}
		select {
		case <-replaced:
			all = len(sent) == 0
		case <-resend.C:
			all = true
		case <-stream.Context().Done():
			return nil
		case <-s.stopping:
			return nil
		}
	}
}

// changedHealth returns the health that differs from what was sent, or all of it, and those devices, as unknown, that are gone.
func changedHealth(latest []resourceslice.DeviceHealth, sent map[string]resourceslice.DeviceHealth, all bool) (message, gone []resourceslice.DeviceHealth) {
	if latest == nil { // nothing is known, also not that they are gone
		return nil, nil
	}
	listed := make(map[string]bool, len(latest))
	for _, one := range latest {
		listed[one.Device] = true
		if before, known := sent[one.Device]; all || !known || before != one {
			message = append(message, one)
		}
	}
	for name := range sent {
		if !listed[name] {
			gone = append(gone, resourceslice.DeviceHealth{Device: name, Status: resourceslice.StatusUnknown, Message: "the device is no longer there"})
		}
	}
	return message, gone
}

// response returns a message. The kubelet cuts texts at 1,024 characters; those of health have at most 200 bytes.
func (a *Adapter) response(list []resourceslice.DeviceHealth) *health.NodeWatchResourcesResponse {
	now := time.Now().Unix()
	r := &health.NodeWatchResourcesResponse{}
	for _, one := range list {
		r.Devices = append(r.Devices, &health.DeviceHealth{
			Device: &health.DeviceIdentifier{PoolName: a.opts.Node, DeviceName: one.Device},
			Health: healthStatus(one.Status), Message: one.Message, LastUpdatedTime: now,
			HealthCheckTimeoutSeconds: int64(a.limits.healthAge / time.Second),
		})
	}
	return r
}

func healthStatus(s resourceslice.HealthStatus) health.HealthStatus {
	switch s {
	case resourceslice.StatusHealthy:
		return health.HealthStatus_HEALTHY
	case resourceslice.StatusUnhealthy:
		return health.HealthStatus_UNHEALTHY
	case resourceslice.StatusUnknown:
	}
	return health.HealthStatus_UNKNOWN
}
