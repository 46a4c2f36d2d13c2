package dra

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

const gib = 1 << 30

// limiter records what it is asked for.
type limiter struct {
	records string // the folder of the prepared claims

	mu    sync.Mutex
	calls []string
	err   error
	fails int // so many calls fail; -1 = all
	hang  bool
}

func (l *limiter) call(ctx context.Context, text string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	files, _ := filepath.Glob(filepath.Join(l.records, "*.json")) // fails on a bad pattern only
	l.calls = append(l.calls, fmt.Sprintf("%s, %d records", text, len(files)))
	if l.hang {
		<-ctx.Done()
		return ctx.Err()
	}
	if l.fails != 0 {
		l.fails--
		return l.err
	}
	return nil
}

func (l *limiter) LimitPod(ctx context.Context, pod holders.Work, id gpu.DeviceID, bytes uint64) error {
	return l.call(ctx, fmt.Sprintf("limit %s/%s%s %s of %s on %s to %d MiB", pod.Namespace, pod.Name, pod.Container, pod.ID, pod.Claim, id, bytes>>20))
}

func (l *limiter) ReleasePod(ctx context.Context, pod holders.Work) error {
	return l.call(ctx, fmt.Sprintf("release %s/%s%s %s of %s", pod.Namespace, pod.Name, pod.Container, pod.ID, pod.Claim))
}

// fail makes the next calls fail.
func (l *limiter) fail(n int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fails, l.err = n, err
}

// made returns the calls since the last one, sorted.
func (l *limiter) made() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.calls
	l.calls = nil
	slices.Sort(all)
	return strings.Join(all, "\n")
}

// limitedTo shares each GPU with limits of 20 GiB.
func limitedTo(mode inventory.LimitMode) func(*core.Config) {
	return func(c *core.Config) {
		c.Policy.Limits = inventory.LimitPolicy{On: true, Reserve: gib}
		c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 3, Memory: 20 * gib, Limit: mode}}}
	}
}

// buildLimited is build for GPUs that can have limits.
func buildLimited(s gpu.Snapshot, c core.Config) *inventory.Allocatable {
	inv := core.Build(s, health.Ledger{}, c).WithoutHost()
	h := inventory.Host{CDI: specOf(inv, s), Limits: &inventory.Limits{Withheld: map[gpu.DeviceID]inventory.LimitMissing{}}}
	for _, d := range s.Devices {
		h.Limits.Withheld[d.ID] = inventory.LimitMissing{}
	}
	h.CDI.WithoutHook = h.CDI.Defined
	return inv.WithHost(h, inventory.OverlapRefuse)
}

// newLimitedRig returns a rig on whose GPUs shares are limited.
func newLimitedRig(t *testing.T, n int, mode inventory.LimitMode) (*rig, *limiter) {
	t.Helper()
	l := &limiter{}
	r := newRig(t, buildLimited(coretest.GPUs(n), config(limitedTo(mode))), func(a *Adapter) {
		a.opts.Limits, a.limits.retry, a.limits.release, a.limits.call = l, 5*time.Millisecond, 50*time.Millisecond, 10*time.Second
		a.limits.bestEffort = 200 * time.Millisecond
		l.records = a.claimsDir()
	})
	return r, l
}

// usedBy reserves a claim for pods.
func usedBy(c kubeapi.ResourceClaim, names ...string) kubeapi.ResourceClaim {
	for _, name := range names {
		c.Status.ReservedFor = append(c.Status.ReservedFor, kubeapi.ClaimConsumerReference{Resource: "pods", Name: name, UID: "pod-" + name})
	}
	return c
}

// capacity makes a result a share with an amount of memory.
func capacity(shares, memory string) func(*kubeapi.DeviceRequestAllocationResult) {
	return func(r *kubeapi.DeviceRequestAllocationResult) {
		r.ShareID, r.ConsumedCapacity = "id", map[string]string{"shares": shares}
		if memory != "" {
			r.ConsumedCapacity["memory"] = memory
		}
	}
}

