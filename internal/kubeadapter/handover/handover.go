package handover

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Intervals, which are not configurable.
const (
	pendingEvery = time.Second     // between looks at what is not known yet, after a start
	changeAfter  = 5 * time.Second // between a write and one of another text; another status is written at once
	holdersEvery = 5 * time.Second // between looks at which pods have faulty GPUs
	guardEvery   = time.Hour       // between looks whether the admission policy is in force; only before a write
	retryFirst   = time.Second
	retryMost    = time.Minute
	passAtMost   = 2 * time.Minute // for a pass, before the watchdog reports it: several requests of 15 s
)

// API is the part of kubeapi.Client that a Handover uses.
type API interface {
	NodeConditions(ctx context.Context, name string) (kubeapi.ObjectMeta, []kubeapi.NodeCondition, error)
	PatchNodeStatus(ctx context.Context, name string, p kubeapi.NodePatch, w kubeapi.Write) error
	CreateEvent(ctx context.Context, e kubeapi.PodEvent) error
}

// Monitor has the state that a Handover follows.
type Monitor interface {
	State() core.State
	Changed() <-chan struct{} // closed when there is a newer inventory
	Watchdog() *watchdog.Registry
}

// Options configure a Handover.
type Options struct {
	API       API
	Node      string // name of the Node object
	Condition string // type of the condition
	Second    string // type of another one with the same meaning; "" = none
	Events    bool   // pods get events
	Boot      string // ID of the boot; "" = not known
	Mode      health.Mode
	Checks    func() uint64 // rounds of checks since the start

	// Devices are those that take work, by extended resource.
	Devices func(*inventory.Allocatable) map[string]int

	// Holders reads which pods have devices. It returns within some seconds: a fault waits for it.
	Holders func(context.Context, *inventory.Allocatable) (holders.Record, error)

	Record *Record      // of the conditions that the Node has from this agent; nil = none is kept
	Log    *slog.Logger // required
}

// Handover keeps condition, annotation and events in step with the faults. Make one with New, then call Run once. Problems is safe for concurrent
// use.
//
// When it ends, all stays as it is: another agent follows, after an upgrade. What an agent without hand-over, or with other condition types, finds
// in the Record is removed by TakeBack.
type Handover struct {
	opts     Options
	begun    time.Time
	problems problemset.Set

	// Of the goroutine of Run.

	shown   *shown    // what the Node has; nil = not read yet
	guarded time.Time // when the admission policy was in force last; zero = it was not
	told    map[string]bool
}

// shown is what the Node has from this agent, or from the one before it.
type shown struct {
	conditions map[string]kubeapi.NodeCondition // by type
	annotation bool
	faults     []faultreport.Fault // as this process has written them
	devices    map[string]int      // the same
	at         time.Time           // of the latest write of this process; zero = none
}

// New returns a Handover. It reads and writes nothing.
func New(o Options) *Handover {
	return &Handover{opts: o, begun: time.Now().Truncate(time.Millisecond), problems: problemset.Set{Log: o.Log}, told: map[string]bool{}}
}

// Problems has what keeps faults from being reported.
func (h *Handover) Problems() []problem.Problem { return h.problems.List() }

// Run keeps the Node in step until ctx ends.
func (h *Handover) Run(ctx context.Context, m Monitor) {
	task := m.Watchdog().Register("hand-over")
	defer task.Done()
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = retryFirst, retryMost
	reconcile.Loop{On: []reconcile.Source{m.Changed}, Task: task, Limit: passAtMost}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		next, err := h.pass(ctx, m.State())
		if err == nil {
			retry.Reset()
			return next
		}
		wait := kubeapi.WaitAtLeast(err, retry.NextBackOff())
		if next > 0 { // only events failed
			wait = min(wait, next)
		}
		return wait
	})
}

// pass writes what differs. It returns when the next pass is due without a change; 0 = the Node could not be written.
func (h *Handover) pass(ctx context.Context, s core.State) (time.Duration, error) {
	v := Of(s, h.opts.Mode, time.Now(), Begun{h.begun, h.opts.Checks()})
	if v.Pending {
		return pendingEvery, nil
	}
	var record holders.Record
	if len(v.Faults) > 0 {
		record = h.holders(ctx, s.Allocatable)
		v.Faults, v.Devices = held(v.Faults, record), h.opts.Devices(s.Allocatable)
	}
	next, err := h.write(ctx, v)
	if err == nil && len(v.Faults) > 0 {
		next = min(next, holdersEvery)
	}
	h.report(ctx, "", err)
	if err != nil || !h.opts.Events {
		return next, err
	}
	err = h.notify(ctx, v.Faults, record)
	h.report(ctx, "events", err)
	return next, err
}

