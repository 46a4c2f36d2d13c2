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
	clientTimeout = 10 * time.Second // more than the agent's requestTimeout
	maxResponse   = 16 << 20         // bytes
)

// Client sends requests to a running agent. It is safe for concurrent use. Requests take at most ten seconds; they fail
// with ErrNotRunning if no agent runs, with *NotServedError if it does not serve its socket, and with *RefusedError if it
// rejects the command.
type Client struct {
	path string
	http http.Client
}

// Dial returns the client of the agent at path. It connects with the first request.
func Dial(path string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	return &Client{path, http.Client{
		Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: clientTimeout,
	}}
}

// Report returns the state of the agent.
func (c *Client) Report(ctx context.Context) (r report.Report, err error) {
	return r, c.do(ctx, http.MethodGet, reportURL, nil, &r)
}

// call sends a request to the agent at path and returns its result; without args it is a GET request.
func call[R any](ctx context.Context, path, url string, args any) (result R, err error) {
	method := http.MethodPost
	if args == nil {
		method = http.MethodGet
	}
	return result, Dial(path).do(ctx, method, url, args, &result)
}

func (c *Client) do(ctx context.Context, method, path string, args, result any) error {
	if c.path == "" {
		return fmt.Errorf("%w with a control socket: no state_dir is set", ErrNotRunning)
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
	resp, err := c.http.Do(r)
	if err != nil {
		return c.dialError(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err = io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	if err != nil {
		return fmt.Errorf("%s: %w", c.path, err)
	}
	if resp.StatusCode != http.StatusOK {
		var e errorBody
		if json.Unmarshal(body, &e) != nil || e.Error == "" {
			e.Error = fmt.Sprintf("%s: %s: %s", c.path, resp.Status, strings.TrimSpace(string(body)))
		}
		return &RefusedError{resp.StatusCode, e.Error}
	}
	if err := json.Unmarshal(body, result); err != nil {
		return fmt.Errorf("%s: %w", c.path, err)
	}
	return nil
}

// dialError replaces an error of net/http by a shorter one with the remedy.
func (c *Client) dialError(err error) error {
	for _, noListener := range []error{syscall.ENOENT, syscall.ENOTDIR, syscall.ECONNREFUSED} {
		if errors.Is(err, noListener) && filelock.IsHeld(lockPath(c.path)) {
			return &NotServedError{c.path}
		} else if errors.Is(err, noListener) {
			return fmt.Errorf("%w: no process serves %s", ErrNotRunning, c.path)
		}
	}
	if errors.Is(err, syscall.EACCES) {
		return fmt.Errorf("%s: %w: run the command as the agent's user", c.path, syscall.EACCES)
	}
	if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	return fmt.Errorf("%s: %w", c.path, err)
}
