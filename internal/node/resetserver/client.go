package resetserver

import (
	"context"
	"errors"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/component"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
)

const readyWithin = 10 * time.Second

// remedy is what makes the socket be there.
const remedy = "run k8s-gpu reset-server on the node: with the component deploy/reset, or reset.enabled in the chart"

// Client resets GPUs by the component of the node. It is a gpureset.Resetter.
type Client struct {
	Socket string // see Path
}

var _ gpureset.Resetter = Client{}

// Ready asks the component.
func (c Client) Ready(ctx context.Context) error {
	_, err := c.call(ctx, readyURL, gpureset.Target{}, readyWithin)
	return err
}

// Look asks the component.
func (c Client) Look(ctx context.Context, t gpureset.Target) (gpureset.Look, error) {
	a, err := c.call(ctx, lookURL, t, gpureset.LookAtMost+component.RequestTimeout)
	return a.Look, err
}

// Reset has the component reset a GPU.
func (c Client) Reset(ctx context.Context, t gpureset.Target) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := c.call(context.WithoutCancel(ctx), resetURL, t, StopWithin)
	return err
}

// Restore has the component restore the persistence mode of a GPU.
func (c Client) Restore(ctx context.Context, id gpu.DeviceID) error {
	_, err := c.call(ctx, restoreURL, gpureset.Target{GPU: id}, gpureset.LookAtMost+component.RequestTimeout)
	return err
}

// call sends a request and returns what the component answers. Without an answer to one for a reset the GPU may be in any state.
func (c Client) call(ctx context.Context, path string, t gpureset.Target, atMost time.Duration) (a answer, err error) {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	header, err := component.Call(ctx, c.Socket, path, t, &a)
	_, notServed := errors.AsType[*component.NotServedError](err)
	switch {
	case err == nil:
		return a, decode(a.Errors)
	case notServed:
		return a, &gpureset.UnavailableError{Remedy: remedy, Err: err}
	case path != resetURL:
		return a, err
	}
	unknown := &gpureset.RefusedError{GPU: t.GPU, Refusal: gpureset.Other, Text: "how the reset ended is not known: " + err.Error()}
	if header.Get(persistenceHeader) != "" {
		return a, errors.Join(unknown, &gpureset.PersistenceError{GPU: t.GPU, Err: err})
	}
	return a, unknown
}
