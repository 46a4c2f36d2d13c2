package limitserver

import (
	"context"
	"errors"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/component"
	"github.com/tandem-gpu/tandem/internal/node/limits"
)

const readyWithin = 5 * time.Second

// remedy is what makes the socket be there.
const remedy = "run k8s-gpu limit-server: component deploy/limits, or memoryLimits.enabled"

// Client sets limits by the component of the node.
type Client struct {
	Socket string // see Path
}

var (
	_ limits.Setter = Client{}
	_ limits.Prober = Client{}
)

// Ready returns nil if the component runs; else *UnavailableError with what makes it run.
func (c Client) Ready(ctx context.Context) error {
	return c.call(ctx, readyURL, request{}, readyWithin)
}

// SetMemoryLimit has the component set the limit of a group of a pod, or of a container of one. It fails with an error that wraps fs.ErrNotExist if the group is
// another one by now, and with *UnavailableError if limits can't be set at present. After any other error the limit may be set or not.
func (c Client) SetMemoryLimit(ctx context.Context, group cgroup.ID, change gpu.LimitChange) error {
	return c.call(ctx, setURL, request{group.Path, group.Inode, change.GPU, change.Soft, change.Hard}, StopWithin)
}

// TryLimit has the component set a limit on an empty group and read it back, for the backend that it finds itself.
func (c Client) TryLimit(ctx context.Context, id gpu.DeviceID, _ limit.Backend) error {
	return c.call(ctx, tryURL, request{GPU: id}, StopWithin)
}

func (c Client) call(ctx context.Context, path string, r request, atMost time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	var a answer
	_, err := component.Call(ctx, c.Socket, path, r, &a)
	if _, notServed := errors.AsType[*component.NotServedError](err); notServed {
		return &UnavailableError{remedy, errors.New(err.Error())} // not wrapped: a socket that does not exist is no group that has ended
	}
	if err != nil {
		return err
	}
	return a.Error.decode()
}