// The limit is what the scheduler has counted; without that, what the shares have by the policy, and never no limit (fence 10, 35).
func TestLimitOfClaim(t *testing.T) {
	gpu0, gpu1 := coretest.GPU(0), coretest.GPU(1)
	total := coretest.GPUs(1).Devices[0].Memory >> 20
	one := func(mib uint64) string {
		return fmt.Sprintf("limit default/p pod-p of c on %s to %d MiB, 1 records", gpu0, mib)
	}
	share := func(r *kubeapi.DeviceRequestAllocationResult) { r.Device += "-s1" }
	admin := func(r *kubeapi.DeviceRequestAllocationResult) { r.AdminAccess = true }
	for name, c := range map[string]struct {
		results []kubeapi.DeviceRequestAllocationResult
		want    string
	}{
		"30Gi":                               {[]kubeapi.DeviceRequestAllocationResult{result(gpu0, capacity("1", "30Gi"))}, one(30 << 10)},
		"1431Mi, for 1500M":                  {[]kubeapi.DeviceRequestAllocationResult{result(gpu0, capacity("1", "1431Mi"))}, one(1431)},
		"the policy's, without the capacity": {[]kubeapi.DeviceRequestAllocationResult{result(gpu0, capacity("1", ""))}, one(20 << 10)},
		"of two shares":                      {[]kubeapi.DeviceRequestAllocationResult{result(gpu0, capacity("2", ""))}, one(40 << 10)},
		"0, before the policy had limits":    {[]kubeapi.DeviceRequestAllocationResult{result(gpu0, capacity("1", "0"))}, one(20 << 10)},
		"1500M, before they had a step":      {[]kubeapi.DeviceRequestAllocationResult{result(gpu0, capacity("1", "1500M"))}, one(1430)},
		"more than the GPU has":              {[]kubeapi.DeviceRequestAllocationResult{result(gpu0, capacity("1", "1Ti"))}, one(total)},
		"a share that is a device":           {[]kubeapi.DeviceRequestAllocationResult{result(gpu0, share)}, one(20 << 10)},
		"two results of a GPU":               {[]kubeapi.DeviceRequestAllocationResult{result(gpu0, capacity("1", "10Gi")), result(gpu0, capacity("1", "5Gi"))}, one(15 << 10)},
		"two GPUs": {
			[]kubeapi.DeviceRequestAllocationResult{result(gpu0, capacity("1", "10Gi")), result(gpu1, capacity("1", "5Gi"))},
			one(10<<10) + fmt.Sprintf("\nlimit default/p pod-p of c on %s to %d MiB, 1 records", gpu1, 5<<10),
		},
		"a whole GPU, allocated before": {[]kubeapi.DeviceRequestAllocationResult{result(gpu0)}, ""},
		"admin access":                  {[]kubeapi.DeviceRequestAllocationResult{result(gpu0, admin)}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r, l := newLimitedRig(t, 2, inventory.LimitRequired)
			r.api.put(usedBy(newClaim("c", c.results...), "p"))
			for _, d := range r.mustPrepare("c") { // no variables: nothing but the device of the agent's own specification
				if len(d.GetCdiDeviceIds()) != 1 {
					t.Errorf("CDI names %q", d.GetCdiDeviceIds())
				}
			}
			if got := l.made(); got != c.want {
				t.Errorf("calls\n%s\nwant\n%s", got, c.want)
			}
		})
	}
}

// The limit is on the pod's group, once: all containers of the pod share it (fence 11, 34). Several claims of a pod each bring what they have, which the limiter
// adds up.
func TestClaimsOfOnePod(t *testing.T) {
	r, l := newLimitedRig(t, 1, inventory.LimitRequired)
	for _, name := range []string{"a", "b"} {
		r.api.put(usedBy(newClaim(name, result(coretest.GPU(0), capacity("1", "20Gi"))), "p"))
	}
	r.mustPrepare("a")
	r.mustPrepare("b")
	want := "limit default/p pod-p of a on " + string(coretest.GPU(0)) + " to 20480 MiB, 1 records\n" +
		"limit default/p pod-p of b on " + string(coretest.GPU(0)) + " to 20480 MiB, 2 records"
	if got := l.made(); got != want {
		t.Errorf("calls\n%s\nwant\n%s", got, want)
	}
}

