package limits_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/limits"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	gib   = uint64(1) << 30
	alloc = "5b1f3c58-2f0f-1f7b-9c0e-00000000000"
	pod   = "0e6a0b2c-6f0c-4f5e-9d51-00000000000"
)

// node is a simulated machine whose first GPU has four shares of 20 GiB, with an ordinary folder in the place of the control groups.
type node struct {
	t       *testing.T
	machine *simdriver.Machine
	*monitor.Monitor
	groups  cgroup.FS
	file    string
	backend limit.Backend
	use     *watch.Value[use.Table]
	running sync.WaitGroup
	older   atomic.Bool // the driver is one before 615
	listed  time.Time   // when the driver's list of processes was read; zero = with the table of use

	unreadable atomic.Bool  // no limit can be read
	empty      atomic.Bool  // the driver has no limits, and returns that at once
	queries    atomic.Int64 // limits that were asked for

	mu      sync.Mutex
	asks    func(gpu.LimitQuery) // before the driver is asked
	record  holders.Record
	unread  error // the orchestrator's record can't be read
	lookups map[string]holders.Record
	waiting map[string]int // lookups that fail before one succeeds
	sets    []string       // by path and bytes
	asked   map[string]int // how often for an allocation
	refused []string       // why new work was refused, each time
	claims  []limit.Pod    // that are prepared
	log     bytes.Buffer
}

// Write implements io.Writer: the log of the limiter.
func (n *node) Write(line []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.log.Write(line)
}

// SetLimits implements limits.Monitor.
func (n *node) SetLimits(l *inventory.Limits) {
	why, decided := l.Withheld[gpu.DeviceID(n.machine.UUID(0))]
	n.mu.Lock()
	if !decided || why != (inventory.LimitMissing{}) {
		n.refused = append(n.refused, fmt.Sprint(decided, why))
	}
	n.mu.Unlock()
	n.Monitor.SetLimits(l)
}

func start(t *testing.T, orchestrator string, b limit.Backend, lines ...string) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root may set limits")
	}
	n := &node{
		t: t, backend: b, file: filepath.Join(t.TempDir(), "limits.json"), use: watch.NewValue(use.Table{}), lookups: map[string]holders.Record{}, waiting: map[string]int{}, asked: map[string]int{},
		groups: cgroup.FS{Mount: filepath.Join(t.TempDir(), "cgroup"), AnyFilesystem: true},
	}
	text, err := simdriver.Text("h100x8")
	check.NoError(t, err)
	text, err = simdriver.WithLimits(text, string(b), n.groups.Mount, lines...)
	check.NoError(t, err)
	n.machine = simdriver.StartText(t, text)
	for _, g := range []string{"/nomad.slice/share.slice", "/nomad.slice/reserve.slice", "/kubepods/burstable"} {
		n.group(g)
	}
	n.record = holders.Record{Complete: true, Work: map[string]holders.Work{}}
	cfg := core.DefaultConfig()
	cfg.Roots = inprocess.Roots(n.machine)
	cfg.API = apiOf[orchestrator]
	cfg.Policy = inventory.Policy{
		Limits: inventory.LimitPolicy{On: true, Reserve: inventory.DefaultReserve},
		Rules: []inventory.Rule{{
			Select:  inventory.Selector{IDs: []gpu.DeviceID{gpu.DeviceID(n.machine.UUID(0))}},
			Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 3, Memory: 20 * gib, Limit: inventory.LimitRequired},
		}},
	}
	n.Monitor = inprocess.Monitor(cfg, nvidia.Options{}, func(s *nvidia.Session) monitor.Session { return s })
	ctx, cancel := context.WithCancel(t.Context())
	inprocess.Run(ctx, t, n.Monitor, &n.running)
	n.running.Go(func() { n.kernel(ctx) })
	t.Cleanup(func() { cancel(); n.running.Wait() })
	return n
}

// LimitsUnsupported implements limits.Driver.
func (n *node) LimitsUnsupported() (string, bool) {
	why, known := n.Monitor.LimitsUnsupported()
	if n.older.Load() {
		why = "driver 595.71.05: want 615 or newer"
	}
	return why, known
}

// MemoryLimits implements limits.Driver.
func (n *node) MemoryLimits(ctx context.Context, queries []gpu.LimitQuery) (answers []gpu.LimitAnswer, err error) {
	n.queries.Add(int64(len(queries)))
	n.mu.Lock()
	asks := n.asks
	n.mu.Unlock()
	for _, q := range queries {
		if asks != nil {
			asks(q)
		}
		answers = append(answers, gpu.LimitAnswer{LimitQuery: q, State: gpu.NoLimit})
	}
	switch {
	case n.unreadable.Load():
		return nil, errors.New("the driver does not answer")
	case !n.empty.Load():
		return n.Monitor.MemoryLimits(ctx, queries)
	}
	return answers, nil
}

