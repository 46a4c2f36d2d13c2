package podresources

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Options configure a Poller.
type Options struct {
	Socket     string // of the pod-resources API; "" = it is not called
	Checkpoint string // path of the checkpoint of the kubelet's device manager; "" = it is not read
	InPod      bool   // this process is in a pod of the kubelet: an answer without a pod is not complete
	Log        *slog.Logger

	Uptime func() (time.Duration, bool) // of the node; nil = it started long ago
}

// Timings are the durations of a Poller. They are not configurable.
type Timings struct {
	Query       time.Duration // timeout of one List
	Get         time.Duration // timeout of one Get, for which the kubelet waits
	MinInterval time.Duration // between two readings
	MaxInterval time.Duration // between two readings; grows to this after each request
	Active      time.Duration // after a request; then readings need a reason
	Startup     time.Duration // of a kubelet: until then it may not have received all pods from the API server
}

// DefaultTimings are those of an agent.
var DefaultTimings = Timings{
	Query: 2 * time.Second, Get: time.Second, MinInterval: 100 * time.Millisecond, MaxInterval: time.Minute, Active: 5 * time.Minute,
	Startup: 2 * time.Minute,
}

// Reading is what the kubelet had recorded of pods and their devices at one time. It is immutable.
type Reading struct {
	Began time.Time // of the List; the zero Reading is none
	Err   error     // why there is no answer

	// Answer is the latest one: of this reading without an Err.
	Answer   Answer
	Complete bool               // Answer has all pods, and is of this reading
	Kubelet  statefile.Identity // of the socket of Answer: another one after each restart of the kubelet
	Claims   []Claim            // of containers, by Answer and by the latest complete one

	AnsweredAt time.Time // of the latest answer; zero = none
	CompleteAt time.Time // of the latest complete answer; zero = none

	Checkpoint    Checkpoint // read after the answer
	CheckpointErr error      // why Checkpoint is not known
}

// staleAfter is the age at which a reading is not one of now.
const staleAfter = 10 * time.Second

// Stale returns why a reading does not show what pods have now: the kubelet did not answer, or there was no time at which it could be asked.
func (r Reading) Stale(ctx context.Context) error {
	switch {
	case r.Err != nil:
		return r.Err
	case ctx.Err() != nil:
		return ctx.Err()
	case r.AnsweredAt.IsZero() || time.Since(r.Began) > staleAfter:
		return errBusy
	}
	return nil
}

var errBusy = errors.New("the kubelet's list of pods can't be read: it is admitting pods without a pause")

// Poller is all that an agent reads of the kubelet's records: it calls List of the pod-resources API on request, and never while the
// kubelet gives a device of this agent out. Make one with New. Its methods are safe for concurrent use.
type Poller struct {
	opts     Options
	timings  Timings
	gate     gate
	readings *watch.Value[Reading]
	requests chan struct{} // capacity 1

	// Of the one reading that the gate admits at a time.
	ages       ages
	checkpoint checkpointReader
	hostname   string
	claims     []Claim // of the latest complete answer
	own        bool    // an answer had the pod of this process
}

// New returns a poller that has read nothing.
func New(o Options) *Poller { return NewWithTimings(o, DefaultTimings) }

// NewWithTimings returns a poller with other timings, for tests.
func NewWithTimings(o Options, t Timings) *Poller {
	hostname, _ := os.Hostname() // the name of its pod, unless that has the host's network
	return &Poller{
		opts: o, timings: t, readings: watch.NewValue(Reading{}), requests: make(chan struct{}, 1), hostname: hostname,
		ages: ages{uptime: o.Uptime}, checkpoint: checkpointReader{path: o.Checkpoint},
	}
}

// Configured reports whether there is an API to read.
func (p *Poller) Configured() bool { return p.opts.Socket != "" }

// Request makes a reading follow soon. It never blocks.
func (p *Poller) Request() { watch.Notify(p.requests) }

// Latest returns the latest reading.
func (p *Poller) Latest() Reading { return p.readings.Load() }

// LoadNext returns the latest reading and a channel that is closed when there is a newer one.
func (p *Poller) LoadNext() (Reading, <-chan struct{}) { return p.readings.LoadNext() }

// Run reads on request, and regularly while needed returns true or the kubelet does not answer, until ctx ends.
func (p *Poller) Run(ctx context.Context, needed func() bool, task *watchdog.Task) {
	defer task.Done()
	requested := time.Now() // the latest time
	// The kubelet may admit pods for any time, so a pass has no limit.
	reconcile.Loop{On: []reconcile.Source{reconcile.Signal(p.requests)}, Task: task}.Run(ctx, func(ctx context.Context, cause reconcile.Cause) time.Duration {
		if cause == reconcile.Change {
			requested = time.Now()
		}
		if cause != reconcile.Start {
			p.Read(ctx)
			watch.Sleep(ctx, p.timings.MinInterval)
		}
		return p.untilReading(time.Since(requested), needed())
	})
}

// untilReading returns the time to the next reading, given the time since the latest request.
func (p *Poller) untilReading(sinceRequest time.Duration, needed bool) time.Duration {
	switch {
	case p.Configured() && sinceRequest < p.timings.Active:
		return min(max(sinceRequest, p.timings.MinInterval), p.timings.MaxInterval)
	case needed, p.Configured() && p.Latest().Err != nil:
		return p.timings.MaxInterval
	default:
		return reconcile.Never
	}
}

