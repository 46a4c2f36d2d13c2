package component

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
)

const maxAnswer = 1 << 20 // bytes

// NotServedError is that a component has not served a request: it does not run, or refuses the request as such. Nothing was done.
type NotServedError struct{ Err error }

func (e *NotServedError) Error() string { return e.Err.Error() }

func (e *NotServedError) Unwrap() error { return e.Err }

// Call sends a request to the component at a socket, and stores what it answers. It fails with *NotServedError if nothing was done. After any other error the
// component may have done what it was asked for, or a part of it. header is that of the response, if one began.
func Call(ctx context.Context, socket, path string, request, answer any) (header http.Header, err error) {
	body, err := json.Marshal(request)
	if err != nil {
		return nil, &NotServedError{err}
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://component"+path, bytes.NewReader(body))
	if err != nil {
		return nil, &NotServedError{err}
	}
	connected := false
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
		connected = err == nil
		return conn, err
	}}}
	resp, err := client.Do(r)
	if err != nil {
		if wrapped, ok := errors.AsType[*url.Error](err); ok {
			err = wrapped.Err
		}
		if err = fmt.Errorf("%s: %w", socket, err); !connected {
			err = &NotServedError{err}
		}
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	switch {
	case err == nil && resp.StatusCode != http.StatusOK:
		return resp.Header, &NotServedError{fmt.Errorf("%s: %s: %s", socket, resp.Status, strings.TrimSpace(string(text)))}
	case err == nil:
		err = json.Unmarshal(text, answer)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", socket, err)
	}
	return resp.Header, err
}
