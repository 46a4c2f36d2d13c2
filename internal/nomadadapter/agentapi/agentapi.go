// Package agentapi follows, by the HTTP API of the node's Nomad agent, which allocations have which devices.
package agentapi

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Options configure a Client.
type Options struct {
	Address   string // http://HOST:PORT, https://HOST:PORT, unix:///PATH
	TokenFile string // file with an ACL token, read again for each request; "" = Token
	Token     string // "" = none

	// Devices returns those of this node. It makes Address one that is not configured: the agent there counts only if its Nomad node has one of
	// them, and without any it is not asked. nil = the address is configured.
	Devices func() map[gpu.DeviceID]gpu.Placement

	Log *slog.Logger

	// LookupEnv returns NOMAD_CACERT, NOMAD_CLIENT_CERT and NOMAD_CLIENT_KEY, the files for https that Nomad's own programs use.
	LookupEnv func(string) (string, bool)
}

const (
	// waitTime is how long the agent keeps a query open if nothing changes, and answerTime what it may take beyond that: Nomad adds up to
	// a sixteenth (nomad/blocking_query.go).
	waitTime   = time.Minute
	answerTime = 15 * time.Second

	minPause = 500 * time.Millisecond // between two queries
	maxPause = 10 * time.Second       // after failures, doubled from minPause; and after an answer that took long to read

	// guessPause is in place of maxPause after guessFailures in a row, about two minutes, of an agent of which it is not proven that it is this
	// node's: by then Nomad has started, and lists the devices.
	guessPause    = time.Minute
	guessFailures = 15

	// devicesPause is between two looks at whether there are devices, without which such an agent is not asked.
	devicesPause = 2 * time.Second

	// startFailures are the first failures in a row that are not logged before the first answer, about 7 s: Nomad starts its plugins before its
	// API listens.
	startFailures = 3
)

// Client follows the allocations of the node. Make one with New. Read may be called from any goroutine; Run is called once.
type Client struct {
	log   *slog.Logger
	base  string // URL without a path
	http  *http.Client
	guess *guess // nil = the address is configured

	token func() (string, error)

	mu       sync.Mutex
	latest   holders.Record   // not changed
	err      error            // why latest is not current
	seen     []holders.Holder // see Seen
	logged   []failure        // kinds of errors since the latest answer that were logged; nil = none
	reserved map[inventory.UnitID]reservation

	wanted    chan struct{} // a confirmation is wanted
	confirmed Confirmation
}

// errFirst is before the first answer, or the first failure.
var errFirst = errors.New("the Nomad agent has not answered yet")

// New returns a client. It connects to nothing. An error of the files for https is that of each Read.
func New(o Options) *Client {
	c := &Client{
		log: o.Log, base: strings.TrimSuffix(o.Address, "/"), err: errFirst, token: tokenIn(o.TokenFile, o.Token), wanted: make(chan struct{}, 1),
		reserved: map[inventory.UnitID]reservation{},
	}
	if o.Devices != nil {
		c.guess = &guess{devices: o.Devices}
	}
	if path, ok := strings.CutPrefix(o.Address, "unix://"); ok {
		c.base = "http://nomad"
		c.http = newHTTP(unixTransport(path))
		return c
	}
	transport, err := newTransport(o.LookupEnv)
	if err != nil {
		c.err = err
		return c
	}
	c.http = newHTTP(transport)
	return c
}

// Run follows the allocations until ctx ends. It calls changed when other work has devices, and when that is known again or not any more.
//
//	client  query index 7 ........ answer: index 9  query index 9 .....................
//	agent                 ^ an allocation changes                  nothing for waitTime: the same index
func (c *Client) Run(ctx context.Context, tasks *watchdog.Registry, changed func()) {
	if c.http == nil {
		c.log.Warn("owners of devices: Nomad agent's API not used", "error", c.err)
		return
	}
	task := tasks.Register("nomad agent API")
	defer task.Done()
	defer c.http.CloseIdleConnections()
	var confirming sync.WaitGroup
	defer confirming.Wait()
	confirming.Go(func() { c.confirm(ctx, tasks) })
	f := follower{Client: c}
	reconcile.Loop{Task: task, Limit: waitTime + answerTime}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		latest, err := f.next(ctx)
		if ctx.Err() != nil {
			return reconcile.Never
		}
		pause := f.pause(err)
		if c.record(latest, err, f.failures) {
			changed()
		}
		return pause
	})
}

