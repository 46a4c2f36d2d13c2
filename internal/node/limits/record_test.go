package limits_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/test/check"
)

// claim is the claim of a pod of a number, whose group is made.
func (n *node) claim(number int, bytes uint64) (limit.Pod, string) {
	group := fmt.Sprintf("/kubepods/burstable/pod%s%d", pod, number)
	n.group(group)
	w := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: fmt.Sprint("p", number), ID: fmt.Sprint(pod, number), Claim: fmt.Sprint("c", number)}
	return limit.Pod{Work: w, GPU: gpu.DeviceID(n.machine.UUID(0)), Bytes: bytes}, group
}

// Which pods are to be limited follows from the claims that are prepared, without any call: a claim that was prepared has its limit at the next pass, also after the
// record of limits is lost, and a pod whose claim is gone goes with its processes, and its limit before its group. Records that can't be read end nothing.
func TestPodsFollowClaims(t *testing.T) {
	n := start(t, holders.Kubernetes, limit.Misc)
	l, stop := n.run(holders.Kubernetes)
	n.awaitHealth(health.ReasonNone, "")
	p, group := n.claim(1, 10*gib)
	n.prepare(p)
	n.reading()
	n.await(l, p.Work, limit.Limited, "")
	stop()
	check.NoError(t, os.Remove(n.file))
	l, stop = n.run(holders.Kubernetes)
	n.reading()
	n.await(l, p.Work, limit.Limited, "")

	n.enter(group, 4711)
	for _, claims := range [][]limit.Pod{nil, {}} { // not known; not prepared, and its group has a process
		n.mu.Lock()
		n.claims = claims
		n.mu.Unlock()
		n.reading()
		time.Sleep(100 * time.Millisecond)
		n.await(l, p.Work, limit.Limited, "")
	}
	n.enter(group, 0)
	n.reading()
	gone := func() bool { _, known := l.Table().Share(p.Work, p.GPU); return !known }
	eventually(t, func() bool { return gone() && n.limitOf(group).Limit.Hard == gpu.NoMemoryLimit }, func() string { return fmt.Sprintf("%+v", l.Table()) })

	n.prepare(p)
	n.reading()
	n.await(l, p.Work, limit.Limited, "")
	check.NoError(t, os.RemoveAll(n.groups.Path(group))) // nothing was released
	n.prepare()
	n.reading()
	check.Until(t, "forgotten", gone)
	stop()
	if text, err := os.ReadFile(n.file); err != nil || strings.Contains(string(text), p.Work.ID) && strings.Contains(string(text), `"pods"`) {
		t.Errorf("the record: %s, %v", text, err)
	}
}

// During an update (maxSurge) a node has two agents. The older one has the record of limits, and the newer one neither sets nor ends nor writes anything before the
// older one has ended: a pod that the newer one prepares waits for that.
func TestTwoAgents(t *testing.T) {
	n := start(t, holders.Kubernetes, limit.Misc)
	older, stop := n.run(holders.Kubernetes)
	n.awaitHealth(health.ReasonNone, "")
	first, _ := n.claim(1, 20*gib)
	second, group := n.claim(2, 20*gib)
	n.reading()
	check.NoError(t, older.LimitPod(t.Context(), first.Work, first.GPU, 20*gib))
	newer, _ := n.run(holders.Kubernetes)
	n.reading()
	n.await(newer, first.Work, limit.Limited, "")
	for _, err := range []error{newer.LimitPod(t.Context(), second.Work, second.GPU, 20*gib), newer.ReleasePod(t.Context(), first.Work)} {
		if !errors.Is(err, limit.ErrElsewhere) {
			t.Errorf("while the older agent runs: %v", err)
		}
	}
	r := holders.Record{Work: map[string]holders.Work{}}
	for _, p := range []limit.Pod{first, second} {
		w := p.Work
		w.Container = "main"
		r.Holders, r.Work[w.ID] = append(r.Holders, holders.Holder{Work: w, API: inventory.DRA, Device: p.GPU}), p.Work
	}
	n.lists(r)
	eventually(t, func() bool { // both agents follow this monitor, so what the older one publishes can be the later one
		n.reading()
		time.Sleep(50 * time.Millisecond)
		h := n.healthOf()
		return h.Reason == health.ReasonNoLimit && strings.Contains(h.Detail, "another process of this agent")
	}, func() string { return fmt.Sprint(n.healthOf()) })
	stop()
	n.awaitHealth(health.ReasonNone, "")
	check.NoError(t, newer.LimitPod(t.Context(), second.Work, second.GPU, 20*gib))
	n.reading()
	n.await(newer, first.Work, limit.Limited, "")
	n.await(newer, second.Work, limit.Limited, "")
	if n.setCount(group) != 1 || len(n.sets) != 2 {
		t.Errorf("%q", n.sets)
	}
	if err := older.LimitPod(t.Context(), first.Work, first.GPU, 20*gib); !errors.Is(err, gpu.ErrNoDriver) {
		t.Errorf("an agent that has ended: %v", err)
	}
	text, err := os.ReadFile(n.file)
	check.NoError(t, err)
	for _, p := range []limit.Pod{first, second} {
		if !strings.Contains(string(text), p.Work.ID) {
			t.Errorf("the record has no %s:\n%s", p.Work, text)
		}
	}
}
