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

	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/httpserver"
)

const (
	clientTimeout = 10 * time.Second // more than the agent's requestTimeout
	maxResponse   = 16 << 20         // bytes
)

// Report returns the state of the agent at path. It takes at most ten seconds, as all requests do. They fail with ErrNotRunning
// if no agent runs, with *NotServedError if it does not serve its socket, and with *RefusedError if it rejects the command.
func Report(ctx context.Context, path string) (report.Report, error) {
	return call[report.Report](ctx, path, reportURL, nil)
}

// Ownership returns what the agent at path reads of the ownership of its GPUs. Its errors are those of Report.
func Ownership(ctx context.Context, path string) (ownership.Facts, error) {
	return call[ownership.Facts](ctx, path, ownershipURL, nil)
}

// call sends a request to the agent at path and returns its result; without args it is a GET request.
func call[R any](ctx context.Context, path, url string, args any) (result R, err error) {
	body, err := send(ctx, path, url, args)
	if err != nil {
		return result, err
	}
	if err := json.Unmarshal(body, &result); err != nil {
		return result, fmt.Errorf("%s: %w", path, err)
	}
	return result, nil
}

// send returns the body of the response.
func send(ctx context.Context, path, url string, args any) ([]byte, error) {
	if path == "" {
		return nil, fmt.Errorf("%w with a control socket: no state_dir is set", ErrNotRunning)
	}
	if err := checkPath(path); err != nil {
		return nil, err
	}
	body, err := json.Marshal(args)
	if err != nil {
		return nil, err
	}
	method := http.MethodPost
	if args == nil {
		method = http.MethodGet
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://agent"+url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	client := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: clientTimeout}
	resp, err := client.Do(r)
	if err != nil {
		return nil, dialError(path, err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err = io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if resp.StatusCode != http.StatusOK {
		var e errorBody
		if json.Unmarshal(body, &e) != nil || e.Error == "" {
			e.Error = fmt.Sprintf("%s: %s: %s", path, resp.Status, strings.TrimSpace(string(body)))
		}
		return nil, &RefusedError{resp.StatusCode, e.Error}
	}
	return body, nil
}

// dialError replaces an error of net/http by a shorter one with the remedy.
func dialError(path string, err error) error {
	for _, noListener := range []error{syscall.ENOENT, syscall.ENOTDIR, syscall.ECONNREFUSED} {
		if !errors.Is(err, noListener) {
			continue
		}
		if held, _ := filelock.IsHeld(httpserver.LockPath(path)); held {
			return &NotServedError{path}
		}
		return fmt.Errorf("%w: no process serves %s", ErrNotRunning, path)
	}
	if errors.Is(err, syscall.EACCES) {
		return fmt.Errorf("%s: %w: run the command as the agent's user", path, syscall.EACCES)
	}
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err
	}
	return fmt.Errorf("%s: %w", path, err)
}