// Read makes a reading when no call of the kubelet is under way, and returns it. After the end of ctx it returns the latest one.
func (p *Poller) Read(ctx context.Context) Reading {
	if !p.gate.beginList(ctx) {
		return p.Latest()
	}
	defer p.gate.endList()
	return p.read(ctx)
}

// Fresh returns a reading that began at most maxAge ago, which it makes if there is none.
func (p *Poller) Fresh(ctx context.Context, maxAge time.Duration) Reading {
	if r := p.Latest(); !r.Began.IsZero() && time.Since(r.Began) <= maxAge {
		return r
	}
	return p.Read(ctx)
}

// Call is a call of the kubelet to one of its device plugins in this process, during which no List begins. The zero value must not be used.
type Call struct {
	poller *Poller
	leave  func()
}

// BeginCall waits for a List that is under way. End must follow.
func (p *Poller) BeginCall(ctx context.Context) Call { return Call{p, p.gate.enter(ctx)} }

// End ends the call, before it is answered.
func (c Call) End() { c.leave() }

// Calls is the number of calls that are under way.
func (p *Poller) Calls() int { return p.gate.underWay() }

// Read makes a reading within GetPreferredAllocation. The kubelet has marked no device for which it waits, and can't lose any: it takes the
// devices after the answer. (With a topology policy it may have marked some of them.) While another call is under way, for which it may have
// marked devices, and while a reading is made, Read returns the latest one.
func (c Call) Read(ctx context.Context) Reading {
	if !c.poller.gate.tryListAlone() {
		return c.poller.Latest()
	}
	defer c.poller.gate.endList()
	return c.poller.read(ctx)
}

// read makes a reading, which the gate has admitted.
func (p *Poller) read(ctx context.Context) Reading {
	next, was := p.Latest(), p.Latest()
	next.Began, next.Err, next.Complete = time.Now(), nil, false
	if p.Configured() {
		limit, cancel := context.WithTimeout(ctx, p.timings.Query)
		p.list(limit, &next)
		cancel()
		if ctx.Err() != nil {
			return was
		}
		p.logAnswer(was, next)
	}
	if p.opts.Checkpoint != "" {
		next.Checkpoint, next.CheckpointErr = p.checkpoint.read()
	}
	p.readings.Store(next)
	return next
}

// list calls List for a reading. If the kubelet restarts meanwhile, the answer may be that of the new one, and is not complete:
//
//	agent      socket of the old kubelet . . . . . . . List, answered by the new one
//	kubelet                                ends, starts
func (p *Poller) list(ctx context.Context, r *Reading) {
	age, kubelet := p.ages.of(p.opts.Socket)
	answer, err := List(ctx, p.opts.Socket)
	if err != nil {
		r.Err = err
		return
	}
	own := p.opts.InPod && slices.ContainsFunc(answer.Names, p.isOwn)
	p.own = p.own || own
	r.Answer, r.Kubelet, r.AnsweredAt = answer, kubelet, time.Now()
	same := statefile.IdentityOf(p.opts.Socket) == kubelet
	r.Complete = same && age >= p.timings.Startup && own == p.own && (answer.Pods > 0 || !p.opts.InPod)
	if r.Complete {
		r.CompleteAt, p.claims = r.AnsweredAt, nil
	}
	r.Claims = slices.Concat(p.claims, answer.Claims)
	if r.Complete {
		p.claims = answer.Claims
	}
}

// isOwn reports whether a pod has the name of this process's host, in any namespace, as that of its own is not known: the end of another pod of that
// name must not make all answers incomplete. A kubelet that does not list the agent's own pod has not received its pods from the API server.
func (p *Poller) isOwn(pod string) bool {
	_, name, _ := strings.Cut(pod, "/")
	return name == p.hostname
}

// logAnswer logs whether the kubelet answers, when that changes.
func (p *Poller) logAnswer(was, is Reading) {
	switch {
	case is.Err == nil && (was.Err != nil || was.AnsweredAt.IsZero()):
		p.opts.Log.Info("pod-resources API available", "socket", p.opts.Socket)
	case is.Err != nil && (was.Err == nil || was.Began.IsZero()):
		p.opts.Log.Info("pod-resources API unavailable: devices that pods hold are not known", "socket", p.opts.Socket, "error", is.Err)
	}
}

// Absent reports whether no answer is to be expected: the API is not configured, or the folder of its socket is missing.
func (p *Poller) Absent() bool {
	return !p.Configured() || errors.Is(p.Latest().Err, ErrNoDirectory)
}

// Key is a device ID of a resource.
type Key struct{ Resource, ID string }

// Has calls Get for pods, and returns which device IDs they have now, with the pod. It changes nothing in the kubelet. Pods that the kubelet does
// not have any more are left out. The error is that of an API that does not answer.
func (p *Poller) Has(ctx context.Context, pods []string) (map[Key]string, error) {
	if err := p.Latest().Err; err != nil { // the kubelet waits for the caller
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, p.timings.Get)
	defer cancel()
	has := map[Key]string{}
	for _, pod := range pods {
		all, err := devicesOf(ctx, p.opts.Socket, pod)
		if err != nil && !answered(err) {
			p.Request() // which finds out that there are no answers
			return has, err
		}
		for _, d := range all {
			has[Key{d.Resource, d.ID}] = pod
		}
	}
	return has, nil
}
