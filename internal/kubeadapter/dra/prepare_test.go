package dra

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

func marshal(t *testing.T, m proto.Message) []byte {
	t.Helper()
	text, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// A repeated Prepare has the same answer byte for byte, from the record: also if the API server does not answer, has no such claim or none
// that is allocated, and without the inventory.
func TestPrepareIsRepeatedFromTheRecord(t *testing.T) {
	reserved := 0
	r := newRig(t, build(coretest.GPUs(2), health.Ledger{}, config()), func(a *Adapter) {
		a.opts.Reserved = func(d []gpu.Device) { reserved += len(d) }
	})
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	first := r.prepare("a", "a")
	if len(first) != 1 || first[uidOf("a")].GetError() != "" {
		t.Fatal(first)
	}
	want := marshal(t, first[uidOf("a")])
	d := first[uidOf("a")].GetDevices()[0]
	if len(d.GetCdiDeviceIds()) != 1 || d.GetCdiDeviceIds()[0] != "k8s.device-plugin.nvidia.com/gpu="+string(coretest.GPU(0)) || d.GetPoolName() != node {
		t.Errorf("%v", d)
	}
	if c := r.record("a"); c.State != prepared.Complete || len(c.Results) != 1 || c.Results[0].Published == nil {
		t.Errorf("%+v", c)
	}
	r.src.Set(build(coretest.GPUs(0), health.Ledger{}, config()))
	for name, change := range map[string]func(){
		"nothing changed": func() {},
		"unavailable":     func() { r.api.fail(kubeapi.ErrUnavailable) },
		"does not answer": func() { r.api.hang(true) },
		"another claim":   func() { c := newClaim("a", result(coretest.GPU(1))); c.Metadata.UID = "other"; r.api.put(c) },
		"no allocation":   func() { c := newClaim("a"); c.Status.Allocation = nil; r.api.put(c) },
		"no such claim":   func() { r.api.fail(kubeapi.ErrNotFound) },
		"another driver's": func() {
			r.api.put(newClaim("a", result(coretest.GPU(0)), result("x", func(r *kubeapi.DeviceRequestAllocationResult) { r.Driver = "nic" })))
		},
	} {
		change()
		if got := marshal(t, r.prepare("a")[uidOf("a")]); !slices.Equal(got, want) {
			t.Errorf("%s: %x, want %x", name, got, want)
		}
		r.api.hang(false)
		r.api.fail(nil)
		r.api.put(newClaim("a", result(coretest.GPU(0))))
		r.start()
	}
	if reserved != 1 {
		t.Errorf("%d devices reserved", reserved)
	}
}

// A claim that was allocated anew without having been unprepared gets the devices of the new allocation, also if they are shares of the same
// device. While it can't get them, it is an error, and the record stays.
func TestPrepareOfAClaimThatWasAllocatedAnew(t *testing.T) {
	share := func(id string) func(*kubeapi.DeviceRequestAllocationResult) {
		return func(r *kubeapi.DeviceRequestAllocationResult) { r.ShareID = id }
	}
	r := newRig(t, build(coretest.GPUs(3), health.Ledger{}, config()))
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	r.api.put(newClaim("b", result(coretest.GPU(1))))
	for _, name := range []string{"a", "b"} {
		r.mustPrepare(name)
	}
	r.api.put(newClaim("a", result(coretest.GPU(1))))
	r.mustRefuse("a", "held by other work")
	if c := r.record("a"); c.Results[0].Device != deviceName(coretest.GPU(0)) {
		t.Errorf("%+v", c)
	}
	r.api.put(newClaim("a", result(coretest.GPU(2))))
	if got := r.mustPrepare("a"); len(got) != 1 || got[0].GetDeviceName() != deviceName(coretest.GPU(2)) {
		t.Errorf("answer %v, allocated %s", got, coretest.GPU(2))
	}
	r.start()
	if c := r.record("a"); len(c.Results) != 1 || c.Results[0].Device != deviceName(coretest.GPU(2)) || c.State != prepared.Complete {
		t.Errorf("%+v", c)
	}
	r.api.put(newClaim("c", result(coretest.GPU(0)))) // free again
	r.mustPrepare("c")
	r.must(r.unprepare("c"))

	r.src.Set(build(coretest.GPUs(3), health.Ledger{}, config(shared(inventory.TimeSlicing, 2))))
	r.must(r.unprepare("a"))
	for _, id := range []string{"first", "second"} {
		r.api.put(newClaim("a", result(coretest.GPU(0), share(id))))
		if got := r.mustPrepare("a"); len(got) != 1 || got[0].GetShareId() != id {
			t.Errorf("answer %v, allocated share %s", got, id)
		}
	}
}

// Each claim of a call has its own answer: an error of one does not concern the others, and no other claim is answered.
func TestPrepareAnswersEveryClaim(t *testing.T) {
	var observed atomic.Int32
	r := newRig(t, build(coretest.GPUs(8), health.Ledger{}, config()), func(a *Adapter) {
		a.opts.Observe = func(method string, _ time.Duration) {
			if method == "NodePrepareResources" {
				observed.Add(1)
			}
		}
	})
	names := []string{"a", "b", "c", "d", "missing"}
	for i, name := range names[:4] {
		r.api.put(newClaim(name, result(coretest.GPU(i)), result(coretest.GPU(i+4))))
	}
	if got := r.prepare(); len(got) != 0 {
		t.Errorf("%v for no claim", got)
	}
	answer := r.prepare(append(names, names...)...)
	if len(answer) != len(names) {
		t.Fatalf("%d answers", len(answer))
	}
	for i, name := range names[:4] {
		one := answer[uidOf(name)]
		if one.GetError() != "" || len(one.GetDevices()) != 2 || one.GetDevices()[1].GetDeviceName() != deviceName(coretest.GPU(i+4)) {
			t.Errorf("%s: %v", name, one)
		}
	}
	if one := answer[uidOf("missing")]; !strings.Contains(one.GetError(), "does not exist any more") || len(one.GetDevices()) > 0 {
		t.Errorf("%v", one)
	}
	v1 := marshal(t, answer[uidOf("a")])
	old := &dra.NodePrepareResourcesResponse{}
	r.must(r.conn.Invoke(r.ctx, "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources", &dra.NodePrepareResourcesRequest{Claims: claimsOf("a")}, old))
	if got := marshal(t, old.GetClaims()[uidOf("a")]); !slices.Equal(got, v1) {
		t.Errorf("v1beta1: %x, want %x", got, v1)
	}
	r.must(r.conn.Invoke(r.ctx, "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources", &dra.NodeUnprepareResourcesRequest{Claims: claimsOf("a")}, &dra.NodeUnprepareResourcesResponse{}))
	r.wantRecord("a", "")
	r.await("three claims", func() bool { return r.adapter.Stats().Claims == 3 })
	if s := r.adapter.Stats(); s.Prepares != 5 || s.PrepareErrors != 1 || s.Unprepares != 1 || observed.Load() != 6 {
		t.Errorf("%+v", s)
	}
}

// What an operator reads in the event of the pod: distinct errors of one line that name the cause.
func TestPrepareErrors(t *testing.T) {
	gpu0 := gpu.WholeGPU(coretest.GPU(0))
	observed := func(kind health.ObservationKind, code uint64) health.Ledger {
		return health.Ledger{}.Apply(health.DefaultPolicy(), time0, health.Observation{At: gpu0, Kind: kind, Code: code})
	}
	tolerating := func(all ...kubeapi.DeviceToleration) func(*kubeapi.DeviceRequestAllocationResult) {
		return func(r *kubeapi.DeviceRequestAllocationResult) { r.Tolerations = all }
	}
	everything := tolerating(kubeapi.DeviceToleration{Operator: "Exists"})
	one := func(change ...func(*kubeapi.DeviceRequestAllocationResult)) kubeapi.ResourceClaim {
		return newClaim("a", result(coretest.GPU(0), change...))
	}
	claimed := func(inv *inventory.Allocatable) *inventory.Allocatable {
		return inv.WithHost(inventory.Host{CDI: inv.CDI(), Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: gpu0, Earlier: true}}}, inventory.OverlapRefuse)
	}
	moved := func(inv *inventory.Allocatable) *inventory.Allocatable {
		return inv.WithHost(inventory.Host{CDI: inv.CDI(), Ownership: inventory.Ownership{GPUs: []inventory.GPUOwner{{GPU: coretest.GPU(0), API: inventory.DevicePlugin, Local: true}}}}, inventory.OverlapRefuse)
	}
	name := deviceName(coretest.GPU(0))
	for title, c := range map[string]struct {
		claim  kubeapi.ResourceClaim
		ledger health.Ledger
		host   func(*inventory.Allocatable) *inventory.Allocatable
		change func(*Adapter)
		want   string // in the error; "" = prepared
	}{
		"healthy":              {claim: one()},
		"another UID":          {claim: func() kubeapi.ResourceClaim { c := one(); c.Metadata.UID = "uid-new"; return c }(), want: "claim default/a has the UID uid-new now, not uid-a"},
		"not allocated":        {claim: func() kubeapi.ResourceClaim { c := one(); c.Status.Allocation = nil; return c }(), want: "the claim is not allocated"},
		"no result of ours":    {claim: one(func(r *kubeapi.DeviceRequestAllocationResult) { r.Driver = "nic.example.com" }), want: "has no device of gpu.nvidia.com"},
		"another pool":         {claim: one(func(r *kubeapi.DeviceRequestAllocationResult) { r.Pool = "node2" }), want: `pool "node2" is not of this node, whose pool is "node1"`},
		"unknown device":       {claim: one(func(r *kubeapi.DeviceRequestAllocationResult) { r.Device = "gpu-0" }), want: "device gpu-0: not offered by this node"},
		"another API":          {claim: one(), host: moved, want: "device " + name + ": not offered by this node through DRA any more, but through device-plugin"},
		"unhealthy":            {claim: one(), ledger: observed(health.XID, 95), want: "device " + name + ": unhealthy: XID 95"},
		"unhealthy, tolerated": {claim: one(everything), ledger: observed(health.XID, 95)},
		"another toleration":   {claim: one(tolerating(kubeapi.DeviceToleration{Key: "gpu.nvidia.com/xid", Value: "79"})), ledger: observed(health.XID, 95), want: "XID 95"},
		"the toleration":       {claim: one(tolerating(kubeapi.DeviceToleration{Key: "gpu.nvidia.com/xid", Value: "95", Effect: "NoSchedule"})), ledger: observed(health.XID, 95)},
		"only for NoExecute":   {claim: one(tolerating(kubeapi.DeviceToleration{Operator: "Exists", Effect: "NoExecute"})), ledger: observed(health.XID, 95), want: "XID 95"},
		"not evicted, tolerated": {claim: one(tolerating(kubeapi.DeviceToleration{Key: "gpu.nvidia.com/xid", Operator: "Exists", Effect: "NoSchedule"})), ledger: observed(health.XID, 95),
			change: func(a *Adapter) { a.opts.Evict = true }},
		"lost":            {claim: one(everything), ledger: observed(health.Lost, 0), want: "lost: GPU is lost"},
		"another agent's": {claim: one(everything), host: claimed, want: "unhealthy: offered by another agent (nomad-gpu)"},
		"a pod's by the plugin": {claim: one(), change: func(a *Adapter) {
			a.opts.PluginHolders = func() []holders.Holder {
				return []holders.Holder{{API: inventory.DevicePlugin, Device: coretest.GPU(0), At: gpu.WholeGPU(coretest.GPU(0))}}
			}
		}, want: "held by other work"},
		"withdrawn": {claim: one(everything), change: func(a *Adapter) { a.admission.Store(admission{foreign: []obstacle{{"default", "drain the node"}}}) }, want: "no device of this node takes new work: drain the node"},
		"check refuses": {claim: one(), change: func(a *Adapter) {
			a.opts.Check = func(u []inventory.Unit) ([]inventory.Finding, error) {
				return nil, &inventory.CheckError{Findings: []inventory.Finding{{Device: u[0].Device, Failed: true}}}
			}
		}, want: "reservation check: " + string(coretest.GPU(0))},
		"not by CDI": {claim: one(), host: func(*inventory.Allocatable) *inventory.Allocatable {
			return core.Build(coretest.GPUs(1), health.Ledger{}, config(func(c *core.Config) { c.Injection = inventory.Injection{Runtime: true} })).WithoutHost()
		}, want: "no CDI specification of this agent defines it"},
		"several problems": {claim: newClaim("a", result("GPU-1"), result("GPU-2")), want: "device gpu-1: not offered by this node; device gpu-2: not offered by this node"},
	} {
		t.Run(title, func(t *testing.T) {
			inv := build(coretest.GPUs(1), c.ledger, config())
			if c.host != nil {
				inv = c.host(inv)
			}
			r := newRig(t, inv, func(a *Adapter) {
				if c.change != nil {
					c.change(a)
				}
			})
			r.api.put(c.claim)
			_, err := r.prepareOne("a")
			switch {
			case c.want == "" && err != nil, c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n")):
				t.Errorf("%v, want %q", err, c.want)
			}
			if prepared := r.record("a").UID != ""; prepared != (c.want == "") || len(r.adapter.store.Load().All()) > 0 != prepared {
				t.Errorf("there is a record: %t", prepared)
			}
		})
	}
}

