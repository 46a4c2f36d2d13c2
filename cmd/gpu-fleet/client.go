package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/fleet/config"
)

const (
	answerWithin = 30 * time.Second // a stop is written to the ledger first, which is in a cluster
	maxAnswer    = 64 << 20         // bytes: a node with GPUs takes some KiB
	maxToken     = 64 << 10
)

// client asks the gpu-fleet that runs, any of a team.
type client struct {
	base  string // address as a URL
	token string // "" = none
}

// newClient is a client for the address and the file with the token that are given, else for those of the configuration as far as it can be read: a stop
// must not depend on a file that a person is changing.
func (p *program) newClient() (client, error) {
	configured, _ := config.Load(p.file)
	base, err := baseURL(cmp.Or(p.address, local(configured.Listen)))
	if err != nil {
		return client{}, err
	}
	path := cmp.Or(p.tokenFile, configured.TokenFile)
	if path == "" {
		return client{base: base}, nil
	}
	token, err := readToken(path)
	if err != nil && p.tokenFile == "" {
		return client{base: base}, nil // it may be readable by the service alone: commands that need no token work
	}
	return client{base, token}, err
}

// baseURL is the URL of an address: host and port, or a URL itself.
func baseURL(address string) (string, error) {
	text := address
	if !strings.Contains(text, "://") {
		text = "http://" + text
	}
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", command.Usagef("--address = %q: want host and port such as %s, or a URL", address, config.DefaultListen)
	}
	return strings.TrimSuffix(text, "/"), nil
}

// local is the address by which a process of this node reaches a server that listens at an address.
func local(listen string) string {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return config.DefaultListen
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

func readToken(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	defer func() { _ = f.Close() }()
	text, err := io.ReadAll(io.LimitReader(f, maxToken))
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	token := strings.TrimSpace(string(text))
	if token == "" {
		return "", fmt.Errorf("token file: %s has no token", path)
	}
	return token, nil
}

// get decodes the answer to a GET request.
func (c client) get(ctx context.Context, path string, into any) error {
	body, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%s%s is no answer of gpu-fleet: %w", c.base, path, err)
	}
	return nil
}

// post sends a value as JSON.
func (c client) post(ctx context.Context, path string, value any) error {
	body, err := json.Marshal(value)
	if err != nil {
		return err
	}
	_, err = c.do(ctx, http.MethodPost, path, body)
	return err
}

// do makes a request, and returns the body of its answer.
func (c client) do(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" && method == http.MethodPost {
		r.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, fmt.Errorf("no gpu-fleet answers at %s: %w: want --address of one that runs%s", c.base, cause(err), orLedger(method))
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("answer of %s: %w", c.base, err)
	}
	return answer, c.refused(resp, answer)
}

// orLedger is what else works for a request that changes something.
func orLedger(method string) string {
	if method == http.MethodPost {
		return ", or --ledger"
	}
	return ""
}

// cause is the error without method and URL.
func cause(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		return u.Err
	}
	return err
}

// refused is the error of an answer; nil = the request was served.
func (c client) refused(resp *http.Response, answer []byte) error {
	if resp.StatusCode < http.StatusBadRequest {
		return nil
	}
	text := strings.Join(strings.Fields(string(answer)), " ")
	text = cmp.Or(text, resp.Status)
	if resp.StatusCode == http.StatusUnauthorized {
		return fmt.Errorf("%s: %s: want --token-file with the token of that process's token_file, or --ledger", c.base, text)
	}
	return fmt.Errorf("%s: %s", c.base, text)
}
