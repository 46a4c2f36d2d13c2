package dra

import (
	"context"
	"errors"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// pods is what the kubelet has of pods.
type pods struct {
	mu     sync.Mutex
	answer PodClaims
	err    error
	calls  int
}

func (p *pods) list(context.Context) (PodClaims, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	return p.answer, p.err
}

func (p *pods) set(err error, claims ...PodClaim) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer.Claims, p.err = claims, err
}

func (p *pods) partial(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer.Partial = on
}

func (p *pods) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calls
}

// awaitQueries waits for more than so many further queries.
func (r *rig) awaitQueries(p *pods, n int) {
	r.Helper()
	n += p.count()
	r.await("queries", func() bool { return p.count() > n })
}

// podClaim is a device that the pod of a claim has.
func podClaim(name, device string) PodClaim {
	return PodClaim{Pod: "default/pod-" + name, Namespace: "default", Name: name, Driver: "gpu.nvidia.com", Pool: node, Device: device, CDI: []string{"x=" + device}}
}

// admitting is a rig whose adapter is told what pods have.
func admitting(t *testing.T, p *pods) *rig {
	t.Helper()
	return newRig(t, build(coretest.GPUs(2), health.Ledger{}, config()), asking(p))
}

// asking has an adapter ask for what pods have.
func asking(p *pods) func(*Adapter) {
	return func(a *Adapter) {
		a.opts.PodClaims = p.list
		a.admission.Store(admission{pending: true}) // as New does
		a.limits.queryLast, a.limits.abandoned = 5*time.Millisecond, time.Hour
	}
}

// Devices are published only when it is known what pods have. While a pod has a device by another driver of this name, none takes new
// work, with the name of the pod; an answer that may lack pods does not end that.
func TestClaimsOfAnotherDriver(t *testing.T) {
	p := &pods{err: errors.New("connection refused")}
	r := admitting(t, p)
	r.awaitQueries(p, 3)
	if r.adapter.Desired().Load() != nil || r.adapter.Cordoned() == "" {
		t.Errorf("devices are published although the claims of pods are not known: %q", r.adapter.Cordoned())
	}
	other := podClaim("other", "gpu-0")
	other.Driver = "nic.example.com"
	foreign := podClaim("old", "gpu-0-mig-1g10gb-19-0")
	p.set(nil, foreign, other, podClaim("b", "gpu-0"))
	r.await("taints", func() bool {
		d := r.adapter.Desired().Load()
		return len(d) == 2 && len(d[0].Taints) == 1 && d[0].Taints[0].Effect == kubeapi.NoSchedule && len(d[1].Taints) == 1
	})
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	want := "pod default/pod-b has device gpu-0 of claim default/b, which another driver gpu.nvidia.com has prepared: drain the node; pod default/pod-old has device gpu-0-mig-1g10gb-19-0"
	r.mustRefuse("a", want)
	r.wantProblems(want)
	p.partial(true)
	p.set(nil)
	r.awaitQueries(p, 3)
	if r.adapter.Cordoned() == "" {
		t.Error("an answer that may lack pods has ended it")
	}
	p.partial(false)
	r.await("devices without taints", func() bool { d := r.adapter.Desired().Load(); return len(d) == 2 && len(d[0].Taints) == 0 })
	r.mustPrepare("a")
	p.set(errors.New("connection refused")) // what was known stays
	r.awaitQueries(p, 3)
	if text := r.adapter.Cordoned(); text != "" {
		t.Error(text)
	}
}

// The record of a claim that a pod has, by a name of this agent, is made again from the API server, and Unprepare finds
// it. If the server does not answer, no other work gets its devices, and the problem names the claim. A claim that was
// just unprepared is not recorded again.
func TestLostRecords(t *testing.T) {
	p := &pods{}
	r := admitting(t, p)
	r.api.put(newClaim("a", result(coretest.GPU(0)), result(coretest.GPU(0), func(r *kubeapi.DeviceRequestAllocationResult) { r.Driver = "nic" })))
	answer := r.mustPrepare("a")
	r.stop()
	r.must(os.RemoveAll(r.adapter.claimsDir()))
	p.set(nil, podClaim("a", deviceName(coretest.GPU(0))), podClaim("c", deviceName("GPU-12345678-0000-4000-8000-000000000009")))
	r.api.put(newClaim("c", result("GPU-12345678-0000-4000-8000-000000000009")))
	r.api.fail(kubeapi.ErrUnavailable)
	r.start()
	r.await("a holder", func() bool { _, held := r.holder(gpu.WholeGPU(coretest.GPU(0))); return held })
	r.wantHolder(0, "claim default/a")
	r.wantHolder(1, "free")
	r.await("problems", func() bool { return len(r.adapter.Problems()) == 2 })
	const lost = "is lost and can't be made again"
	r.wantProblems("the record of claim default/a (pod default/pod-a) "+lost, "no other work gets its devices", "the record of claim default/c (pod default/pod-c) "+lost)
	if text := r.adapter.Cordoned(); text != "" {
		t.Error(text)
	}
	r.api.fail(nil)
	r.await("records", func() bool { return len(r.adapter.Problems()) == 0 && len(r.adapter.Prepared()) == 2 })
	r.wantHolder(0, "claim default/a")
	c := r.record("a")
	if len(c.Results) != 1 || !c.Results[0].Exclusive || c.Results[0].Published == nil || c.State != prepared.Started {
		t.Errorf("%+v", c)
	}
	if c := r.record("c"); c.Results[0].Unit != "GPU-12345678-0000-4000-8000-000000000009" || !c.Results[0].Exclusive {
		t.Errorf("%+v", c)
	}
	if again := r.mustPrepare("a"); again[0].String() != answer[0].String() {
		t.Errorf("%v", again)
	}
	r.must(r.unprepare("a"))
	r.awaitQueries(p, 3)
	if r.wantRecord("a", ""); r.adapter.Cordoned() != "" {
		t.Error(r.adapter.Cordoned())
	}
}