// Requests have no names of subrequests in the answer, which the kubelet would not find; shares have their IDs; a claim with admin access
// gets a device that another one holds, and holds nothing.
func TestPrepareResults(t *testing.T) {
	sub := func(r *kubeapi.DeviceRequestAllocationResult) { r.Request = "gpu/large" }
	admin := func(r *kubeapi.DeviceRequestAllocationResult) { r.AdminAccess = true }
	share := func(id string) func(*kubeapi.DeviceRequestAllocationResult) {
		return func(r *kubeapi.DeviceRequestAllocationResult) { r.ShareID = id }
	}
	r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config()))
	r.api.put(newClaim("monitor", result(coretest.GPU(0), admin)))
	r.api.put(newClaim("a", result(coretest.GPU(0), sub)))
	r.api.put(newClaim("b", result(coretest.GPU(0))))
	for _, name := range []string{"monitor", "a", "monitor"} {
		if d := r.mustPrepare(name); !slices.Equal(d[0].GetRequestNames(), []string{"gpu"}) || d[0].ShareId != nil {
			t.Errorf("%s: %v", name, d)
		}
	}
	if _, err := r.prepareOne("b"); err == nil || err.Error() != "device "+deviceName(coretest.GPU(0))+": held by other work" {
		t.Error(err)
	}
	r.wantHolder(0, "claim default/a")
	r.must(r.unprepare("a"))
	r.wantHolder(0, "free")

	r.src.Set(build(coretest.GPUs(1), health.Ledger{}, config(shared(inventory.TimeSlicing, 3))))
	r.api.put(newClaim("s", result(coretest.GPU(0), share("id-1")), result(coretest.GPU(0), share("id-2"))))
	r.api.put(newClaim("t", result(coretest.GPU(0), share("id-3"))))
	r.api.put(newClaim("u", result(coretest.GPU(0), share("id-4"))))
	var ids []string
	for _, name := range []string{"s", "t"} {
		for _, d := range r.mustPrepare(name) {
			ids = append(ids, d.GetShareId())
		}
	}
	if diff := cmp.Diff([]string{"id-1", "id-2", "id-3"}, ids); diff != "" {
		t.Error(diff)
	}
	r.mustRefuse("u", "3 of its 3 shares are held, ")
}
