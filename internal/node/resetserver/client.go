package resetserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
)

const (
	readyWithin = 10 * time.Second
	maxAnswer   = 1 << 20 // bytes
)

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
	a, err := c.call(ctx, lookURL, t, gpureset.LookAtMost+requestTimeout)
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
	_, err := c.call(ctx, restoreURL, gpureset.Target{GPU: id}, gpureset.LookAtMost+requestTimeout)
	return err
}

// call sends a request and returns what the component answers.
func (c Client) call(ctx context.Context, path string, t gpureset.Target, atMost time.Duration) (a answer, err error) {
	body, err := json.Marshal(t)
	if err != nil {
		return a, err
	}
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://reset-server"+path, bytes.NewReader(body))
	if err != nil {
		return a, err
	}
	connected := false
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.Socket)
		connected = err == nil
		return conn, err
	}}}
	resp, err := client.Do(r)
	if err != nil {
		return a, c.failed(path, t.GPU, connected, false, err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	switch {
	case err == nil && resp.StatusCode != http.StatusOK:
		return a, &gpureset.UnavailableError{Remedy: remedy, Err: fmt.Errorf("%s: %s: %s", c.Socket, resp.Status, strings.TrimSpace(string(text)))}
	case err == nil:
		err = json.Unmarshal(text, &a)
	}
	if err != nil {
		return a, c.failed(path, t.GPU, true, resp.Header.Get(persistenceHeader) != "", err)
	}
	return a, decode(a.Errors)
}

// failed is the error of a request without an answer. If it was one for a reset, the GPU may be in any state.
func (c Client) failed(path string, id gpu.DeviceID, connected, persistence bool, err error) error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err
	}
	err = fmt.Errorf("%s: %w", c.Socket, err)
	switch {
	case !connected:
		return &gpureset.UnavailableError{Remedy: remedy, Err: err}
	case path != resetURL:
		return err
	}
	unknown := &gpureset.RefusedError{GPU: id, Refusal: gpureset.Other, Text: "how the reset ended is not known: " + err.Error()}
	if persistence {
		return errors.Join(unknown, &gpureset.PersistenceError{GPU: id, Err: err})
	}
	return unknown
}