// The record of a MIG instance is made again when its GPU is known: with the name alone its GPU would count as free.
func TestLostRecordsOfInstances(t *testing.T) {
	p := &pods{}
	instance := coretest.Instance(0, 0)
	p.set(nil, podClaim("a", deviceName(instance)))
	r := newRig(t, nil)
	r.api.put(newClaim("a", result(instance)))
	r.change = append(r.change, func(a *Adapter) {
		a.opts.PodClaims = p.list
		a.limits.queryLast = 5 * time.Millisecond
	})
	r.start()
	want := "the record of claim default/a (pod default/pod-a) is lost and can't be made again: device " + deviceName(instance) + ": not offered by this node (the driver has not answered yet)"
	r.await("withdrawn devices", func() bool { return r.adapter.Cordoned() == want })
	r.src.Set(build(coretest.WithMIG(coretest.GPUs(1), 0, "1g.10gb"), health.Ledger{}, config()))
	r.await("a record", func() bool { return r.adapter.Cordoned() == "" && len(r.adapter.Prepared()) == 1 })
	r.wantHolder(0, "claim default/a")
}

// A record that is removed from disk while a pod has the claim is written again. Without a pod, the agent before this one has unprepared
// the claim: its device is free. A record that another process has written counts.
func TestRecordsOfAnotherProcess(t *testing.T) {
	p := &pods{}
	r := admitting(t, p)
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	r.api.put(newClaim("b", result(coretest.GPU(0))))
	r.mustPrepare("a")
	path := r.adapter.store.Load().Path(uidOf("a"))
	p.set(nil, podClaim("a", deviceName(coretest.GPU(0))))
	r.awaitQueries(p, 1)
	r.must(os.Remove(path))
	r.await("a record", func() bool { _, err := os.Lstat(path); return err == nil })
	text, err := os.ReadFile(path)
	r.must(err)
	p.set(nil)
	r.awaitQueries(p, 1)
	r.must(os.Remove(path))
	r.await("a free device", func() bool { return len(r.adapter.Prepared()) == 0 })

	text, err = statefile.Unseal(text) // as by an earlier version
	r.must(err)
	next := strings.ReplaceAll(string(text), "uid-a", "uid-z")
	r.must(os.WriteFile(strings.ReplaceAll(path, "uid-a", "uid-z"), []byte(next), 0o600))
	r.mustRefuse("b", "held by other work")
}

// A claim for which Unprepare never comes, because the kubelet has lost its own records, holds its device until neither a pod nor the API
// server has it for some minutes.
func TestAbandonedClaims(t *testing.T) {
	p := &pods{}
	r := admitting(t, p)
	for i, name := range []string{"running", "gone"} {
		c := newClaim(name, result(coretest.GPU(i)))
		r.api.put(c)
		r.mustPrepare(name)
		c.Metadata.UID = "uid-new"
		r.api.put(c)
	}
	p.set(nil, podClaim("running", deviceName(coretest.GPU(0))))
	r.awaitQueries(p, 3)
	if len(r.adapter.Prepared()) != 2 {
		t.Fatalf("a claim was removed at once: %v", r.adapter.Prepared())
	}
	r.change = append(r.change, func(a *Adapter) { a.limits.abandoned = 20 * time.Millisecond })
	p.partial(true)
	r.start()
	r.awaitQueries(p, 10)
	if len(r.adapter.Prepared()) != 2 {
		t.Fatalf("a claim was removed although pods may be missing: %v", r.adapter.Prepared())
	}
	r.api.fail(&kubeapi.StatusError{Code: http.StatusNotFound}) // of a server without the API
	p.partial(false)
	r.awaitQueries(p, 10)
	if len(r.adapter.Prepared()) != 2 {
		t.Fatalf("a claim was removed although the server does not serve claims: %v", r.adapter.Prepared())
	}
	r.api.fail(nil)
	r.await("one record", func() bool { all := r.adapter.Prepared(); return len(all) == 1 && all[0].Name == "running" })
	r.wantRecord("gone", "")
}

// flapping is an API server on which a claim is missing in every other answer.
type flapping struct {
	*api
	calls atomic.Int64
}

func (f *flapping) Claim(ctx context.Context, namespace, name string) (kubeapi.ResourceClaim, error) {
	if f.calls.Add(1)%2 == 1 {
		return kubeapi.ResourceClaim{}, kubeapi.ErrNotFound
	}
	return f.api.Claim(ctx, namespace, name)
}

// A record stays if the claim is allocated anew between the look at it and the removal: a Prepare may have used it meanwhile.
func TestAbandonedClaimIsAllocatedAnew(t *testing.T) {
	p := &pods{}
	r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config()))
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	r.mustPrepare("a")
	server := &flapping{api: r.api}
	r.change = append(r.change, func(a *Adapter) {
		a.opts.PodClaims, a.opts.API = p.list, server
		a.limits.queryLast, a.limits.abandoned = 5*time.Millisecond, 0
	})
	r.start()
	r.await("answers", func() bool { return server.calls.Load() > 6 })
	if len(r.adapter.Prepared()) != 1 {
		t.Error("the record was removed")
	}
}