// holders returns the located record of the pods that have devices. One that can't be read is not complete.
func (h *Handover) holders(ctx context.Context, inv *inventory.Allocatable) holders.Record {
	r, err := h.opts.Holders(ctx, inv)
	if err != nil {
		r.Complete = false
	}
	return r.Locate(inv.Placements())
}

// write writes a verdict to the Node if that has another one, or faults are due for renewal.
func (h *Handover) write(ctx context.Context, v Verdict) (time.Duration, error) {
	if err := h.read(ctx); err != nil {
		return 0, err
	}
	wait, due := h.due(v, time.Now())
	if !due {
		return wait, nil
	}
	if err := h.checkGuard(ctx); err != nil {
		return 0, err
	}
	if err := h.opts.Record.add(h.types()...); err != nil {
		return 0, err
	}
	now := time.Now()
	p, conditions, err := h.patch(v, now)
	if err != nil {
		return 0, err
	}
	if err := h.opts.API.PatchNodeStatus(ctx, h.opts.Node, p, kubeapi.Store); err != nil {
		h.guarded = time.Time{}
		if !denies(err) { // else the Node may have it all the same
			h.shown = nil
		}
		return 0, err
	}
	h.shown.conditions, h.shown.annotation, h.shown.faults, h.shown.devices, h.shown.at = conditions, len(v.Faults) > 0, v.Faults, v.Devices, now
	wait, _ = h.due(v, now)
	return wait, nil
}

// denies reports whether an error is the API server's word that it has not carried out a write: by RBAC, or by an admission policy.
func denies(err error) bool {
	answer, ok := errors.AsType[*kubeapi.StatusError](err)
	return ok && (answer.Code == http.StatusForbidden || answer.Code == http.StatusUnprocessableEntity)
}

// read reads what the Node has, once, and after a write that failed: no other program writes it.
func (h *Handover) read(ctx context.Context) error {
	if h.shown != nil {
		return nil
	}
	meta, conditions, err := h.opts.API.NodeConditions(ctx, h.opts.Node)
	if err != nil {
		return err
	}
	found := shown{conditions: map[string]kubeapi.NodeCondition{}}
	_, found.annotation = meta.Annotations[faultreport.Annotation]
	for _, c := range conditions {
		if slices.Contains(h.types(), c.Type) {
			found.conditions[c.Type] = c
		}
	}
	h.shown = &found
	return nil
}

// types are those of the conditions.
func (h *Handover) types() []string {
	return slices.DeleteFunc([]string{h.opts.Condition, h.opts.Second}, func(name string) bool { return name == "" })
}

// due reports whether a verdict is to be written now, and else when; reconcile.Never = not before a change. A node without GPUs has no condition.
func (h *Handover) due(v Verdict, now time.Time) (time.Duration, bool) {
	s := h.shown
	if v.GPUs == 0 && len(s.conditions) == 0 && !s.annotation {
		return reconcile.Never, false
	}
	differs := s.annotation != (len(v.Faults) > 0) ||
		len(v.Faults) > 0 && (!reflect.DeepEqual(s.faults, v.Faults) || !maps.Equal(s.devices, v.Devices))
	for _, name := range h.types() {
		has, ok := s.conditions[name]
		if !ok || has.Status != statusOf(name, v) {
			return 0, true
		}
		differs = differs || has.Reason != v.Reason || has.Message != v.Message
	}
	wait := reconcile.Never
	switch {
	case differs && s.at.IsZero():
		return 0, true
	case differs:
		wait = s.at.Add(changeAfter).Sub(now)
	case len(v.Faults) > 0:
		wait = s.at.Add(faultreport.Renewed).Sub(now)
	}
	if wait != reconcile.Never && wait <= 0 {
		return 0, true
	}
	return wait, false
}

