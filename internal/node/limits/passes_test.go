package limits_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/limits"
	"github.com/tandem-gpu/tandem/test/check"
)

func (n *node) logText() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.log.String()
}

// New tasks without a GPU, also ones whose allocations are not found, make the driver be asked for nothing: the groups of all tasks are read when the use of the
// GPUs is.
func TestCostOfNewTasks(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	l, _ := n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNone, "")
	n.empty.Store(true)
	begin := func(i int) {
		n.group(fmt.Sprintf("/nomad.slice/share.slice/5b1f3c58-2f0f-1f7b-9c0e-%012d.main.scope", i))
	}
	for i := range 100 {
		begin(i)
	}
	began := time.Now()
	n.reading()
	eventually(t, func() bool { return l.Table().At.After(began) }, func() string { return "no pass" }) // it may have been put off for the tasks
	time.Sleep(100 * time.Millisecond)
	before := n.queries.Load()
	for i := range 20 {
		begin(100 + i)
		time.Sleep(50 * time.Millisecond)
	}
	if more := n.queries.Load() - before; more != 0 {
		t.Errorf("20 new tasks: the driver was asked for %d limits", more)
	}
	var more int64
	for try := 0; try < 3 && (try == 0 || more > 300); try++ { // a pass ends early for the latest new task, and is made again, if that is seen late
		before = n.queries.Load()
		n.reading()
		eventually(t, func() bool { return n.queries.Load() > before }, func() string { return "no pass with a new table of use" })
		time.Sleep(100 * time.Millisecond)
		more = n.queries.Load() - before
	}
	if more > 300 {
		t.Errorf("one pass, 120 groups, one GPU with limits: the driver was asked for %d limits", more)
	}
}

// Nothing is read while nothing changes, also where a folder of tasks is missing.
func TestIdle(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	check.NoError(t, os.RemoveAll(n.groups.Path("/nomad.slice/reserve.slice")))
	var reads atomic.Int64
	n.run(holders.Nomad, func(o *limits.Options) {
		holds := o.Holders
		o.Holders = func(ctx context.Context, inv *inventory.Allocatable) (holders.Record, error) {
			reads.Add(1)
			return holds(ctx, inv)
		}
	})
	n.awaitHealth(health.ReasonNone, "")
	time.Sleep(500 * time.Millisecond)
	var more int64
	for range 3 { // what follows the folders may begin late
		before := reads.Load()
		time.Sleep(2500 * time.Millisecond)
		if more = reads.Load() - before; more == 0 {
			return
		}
	}
	t.Errorf("the record was read %d times", more)
}

// With a driver that has no limits nothing is followed.
func TestNothingIsFollowed(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	n.older.Store(true)
	check.NoError(t, os.RemoveAll(n.groups.Path("/nomad.slice")))
	n.run(holders.Nomad)
	n.awaitHealth(health.ReasonNoLimit, "driver 595.71.05")
	for _, task := range n.Watchdog().Tasks() {
		if strings.Contains(task.Name, "control groups") {
			t.Errorf("%q runs", task.Name)
		}
	}
	if text := n.logText(); strings.Contains(text, "polling") || n.queries.Load() != 0 {
		t.Errorf("%d limits were asked for; log:\n%s", n.queries.Load(), text)
	}
}

// The allocations of a burst are asked for at the same time: the first process of a task comes after some 450 ms. None is answered before all are asked for.
func TestSlowLookups(t *testing.T) {
	const burst = 8
	n := start(t, holders.Nomad, limit.Misc)
	var asking atomic.Int64
	all := make(chan struct{})
	answer := sync.OnceFunc(func() { close(all) })
	n.run(holders.Nomad, func(o *limits.Options) {
		o.Lookup = func(ctx context.Context, id string) (holders.Record, error) {
			if asking.Add(1) == burst {
				answer()
			}
			defer asking.Add(-1)
			select {
			case <-all:
				return n.lookup(ctx, id)
			case <-ctx.Done(): // it is asked for again
				return holders.Record{}, ctx.Err()
			}
		}
	})
	n.awaitHealth(health.ReasonNone, "")
	n.reading()
	var groups []string
	for i := range burst {
		w, record, group := n.taskOn(i, i%3)
		n.mu.Lock()
		n.lookups[w.ID] = record
		n.mu.Unlock()
		groups = append(groups, group)
		n.group(group)
	}
	for _, g := range groups {
		eventually(t, func() bool { return n.limitOf(g).Limit.Hard == 20*gib }, func() string { return "no limit" })
	}
}

// A GPU whose processes are never known has no passes and no tables of use without an end.
func TestUseIsNeverKnown(t *testing.T) {
	n := start(t, holders.Nomad, limit.Misc)
	w, record, group := n.task(0)
	n.group(group)
	n.enter(group, 4711)
	n.lists(record)
	var wakes atomic.Int32
	l, _ := n.run(holders.Nomad, func(o *limits.Options) {
		o.WakeUse = func() { wakes.Add(1); n.use.Store(use.Table{At: time.Now()}) }
	})
	n.await(l, w, limit.Unknown, "is not known")
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		n.use.Store(use.Table{At: time.Now()})
	}
	if c := wakes.Load(); c > 4 {
		t.Errorf("%d tables were asked for in 3 s", c)
	}
}

// readied is what sets limits by a component that may be gone for a moment.
type readied struct {
	limits.Local
	gone  *atomic.Bool
	tries *atomic.Int64
}

func (r readied) Ready(context.Context) error {
	if r.gone.Load() {
		return errors.New("run k8s-gpu limit-server")
	}
	return nil
}

func (r readied) TryLimit(ctx context.Context, id gpu.DeviceID, b limit.Backend) error {
	r.tries.Add(1)
	return r.Local.TryLimit(ctx, id, b)
}

// The component that sets limits is started again: that is noticed although nothing else changes, and as the driver was not opened again nothing is tried again.
func TestComponentIsStartedAgain(t *testing.T) {
	n := start(t, holders.Kubernetes, limit.Misc)
	var gone atomic.Bool
	var tries atomic.Int64
	n.run(holders.Kubernetes, func(o *limits.Options) {
		o.Setter = readied{limits.Local{Groups: n.groups, Driver: n.Monitor}, &gone, &tries}
	})
	n.awaitHealth(health.ReasonNone, "")
	was := tries.Load()
	gone.Store(true)
	n.reading()
	n.awaitHealth(health.ReasonNoLimit, "limit-server")
	gone.Store(false)
	n.awaitHealth(health.ReasonNone, "")
	if more := tries.Load() - was; more != 0 || was != 1 {
		t.Errorf("%d tries, then %d more", was, more)
	}
}