var apiOf = map[string]inventory.API{holders.Nomad: inventory.Nomad, holders.Kubernetes: inventory.DRA}

// kernel does what a kernel does with the folder until ctx ends: what is written into cgroup.subtree_control is a change of the list in it.
func (n *node) kernel(ctx context.Context) {
	for watch.Sleep(ctx, time.Millisecond) {
		for _, g := range cgroup.NomadParents() {
			control := n.groups.Path(g + "/cgroup.subtree_control")
			if text, err := os.ReadFile(control); err == nil && strings.HasPrefix(string(text), "+") {
				_ = os.WriteFile(control, []byte("cpu memory "+string(n.backend)), 0o600)
			}
		}
	}
}

// run runs a limiter until the function that it returns is called.
func (n *node) run(orchestrator string, change ...func(*limits.Options)) (l *limits.Limiter, stop func()) {
	o := limits.Options{
		Groups: n.groups, Orchestrator: orchestrator, Setter: counted{limits.Local{Groups: n.groups, Driver: n.Monitor}, n}, File: n.file,
		Boot: func() (string, time.Time) { return "boot", time.Unix(1, 0) }, Load: func() string { return "one" },
		Holders: func(context.Context, *inventory.Allocatable) (holders.Record, error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			if n.unread != nil {
				return holders.Record{}, n.unread
			}
			return n.record, nil
		},
		Lookup: n.lookup, Pods: n.prepared, Use: n.use.Load, WakeUse: func() { n.reading() }, On: []reconcile.Source{n.Changed, n.use.Changed}, Log: slog.New(slog.NewTextHandler(n, nil)),
	}
	for _, c := range change {
		c(&o)
	}
	l = limits.New(o)
	n.group("/tandem-limit-test-nomad") // a kernel makes the files of a group that the agent makes
	ctx, cancel := context.WithCancel(n.t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); l.Run(ctx, n) }()
	stop = func() { cancel(); <-ended }
	n.t.Cleanup(stop)
	return l, stop
}

// prepare has claims be prepared, and no others, as the records of a DRA driver have them; without one it is not known which are.
func (n *node) prepare(claims ...limit.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.claims = append([]limit.Pod{}, claims...)
}

func (n *node) prepared() ([]limit.Pod, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.claims, n.claims != nil
}

// counted records what is set.
type counted struct {
	limits.Local
	n *node
}

func (c counted) SetMemoryLimit(ctx context.Context, g cgroup.ID, change gpu.LimitChange) error {
	c.n.mu.Lock()
	c.n.sets = append(c.n.sets, fmt.Sprint(g.Path, " ", change.Hard/gib))
	c.n.mu.Unlock()
	return c.Local.SetMemoryLimit(ctx, g, change)
}

func (n *node) lookup(_ context.Context, id string) (holders.Record, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked[id]++
	if n.waiting[id] > 0 {
		n.waiting[id]--
		return holders.Record{}, errors.New("not found")
	}
	if r, ok := n.lookups[id]; ok {
		return r, nil
	}
	return holders.Record{}, errors.New("not found")
}

// group makes a control group with the backend's controller.
func (n *node) group(path string, controllers ...string) string {
	n.t.Helper()
	if controllers == nil {
		controllers = []string{string(n.backend)}
	}
	at, err := simdriver.MakeGroup(n.groups.Mount, path, controllers...)
	check.NoError(n.t, err)
	return at
}

// anew has another group in the place of one, as exec makes it for a task that it restarts in place.
func (n *node) anew(group string) {
	n.group("/new")
	old := filepath.Join(n.t.TempDir(), "old")
	check.NoError(n.t, os.Rename(n.groups.Path(group), old), os.Rename(n.groups.Path("/new"), n.groups.Path(group)))
}

// after makes a group whose inode is higher than that of another one, as those of a kernel's control groups are: tmpfs numbers files on each CPU.
func (n *node) after(other, group string) {
	n.t.Helper()
	before, err := n.groups.ID(other)
	check.NoError(n.t, err)
	for {
		n.group("/new")
		is, err := n.groups.ID("/new")
		check.NoError(n.t, err)
		if is.Inode > before.Inode {
			break
		}
		check.NoError(n.t, os.RemoveAll(n.groups.Path("/new")))
		for range 1024 { // that a CPU takes at once
			check.NoError(n.t, os.Mkdir(n.file+".d", 0o700), os.Remove(n.file+".d"))
		}
	}
	check.NoError(n.t, os.Rename(n.groups.Path("/new"), n.groups.Path(group)))
}