// A claim of several pods has no limit that holds (fence 12): it is refused, or with best-effort not limited. So is one of something else than a pod.
func TestClaimOfSeveralPods(t *testing.T) {
	other := kubeapi.ClaimConsumerReference{Resource: "podgroups", Name: "g", UID: "g"}
	for want, users := range map[string][]kubeapi.ClaimConsumerReference{
		"2 pods": usedBy(kubeapi.ResourceClaim{}, "p", "q").Status.ReservedFor, "no pod": nil, "more than pods": {other},
	} {
		c := newClaim("c", result(coretest.GPU(0), capacity("1", "20Gi")))
		c.Status.ReservedFor = users
		r, l := newLimitedRig(t, 1, inventory.LimitRequired)
		r.api.put(c)
		r.mustRefuse("c", "the claim is reserved for "+want)
		if _, known := r.adapter.store.Load().Get(uidOf("c")); known || l.made() != "" {
			t.Errorf("%s: there is a record, or a limit", want)
		}
		r, l = newLimitedRig(t, 1, inventory.LimitBestEffort)
		r.api.put(c)
		r.mustPrepare("c")
		if got := l.made(); got != "" {
			t.Errorf("%s: %s", want, got)
		}
	}
	// The kubelet asks again, because it was restarted, and the claim is another pod's, too, by now.
	r, l := newLimitedRig(t, 1, inventory.LimitRequired)
	c := newClaim("c", result(coretest.GPU(0), capacity("1", "20Gi")))
	r.api.put(usedBy(c, "p"))
	r.mustPrepare("c")
	l.made()
	r.api.put(usedBy(c, "p", "q"))
	r.mustRefuse("c", "the claim is reserved for 2 pods")
	if got := l.made(); got != "" {
		t.Error(got)
	}
}

// The only user of a claim is another pod than that of its record, because the first one has ended without an answer to its Prepare: the claim is that pod's.
func TestClaimOfALaterPod(t *testing.T) {
	r, l := newLimitedRig(t, 1, inventory.LimitRequired)
	c := newClaim("c", result(coretest.GPU(0), capacity("1", "20Gi")))
	r.api.put(usedBy(c, "p"))
	l.fail(1, errors.New("no limit can be set"))
	r.mustRefuse("c", "no limit can be set")
	l.made()
	r.api.put(usedBy(c, "q"))
	for range 2 {
		r.mustPrepare("c")
		if pods, complete := r.adapter.LimitedPods(); !complete || len(pods) != 1 || pods[0].Work.ID != "pod-q" || pods[0].Bytes != 20*gib {
			t.Errorf("%v %+v", complete, pods)
		}
	}
	limited := "limit default/q pod-q of c on " + string(coretest.GPU(0)) + " to 20480 MiB, 1 records"
	if got, want := l.made(), limited+"\n"+limited+"\nrelease default/p pod-p of c, 1 records"; got != want {
		t.Errorf("calls\n%s\nwant\n%s", got, want)
	}
}

