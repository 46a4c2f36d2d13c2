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

// Ready returns nil if the component runs and the node has the control groups that limits need; else *UnavailableError with what makes it so.
func (c Client) Ready(ctx context.Context) error {
	return c.call(ctx, readyURL, request{}, readyWithin)
}

// Serves returns nil if the component answers, whether it can set limits on this node or not: a restart would change nothing of that.
func (c Client) Serves(ctx context.Context) error {
	_, err := c.ask(ctx, readyURL, request{}, readyWithin)
	return err
}

// SetMemoryLimit has the component set the limit of a group of a pod, or of a container of one. It fails with an error that wraps fs.ErrNotExist if the group is
// another one by now, and with *UnavailableError if limits can't be set at present, or not before half of the time that ctx has: nothing is set then. After any other
// error the limit may be set or not.
func (c Client) SetMemoryLimit(ctx context.Context, group cgroup.ID, change gpu.LimitChange) error {
	return c.call(ctx, setURL, request{Group: group.Path, Inode: group.Inode, GPU: change.GPU, Soft: change.Soft, Hard: change.Hard}, StopWithin)
}

// TryLimit has the component set a limit on an empty group and read it back, for the backend that it finds itself.
func (c Client) TryLimit(ctx context.Context, id gpu.DeviceID, _ limit.Backend) error {
	return c.call(ctx, tryURL, request{GPU: id}, StopWithin)
}

func (c Client) call(ctx context.Context, path string, r request, atMost time.Duration) error {
	a, err := c.ask(ctx, path, r, atMost)
	if err != nil {
		return err
	}
	return a.Error.decode()
}

// ask sends a request. The component may begin it in the first half of the time that there is.
func (c Client) ask(ctx context.Context, path string, r request, atMost time.Duration) (a answer, err error) {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	end, _ := ctx.Deadline()
	r.Within = max(1, (time.Until(end) / 2).Milliseconds())
	_, err = component.Call(ctx, c.Socket, path, r, &a)
	if _, notServed := errors.AsType[*component.NotServedError](err); notServed {
		err = &UnavailableError{remedy, errors.New(err.Error())} // not wrapped: a socket that does not exist is no group that has ended
	}
	return a, err
}