// namesProblem reports whether a condition of a type is True while something is faulty. By the conventions of Kubernetes a condition of a Node names a
// problem, unless its type names the sound state.
func namesProblem(conditionType string) bool {
	for _, sound := range []string{"Healthy", "Ready"} {
		if before, ok := strings.CutSuffix(conditionType, sound); ok && !strings.HasSuffix(before, "Not") {
			return false
		}
	}
	return true
}

// statusOf is the status of a condition of a type.
func statusOf(conditionType string, v Verdict) kubeapi.ConditionStatus {
	switch {
	case v.Sound == kubeapi.ConditionUnknown || !namesProblem(conditionType):
		return v.Sound
	case v.Sound == kubeapi.ConditionTrue:
		return kubeapi.ConditionFalse
	}
	return kubeapi.ConditionTrue
}

// patch returns the patch of a verdict, with the conditions that the Node then has. The time of the transition changes only with the status:
// repair systems measure by it for how long a GPU has needed a repair.
func (h *Handover) patch(v Verdict, now time.Time) (kubeapi.NodePatch, map[string]kubeapi.NodeCondition, error) {
	var p kubeapi.NodePatch
	var text *string
	if len(v.Faults) > 0 {
		report, err := faultreport.Encode(faultreport.Report{At: now.UTC(), Boot: h.opts.Boot, Faults: v.Faults, Devices: v.Devices})
		if err != nil {
			return p, nil, err
		}
		text = &report
	}
	if text != nil || h.shown.annotation {
		p.Metadata.Annotations = map[string]*string{faultreport.Annotation: text}
	}
	seconds := now.UTC().Truncate(time.Second)
	conditions := maps.Clone(h.shown.conditions)
	for _, name := range h.types() {
		c := kubeapi.NodeCondition{
			Type: name, Status: statusOf(name, v), Reason: v.Reason, Message: v.Message, LastHeartbeatTime: &seconds, LastTransitionTime: &seconds,
		}
		if had := conditions[name]; had.Status == c.Status {
			c.LastTransitionTime = cmp.Or(had.LastTransitionTime, c.LastTransitionTime)
		}
		conditions[name] = c
		p.Status.Conditions = append(p.Status.Conditions, c)
	}
	return p, conditions, nil
}

// errUnguarded means that the agent may change what it must not.
var errUnguarded = errors.New("no admission policy keeps this agent from changing the labels of Nodes")

// probeLabel is a label that the agent must not be able to set.
const probeLabel = "tandem.dev/hand-over-must-not"

// checkGuard finds out whether the admission policy is in force: a right to patch nodes/status is also one to relabel Nodes, and to change what the
// kubelet reports of them.
func (h *Handover) checkGuard(ctx context.Context) error {
	if !h.guarded.IsZero() && time.Since(h.guarded) < guardEvery {
		return nil
	}
	var p kubeapi.NodePatch
	p.Metadata.Labels = map[string]*string{probeLabel: new("x")}
	err := h.opts.API.PatchNodeStatus(ctx, h.opts.Node, p, kubeapi.DryRun)
	h.guarded = time.Time{}
	switch {
	case err == nil:
		return errUnguarded
	case denies(err):
		h.guarded = time.Now()
		return nil
	}
	return err
}

// component is what has the rights and the policy.
const component = "deploy/hand-over (chart: handOver.enabled)"

// report sets the problem that follows from an error, or ends it. The object is "" or "events".
func (h *Handover) report(ctx context.Context, object string, err error) {
	if ctx.Err() != nil {
		return
	}
	p := problem.Problem{Object: object}
	if err != nil {
		p.Code, p.Text = problem.HandOver, "GPUs that need a repair are not reported to Kubernetes: "+err.Error()
	}
	switch {
	case errors.Is(err, errUnguarded):
		p.Code, p.Remedy = problem.Unguarded, "apply "+component
	case errors.Is(err, kubeapi.ErrForbidden):
		p.Remedy = "apply " + component + ", with the condition types of this agent"
	}
	for _, code := range []problem.Code{problem.HandOver, problem.Unguarded} {
		if code != p.Code {
			h.problems.End(code, object, "GPUs that need a repair are reported to Kubernetes again", "was", code)
		}
	}
	if err != nil {
		h.problems.Put(p, slog.LevelWarn, p.String())
	}
}