// Without the limit there is no answer where it is required. What was begun stays, and the next call completes it.
func TestLimitThatFails(t *testing.T) {
	refused := errors.New("no limit can be set: run k8s-gpu limit-server")
	for mode, required := range map[inventory.LimitMode]bool{inventory.LimitRequired: true, inventory.LimitBestEffort: false} {
		r, l := newLimitedRig(t, 1, mode)
		r.api.put(usedBy(newClaim("c", result(coretest.GPU(0), capacity("1", "20Gi"))), "p"))
		l.fail(1, refused)
		if required {
			r.mustRefuse("c", refused.Error())
			r.wantRecord("c", prepared.Complete)
		}
		r.mustPrepare("c")
		l.made()
		for _, passing := range []error{gpu.ErrNoDriver, limit.ErrElsewhere} { // as after the start of the agent, and while the one before it ends
			l.fail(2, fmt.Errorf("not yet: %w", passing))
			r.mustPrepare("c")
			if calls := strings.Count(l.made(), "limit"); calls != 3 {
				t.Errorf("%v, %v: %d calls", mode, passing, calls)
			}
		}
		if required {
			continue
		}
		l.fail(2, refused) // limit-server starts again
		r.mustPrepare("c")
		if calls := strings.Count(l.made(), "limit"); calls != 3 {
			t.Errorf("%d calls", calls)
		}
		l.fail(-1, fmt.Errorf("driver 595: %w", errors.ErrUnsupported)) // is not waited for
		l.made()
		r.mustPrepare("c")
		if calls := strings.Count(l.made(), "limit"); calls != 1 {
			t.Errorf("%d calls", calls)
		}
		l.fail(-1, refused)
		r.mustPrepare("c")
		if pods, _ := r.adapter.LimitedPods(); len(pods) != 1 { // which the limiter tries again
			t.Errorf("%+v", pods)
		}
	}
}

// A share whose memory is about to be limitable is waited for: the kubelet tries a Prepare that was refused again after a minute.
func TestPrepareAwaitsLimits(t *testing.T) {
	ready := buildLimited(coretest.GPUs(1), config(limitedTo(inventory.LimitRequired)))
	for name, withheld := range map[string]map[gpu.DeviceID]inventory.LimitMissing{
		"not tried so far": {},
		"running work":     {coretest.GPU(0): {Reason: health.ReasonNoLimit, Detail: "the limits of running work are not set so far", Passing: true}},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := newLimitedRig(t, 1, inventory.LimitRequired)
			r.api.put(usedBy(newClaim("c", result(coretest.GPU(0), capacity("1", "20Gi"))), "p"))
			h := inventory.Host{CDI: specOf(ready, coretest.GPUs(1)), Limits: &inventory.Limits{Withheld: withheld}}
			h.CDI.WithoutHook = h.CDI.Defined
			r.src.Set(ready.WithoutHost().WithHost(h, inventory.OverlapRefuse))
			time.AfterFunc(50*time.Millisecond, func() { r.src.Set(ready) })
			r.mustPrepare("c")
		})
	}
}

