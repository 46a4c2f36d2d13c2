package control

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
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/filelock"
	"github.com/tandem-gpu/tandem/internal/report"
)

const (
	answerAtMost = 10 * time.Second // more than the agent gives itself
	maxAnswer    = 16 << 20         // bytes
)

// Client asks a running agent. Its methods are safe for concurrent use and answer within ten seconds. They fail
// with ErrNotRunning if there is no agent, with *NotServedError if one has no socket, and with *RefusedError if it does
// not obey.
type Client struct {
	path string
	http http.Client
}

// Dial returns the client of the agent at path. It connects when it is asked something.
func Dial(path string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	return &Client{path, http.Client{
		Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: answerAtMost,
	}}
}

// Report is what the agent offers, and what stands against it.
func (c *Client) Report(ctx context.Context) (r report.Report, err error) {
	return r, c.ask(ctx, http.MethodGet, reportURL, nil, &r)
}

// Clear drops conditions: see core.Ledger.Clear.
func (c *Client) Clear(ctx context.Context, args ClearArgs) (a Response, err error) {
	return a, c.ask(ctx, http.MethodPost, clearURL, args, &a)
}

// Ignore disregards conditions: see core.Ledger.Ignore.
func (c *Client) Ignore(ctx context.Context, args IgnoreArgs) (a Response, err error) {
	return a, c.ask(ctx, http.MethodPost, ignoreURL, args, &a)
}

// Simulate rehearses a fault. No conditions in the answer mean that none follows from it.
func (c *Client) Simulate(ctx context.Context, args SimulateArgs) (a Response, err error) {
	return a, c.ask(ctx, http.MethodPost, simulateURL, args, &a)
}

// Quiesce has the agent leave the driver alone: see monitor.Quiesce.
func (c *Client) Quiesce(ctx context.Context, args QuiesceArgs) (s DriverStatus, err error) {
	return s, c.ask(ctx, http.MethodPost, quiesceURL, args, &s)
}

// Resume has the agent take the driver back: see monitor.Resume.
func (c *Client) Resume(ctx context.Context) (s DriverStatus, err error) {
	return s, c.ask(ctx, http.MethodPost, resumeURL, struct{}{}, &s)
}

// Debug is the agent from the inside.
func (c *Client) Debug(ctx context.Context) (d report.Debug, err error) {
	return d, c.ask(ctx, http.MethodGet, debugURL, nil, &d)
}

func (c *Client) ask(ctx context.Context, method, path string, args, answer any) error {
	if c.path == "" {
		return fmt.Errorf("%w that can be asked: no state_dir is set, and its socket would be there", ErrNotRunning)
	}
	if err := checkPath(c.path); err != nil {
		return err
	}
	body, err := json.Marshal(args)
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := c.http.Do(r)
	if err != nil {
		return c.failed(err)
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("%s: %w", c.path, err)
	}
	if response.StatusCode != http.StatusOK {
		var why refusal
		if json.Unmarshal(text, &why) != nil || why.Error == "" {
			why.Error = fmt.Sprintf("%s: %s: %s", c.path, response.Status, strings.TrimSpace(string(text)))
		}
		return &RefusedError{response.StatusCode, why.Error}
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("%s: %w", c.path, err)
	}
	return nil
}

// failed says why there was no answer, in fewer words than net/http.
func (c *Client) failed(err error) error {
	for _, nobody := range []error{syscall.ENOENT, syscall.ENOTDIR, syscall.ECONNREFUSED} {
		if errors.Is(err, nobody) && filelock.IsHeld(lockPath(c.path)) {
			return &NotServedError{c.path}
		} else if errors.Is(err, nobody) {
			return fmt.Errorf("%w: nobody serves %s", ErrNotRunning, c.path)
		}
	}
	if errors.Is(err, syscall.EACCES) {
		return fmt.Errorf("%s: %w; ask as the user that the agent runs as", c.path, syscall.EACCES)
	}
	if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	return fmt.Errorf("%s: %w", c.path, err)
}