// enter has a process in a group; 0 = none.
func (n *node) enter(group string, pid int) {
	n.t.Helper()
	procs, events := "", "populated 0\n"
	if pid > 0 {
		procs, events = strconv.Itoa(pid)+"\n", "populated 1\n"
	}
	check.NoError(n.t, os.WriteFile(n.groups.Path(group+"/cgroup.procs"), []byte(procs), 0o600))
	check.NoError(n.t, os.WriteFile(n.groups.Path(group+"/cgroup.events"), []byte(events), 0o600))
}

// reading makes a table of use: the processes of the first GPU, by group.
func (n *node) reading(processes ...use.Process) {
	id := gpu.DeviceID(n.machine.UUID(0))
	for i := range processes {
		processes[i].At = gpu.WholeGPU(id)
	}
	if processes == nil {
		if d, ok := n.use.Load().Device(id); ok {
			processes = d.Processes
		}
	}
	now := time.Now()
	listed := n.listed
	if listed.IsZero() {
		listed = now
	}
	n.use.Store(use.Table{At: now, HoldersKnown: true, Devices: []use.Device{{ID: id, Usage: gpu.Usage{At: listed}, Processes: append([]use.Process{}, processes...)}}})
}

// task is a task of Nomad that has the share of a number; a record of it.
func (n *node) task(number int) (holders.Work, holders.Record, string) {
	return n.taskOn(number, number)
}

// taskOn has another share.
func (n *node) taskOn(number, share int) (holders.Work, holders.Record, string) {
	id := alloc[:len(alloc)-1] + fmt.Sprintf("%02d", number)
	w := holders.Work{Orchestrator: holders.Nomad, Namespace: "default", Name: "train", Container: "main", ID: id}
	device := gpu.DeviceID(n.machine.UUID(0))
	h := holders.Holder{Work: w, API: inventory.Nomad, Unit: inventory.UnitID(fmt.Sprintf("%s::%d", device, share)), Device: device}
	all := w
	all.Container = ""
	return w, holders.Record{Holders: []holders.Holder{h}, Work: map[string]holders.Work{id: all}}, "/nomad.slice/share.slice/" + id + ".main.scope"
}

// lists has the orchestrator's record list work.
func (n *node) lists(records ...holders.Record) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.record = holders.Record{Complete: true, Work: map[string]holders.Work{}}
	for _, r := range records {
		n.record.Holders = append(n.record.Holders, r.Holders...)
		for id, w := range r.Work {
			n.record.Work[id] = w
		}
	}
}

// limited is a node with a task that is limited.
func limited(t *testing.T) (n *node, l *limits.Limiter, w holders.Work, group string) {
	t.Helper()
	n = start(t, holders.Nomad, limit.Misc)
	l, _ = n.run(holders.Nomad)
	w, group = n.limitedTask(l)
	return n, l, w, group
}

// limitedTask begins a task, and waits until it is limited.
func (n *node) limitedTask(l *limits.Limiter) (w holders.Work, group string) {
	n.t.Helper()
	n.awaitHealth(health.ReasonNone, "")
	w, record, group := n.task(0)
	n.group(group)
	n.lists(record)
	n.reading()
	n.await(l, w, limit.Limited, "")
	return w, group
}

// eventually ends the test, with a text, if something is not so within 10 s.
func eventually(t *testing.T, ok func() bool, text func() string) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(text())
		}
	}
}

func (n *node) await(l *limits.Limiter, w holders.Work, state limit.State, reason string) limit.Share {
	n.t.Helper()
	id := gpu.DeviceID(n.machine.UUID(0))
	var s limit.Share
	eventually(n.t, func() bool {
		var ok bool
		s, ok = l.Table().Share(w, id)
		return ok && s.State == state && strings.Contains(s.Reason, reason)
	}, func() string { return fmt.Sprintf("%+v, want %s (%s)", l.Table(), state, reason) })
	return s
}

func (n *node) healthOf() health.Health {
	for u := range n.Monitor.Current().Units() {
		if u.Memory > 0 {
			return u.Health
		}
	}
	return health.Health{Reason: health.ReasonDriver}
}

func (n *node) awaitHealth(reason health.Reason, detail string) {
	n.t.Helper()
	eventually(n.t, func() bool {
		h := n.healthOf()
		return h.Reason == reason && strings.Contains(h.Detail, detail)
	}, func() string { return fmt.Sprintf("%+v, want %v (%s)", n.healthOf(), reason, detail) })
}

// awaitProblem waits for a problem: what takes no work does so before its problem is there.
func (n *node) awaitProblem(l *limits.Limiter, code problem.Code, text string) {
	n.t.Helper()
	eventually(n.t, func() bool {
		return slices.ContainsFunc(l.Problems(), func(p problem.Problem) bool { return p.Code == code && strings.Contains(p.Text, text) })
	}, func() string { return fmt.Sprintf("%+v, want %s (%s)", l.Problems(), code, text) })
}