// A claim that no call unprepares goes all the same, and its pod's limit with it: what is to be limited follows from the records, also of another process.
func TestLimitWithoutUnprepare(t *testing.T) {
	for name, lose := range map[string]func(*rig, kubeapi.ResourceClaim){
		"abandoned": func(r *rig, c kubeapi.ResourceClaim) { r.api.remove(c) },
		"the record is removed": func(r *rig, c kubeapi.ResourceClaim) {
			r.must(os.Remove(filepath.Join(r.adapter.claimsDir(), c.Metadata.UID+".json")))
		},
		"unprepared by another process": func(r *rig, c kubeapi.ResourceClaim) {
			other, err := prepared.Open(r.adapter.claimsDir(), boot, nil)
			r.must(errors.Join(err, other.Remove(c.Metadata.UID)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := &pods{}
			r, _ := newLimitedRig(t, 1, inventory.LimitRequired)
			c := usedBy(newClaim("c", result(coretest.GPU(0), capacity("1", "20Gi"))), "p")
			r.api.put(c)
			r.change = append(r.change, func(a *Adapter) {
				a.opts.PodClaims, a.limits.queryLast, a.limits.abandoned = p.list, 5*time.Millisecond, 20*time.Millisecond
			})
			r.start()
			r.mustPrepare("c")
			if pods, complete := r.adapter.LimitedPods(); !complete || len(pods) != 1 || pods[0].Work.ID != "pod-p" || pods[0].GPU != coretest.GPU(0) || pods[0].Bytes != 20*gib {
				t.Fatalf("%v %+v", complete, pods)
			}
			r.await("the claim", func() bool { return len(r.adapter.WatchPrepared().Load()) == 1 })
			lose(r, c)
			r.await("the end of the claim, which wakes the limiter", func() bool { return len(r.adapter.WatchPrepared().Load()) == 0 })
			if pods, complete := r.adapter.LimitedPods(); !complete || len(pods) != 0 {
				t.Errorf("%v %+v", complete, pods)
			}
		})
	}
}

// Another process answers from the record, after the limit was checked; also without the API server.
func TestLimitAfterRestart(t *testing.T) {
	r, l := newLimitedRig(t, 1, inventory.LimitRequired)
	r.api.put(usedBy(newClaim("c", result(coretest.GPU(0), capacity("1", "10Gi"))), "p"))
	r.mustPrepare("c")
	want := l.made()
	r.start()
	r.api.fail(kubeapi.ErrUnavailable)
	r.mustPrepare("c")
	if got := l.made(); got != want || got == "" {
		t.Errorf("calls\n%s\nwant\n%s", got, want)
	}
}

// The limit ends before the kubelet has its answer and removes the pod's group. A limiter that fails or hangs keeps no pod from its end.
func TestLimitEnds(t *testing.T) {
	for name, change := range map[string]func(*limiter){
		"": func(*limiter) {}, "fails": func(l *limiter) { l.fails, l.err = -1, errors.New("it fails") }, "hangs": func(l *limiter) { l.hang = true },
	} {
		r, l := newLimitedRig(t, 1, inventory.LimitRequired)
		r.api.put(usedBy(newClaim("c", result(coretest.GPU(0), capacity("1", "10Gi"))), "p"))
		r.mustPrepare("c")
		l.made()
		l.mu.Lock()
		change(l)
		l.mu.Unlock()
		r.must(r.unprepare("c"))
		if got := l.made(); got != "release default/p pod-p of c, 0 records" {
			t.Errorf("%s: calls %s", name, got)
		}
		r.wantFile(filepath.Join(l.records, uidOf("c")+".json"), false)
		r.must(r.unprepare("c"))
		if got := l.made(); got != "" {
			t.Errorf("%s: again: %s", name, got)
		}
	}
}

// A claim that was allocated anew has another pod: the limit of the first one ends.
func TestLimitOfAnotherPod(t *testing.T) {
	r, l := newLimitedRig(t, 2, inventory.LimitRequired)
	r.api.put(usedBy(newClaim("c", result(coretest.GPU(0), capacity("1", "10Gi"))), "p"))
	r.mustPrepare("c")
	l.made()
	r.api.put(usedBy(newClaim("c", result(coretest.GPU(1), capacity("1", "5Gi"))), "q"))
	r.mustPrepare("c")
	want := "limit default/q pod-q of c on " + string(coretest.GPU(1)) + " to 5120 MiB, 1 records\nrelease default/p pod-p of c, 1 records"
	if got := l.made(); got != want {
		t.Errorf("calls\n%s\nwant\n%s", got, want)
	}
}

// Pools without limits make no call, and their records are as they were.
func TestNoLimit(t *testing.T) {
	l := &limiter{}
	r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config(shared(inventory.TimeSlicing, 3))), func(a *Adapter) { a.opts.Limits = l })
	r.api.put(usedBy(newClaim("c", result(coretest.GPU(0), capacity("1", "0"))), "p", "q"))
	r.mustPrepare("c")
	text, err := os.ReadFile(filepath.Join(r.adapter.claimsDir(), uidOf("c")+".json"))
	r.must(err)
	for _, key := range []string{`"pod"`, `"memory"`, `"mustLimit"`} {
		if strings.Contains(string(text), key+":") && !strings.Contains(string(text), `"published"`) {
			t.Errorf("the record has %s\n%s", key, text)
		}
	}
	r.must(r.unprepare("c"))
	if got := l.made(); got != "" {
		t.Error(got)
	}
}
