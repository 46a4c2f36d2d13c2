package agentapi

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
)

// allocation is what is needed of a Nomad allocation (api.Allocation).
type allocation struct {
	ID                 string
	Namespace          string
	JobID              string
	ClientStatus       string
	CreateTime         int64 // when the servers placed it, ns since 1970
	AllocatedResources struct {
		Tasks map[string]struct{ Devices []device }
	}
	TaskStates map[string]struct {
		State      string
		FinishedAt time.Time
	}
	TaskGroup string
	Job       *struct { // as it was when the allocation was placed
		TaskGroups []struct {
			Name  string
			Tasks []struct{ Name, Driver string }
		}
	}
}

// device is api.AllocatedDeviceResource.
type device struct {
	Vendor, Type, Name string
	DeviceIDs          []string
}

// maxAnswer limits an answer in bytes: 150,000 allocations of some 6 kB, most of which is the job.
const maxAnswer = 1 << 30

// follower makes the queries, one at a time. It belongs to Run.
type follower struct {
	*Client
	node     string        // ID; "" = not known
	index    uint64        // of the latest answer
	took     time.Duration // to read it
	failures int           // in a row
}

// pause counts the failures, and returns the pause until the next query: the longer the more allocations there are, so that reading them takes a tenth of the time of a
// CPU at most.
func (f *follower) pause(err error) time.Duration {
	if err == nil {
		f.failures = 0
		return min(max(minPause, pauseRatio*f.took), maxPause)
	}
	f.node, f.index = "", 0 // another agent may answer next
	if errors.Is(err, errNoDevices) {
		f.failures = 0
		return devicesPause
	}
	f.failures++
	if f.failures > guessFailures && !f.guess.proven() {
		return guessPause
	}
	return min(minPause<<min(f.failures, 10), maxPause)
}

// next makes the next query. It returns when the allocations have changed, or after waitTime.
func (f *follower) next(ctx context.Context) (latest answer, err error) {
	ctx, cancel := context.WithTimeout(ctx, waitTime+answerTime)
	defer cancel()
	c, err := f.withToken()
	if err != nil {
		return answer{}, err
	}
	if f.node == "" {
		if f.node, err = c.thisNode(ctx); err != nil {
			return answer{}, err
		}
	}
	query := url.Values{"stale": {""}, "index": {strconv.FormatUint(f.index, 10)}, "wait": {waitTime.String()}}
	latest, index, err := c.allocations(ctx, f.node, "?"+query.Encode())
	if err != nil {
		return answer{}, err
	}
	f.took = latest.took
	if index < f.index { // the servers were restored from a snapshot: the next query must not wait for the old index
		index = 0
	}
	f.index = index
	return latest, nil
}

// allocations makes one query for the allocations of a node. The servers resolve the token when it begins, and it may wait for a minute: the
// answer lacks what the token could not read by then, and has what it can't read any more.
func (c *Client) allocations(ctx context.Context, node, query string) (is answer, index uint64, err error) {
	hidden := c.hidden(ctx)
	var all []allocation
	var took time.Duration
	index, err = c.read(ctx, "/v1/node/"+url.PathEscape(node)+"/allocations"+query, func(d *json.Decoder) (err error) {
		all, took, err = readAllocations(ctx, d)
		return err
	})
	if err != nil {
		return answer{}, 0, err
	}
	if hidden == "" { // it may have lost something before the query began
		hidden = c.hidden(ctx)
	}
	is = newAnswer(all, hidden)
	is.took = took
	return is, index, nil
}

// withToken is a client for the requests of one answer: all have the same token, also if its file is replaced meanwhile.
func (c *Client) withToken() (*Client, error) {
	token, err := c.token()
	return &Client{base: c.base, http: c.http, guess: c.guess, token: func() (string, error) { return token, nil }}, err
}

// get makes one request, and returns the index of the answer.
func (c *Client) get(ctx context.Context, path string, into any) (index uint64, err error) {
	return c.read(ctx, path, func(d *json.Decoder) error { return d.Decode(into) })
}

// read is get with a function that reads the answer.
func (c *Client) read(ctx context.Context, path string, decode func(*json.Decoder) error) (index uint64, err error) {
	token, err := c.token()
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+path, nil)
	if err != nil {
		return 0, err
	}
	if token != "" {
		req.Header.Set("X-Nomad-Token", token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if inner, ok := errors.AsType[*url.Error](err); ok {
			err = inner.Err // without the URL, which has an index that changes
		}
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	body := io.LimitReader(resp.Body, maxAnswer)
	where, _, _ := strings.Cut(path, "?")
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(body, 512))
		remedy := ""
		switch {
		case resp.StatusCode == http.StatusForbidden, bytes.Contains(text, []byte("ACL token")): // 500 with a text that is no token's form
			remedy = ": the ACL token must allow agent:read, node:read and namespace read-job"
		case resp.StatusCode == http.StatusNotFound:
			remedy = ": is this the address of the node's Nomad agent?"
		}
		return 0, &statusError{code: resp.StatusCode, text: fmt.Sprintf("GET %s: %s (%s)%s", where, resp.Status, strings.TrimSpace(string(text)), remedy)}
	}
	if err := decode(json.NewDecoder(body)); err != nil {
		return 0, fmt.Errorf("GET %s: %w", where, err)
	}
	index, _ = strconv.ParseUint(cmp.Or(resp.Header.Get("X-Nomad-Index"), "0"), 10, 64) // without one the next query does not wait
	return index, nil
}

// statusError is an answer with an HTTP status other than 200.
type statusError struct {
	code int
	text string
}

func (e *statusError) Error() string { return e.text }

// failure is a kind of error: the HTTP status, or one of those below. The texts of one kind can differ each time, such as by a port.
type failure int

const (
	failedAnswer failure = iota // no answer, or none that can be read
	failedToken                 // the file of the token can't be read
)

func failureOf(err error) failure {
	if e, ok := errors.AsType[*statusError](err); ok {
		return failure(e.code)
	}
	if _, ok := errors.AsType[*fs.PathError](err); ok {
		return failedToken
	}
	return failedAnswer
}

// tokenIn returns a function that reads a token from a file; without one it is the token given.
func tokenIn(path, token string) func() (string, error) {
	return func() (string, error) {
		if path == "" {
			return token, nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("ACL token: %w", err)
		}
		return strings.TrimSpace(string(text)), nil
	}
}