// record stores an answer, or the error of that many failures in a row. It logs each kind of error once until the API works again, and that
// it does. It reports whether other work has devices, or that is not known any more.
func (c *Client) record(latest answer, err error, failures int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.err
	if err != nil {
		return c.fail(err, c.latest.Work == nil && failures <= startFailures)
	}
	c.err = nil
	if was != nil {
		c.logged = nil
		c.log.Info("owners of devices: Nomad agent's API available", "address", c.base)
	}
	missing := latest.record.Missing
	switch missing {
	case c.latest.Missing:
	case "":
		c.log.Info("owners of devices: all allocations are shown", "address", c.base)
	default:
		c.log.Warn("owners of devices: allocations may be hidden", "address", c.base, "reason", missing)
	}
	changed := was != nil || !slices.Equal(latest.record.Holders, c.latest.Holders) || missing != c.latest.Missing
	c.latest = latest.record
	c.endReservations(latest)
	c.see(latest.record, false)
	return changed
}

// fail stores an error. While Nomad starts, that of a guess is not shown. c.mu is locked.
func (c *Client) fail(err error, starting bool) (changed bool) {
	was, proven := c.err, c.guess.proven()
	if !starting || proven {
		c.err = err
	}
	kind := failureOf(err)
	if starting || slices.Contains(c.logged, kind) {
		return was == nil
	}
	c.logged = append(c.logged, kind)
	if c.isUnread() {
		r := c.unread()
		c.log.Info("owners of devices: Nomad agent's API not used", "address", c.base, "reason", r.Missing, "remedy", r.Remedy)
	} else {
		c.log.Warn("owners of devices: Nomad agent's API unavailable", "address", c.base, "error", err)
	}
	return was == nil || !proven
}

// Read returns the latest answer, as a usage.Holders. It makes no call.
func (c *Client) Read(context.Context, *inventory.Allocatable) (holders.Record, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.isUnread():
		return c.unread(), nil
	case errors.Is(c.err, errFirst):
		return c.withReserved(holders.Record{}), nil // there will be one in a moment
	case c.err != nil:
		return holders.Record{}, c.err
	}
	return c.withReserved(c.latest), nil
}

// answer is what the servers have of the node.
type answer struct {
	allocations []allocation
	record      holders.Record
	took        time.Duration // to read it
	asked       time.Time     // of the leader; zero = the answer is perhaps of another server, which lags behind
}

// newAnswer makes the record: the devices of the allocations that have not ended. It has all allocations that the token may read and that the
// servers have not removed, so work that it lacks may run.
func newAnswer(all []allocation, hidden string) answer {
	r := holders.Record{Complete: hidden == "", Missing: hidden, Work: map[string]holders.Work{}, Tasks: map[holders.Work]holders.Task{}}
	for i := range all {
		a := &all[i]
		owner := holders.Work{Orchestrator: holders.Nomad, Namespace: a.Namespace, Name: a.JobID, ID: a.ID}
		r.Work[a.ID] = owner
		if !a.live() {
			continue
		}
		for _, task := range slices.Sorted(maps.Keys(a.AllocatedResources.Tasks)) {
			owner.Container = task
			for _, d := range a.AllocatedResources.Tasks[task].Devices {
				for _, h := range d.holds(owner) {
					r.Holders = append(r.Holders, h)
					r.Began(h.Device, a.placed())
					r.Tasks[h.Work] = a.task(task)
				}
			}
		}
	}
	return answer{allocations: all, record: r}
}

// task is what is recorded of a task (structs.TaskStateRunning).
func (a *allocation) task(name string) holders.Task {
	t := holders.Task{Running: a.TaskStates[name].State == "running"}
	if a.Job == nil {
		return t
	}
	for _, g := range a.Job.TaskGroups {
		if g.Name != a.TaskGroup {
			continue
		}
		for _, one := range g.Tasks {
			if one.Name == name {
				t.Driver = one.Driver
			}
		}
	}
	return t
}

// live reports whether the allocation has not ended, by its client (structs.AllocClientStatus*).
func (a *allocation) live() bool {
	return slices.Contains([]string{"pending", "running", "unknown"}, a.ClientStatus)
}

// placed is when the servers gave the allocation its devices; zero = not known.
func (a *allocation) placed() time.Time {
	if a.CreateTime <= 0 {
		return time.Time{}
	}
	return time.Unix(0, a.CreateTime)
}

func (d device) holds(owner holders.Work) []holders.Holder {
	if d.Vendor != vendor {
		return nil
	}
	var holds []holders.Holder
	for _, id := range d.DeviceIDs {
		holds = append(holds, holders.Holder{Work: owner, API: inventory.Nomad, Resource: d.Vendor + "/" + d.Type, Unit: inventory.UnitID(id), Device: deviceOf(id)})
	}
	return holds
}

const vendor = "nvidia" // of device groups

// deviceOf is the device that has an ID in Nomad, of itself or of a share.
func deviceOf(id string) gpu.DeviceID {
	device, _ := inventory.UnitID(id).Split()
	return device
}
