package kube

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/test/check"
)

// A GPU's claims are those that are prepared for it, without admin access, and those of pods whose record was lost. While any of that is not
// known, no GPU counts as free.
func TestClaimHolders(t *testing.T) {
	inv := inventory.Build(inventory.Input{Snapshot: coretest.GPUs(2)}).WithoutHost()
	has := func(name string, n int, admin bool) prepared.Claim {
		return prepared.Claim{Namespace: "default", Name: name, Results: []prepared.Result{{At: gpu.WholeGPU(coretest.GPU(n)), Admin: admin}}}
	}
	listed := func(name, driver, device string) podresources.Claim {
		return podresources.Claim{Pod: "default/pod", Namespace: "default", Name: name, Driver: driver, Device: device}
	}
	of := func(n int) string { return strings.ToLower(string(coretest.GPU(n))) }
	for name, tc := range map[string]struct {
		prepared []prepared.Claim
		listed   []podresources.Claim
		want     []string
		why      string // "" = known
	}{
		"nothing":                    {[]prepared.Claim{}, nil, nil, ""},
		"not read":                   {nil, nil, nil, "not read yet"},
		"prepared":                   {[]prepared.Claim{has("b", 1, false), has("a", 1, false), has("c", 0, false)}, nil, []string{"claim default/a", "claim default/b"}, ""},
		"admin access":               {[]prepared.Claim{has("monitor", 1, true)}, nil, nil, ""},
		"prepared and listed":        {[]prepared.Claim{has("a", 1, false)}, []podresources.Claim{listed("a", resourceslice.Driver, of(1))}, []string{"claim default/a"}, ""},
		"its record was lost":        {[]prepared.Claim{}, []podresources.Claim{listed("lost", resourceslice.Driver, of(1))}, []string{"claim default/lost"}, ""},
		"of another GPU":             {[]prepared.Claim{}, []podresources.Claim{listed("lost", resourceslice.Driver, of(0))}, nil, ""},
		"of another driver":          {[]prepared.Claim{}, []podresources.Claim{listed("other", "gpu.example.com", "gpu-0")}, nil, ""},
		"a device that is not known": {[]prepared.Claim{}, []podresources.Claim{listed("old", resourceslice.Driver, "mig-old")}, nil, "the end of pod default/pod"},
		"two containers of a lost claim": {
			[]prepared.Claim{}, []podresources.Claim{listed("lost", resourceslice.Driver, of(1)), listed("lost", resourceslice.Driver, of(1))}, []string{"claim default/lost"}, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			held := holders.Record{Complete: tc.prepared != nil, Missing: "not read yet"}
			for _, c := range tc.prepared {
				held.Holders = append(held.Holders, c.Holders()...)
			}
			h := claimRecord(held, tc.listed, inv, holders.Record{Complete: true})
			if !slices.Equal(h.On(coretest.GPU(1)), tc.want) || h.Complete != (tc.why == "") || !strings.Contains(h.Missing, tc.why) {
				t.Errorf("%+v, want %q, %q", h, tc.want, tc.why)
			}
		})
	}
}

// A GPU that was moved to dra by force, since the kubelet's list of pods is not read, can be prepared there.
func TestHolderBeforeAForcedMove(t *testing.T) {
	at := gpu.WholeGPU(coretest.GPU(0))
	before := coretest.Held(at.GPU, "pod default/before")
	for name, tc := range map[string]struct {
		assigned inventory.GPUOwner
		listed   bool
		held     bool
	}{
		"it has come to dra":             {inventory.GPUOwner{API: inventory.DRA, Local: true}, false, false},
		"it moves to dra":                {inventory.GPUOwner{API: inventory.DevicePlugin, Local: true, Pending: "to dra"}, false, true},
		"it is the device plugin's":      {inventory.GPUOwner{API: inventory.DevicePlugin, Local: true}, false, true},
		"the kubelet shows what pods do": {inventory.GPUOwner{API: inventory.DRA, Local: true}, true, true},
	} {
		tc.assigned.GPU = at.GPU
		host := inventory.Host{Ownership: inventory.Ownership{GPUs: []inventory.GPUOwner{tc.assigned}}}
		inv := inventory.Build(inventory.Input{Snapshot: coretest.GPUs(1)}).WithHost(host, inventory.OverlapRefuse)
		if held := len(pluginHolders(slices.Clone(before), tc.listed, inv)) > 0; held != tc.held {
			t.Errorf("%s: held %v, want %v", name, held, tc.held)
		}
	}
}

// BenchmarkClaimRecord reads the holders of all GPUs of a node that has a lost claim on each, as an agent does once a second while a GPU moves.
func BenchmarkClaimRecord(b *testing.B) {
	for _, n := range []int{8, 64} {
		b.Run(strconv.Itoa(n)+" GPUs", func(b *testing.B) {
			inv := inventory.Build(inventory.Input{Snapshot: coretest.GPUs(n)}).WithoutHost()
			var listed []podresources.Claim
			for i := range n {
				listed = append(listed, podresources.Claim{
					Pod: "default/pod", Namespace: "default", Name: strconv.Itoa(i), Driver: resourceslice.Driver, Device: strings.ToLower(string(coretest.GPU(i))),
				})
			}
			for b.Loop() {
				record := claimRecord(holders.Record{Complete: true}, listed, inv, holders.Record{Complete: true})
				for i := range n {
					if len(record.On(coretest.GPU(i))) != 1 {
						b.Fatal(i)
					}
				}
			}
		})
	}
}

// The pods that have devices are known only if each claim that has one has a pod. A claim names the UIDs of its pods, which the kubelet's list lacks.
func TestPodsWithDevices(t *testing.T) {
	pod := func(name, claim, uid string) holders.Holder {
		return holders.Holder{Work: holders.Work{Orchestrator: holders.Kubernetes, Namespace: "team", Name: name, Claim: claim, ID: uid}}
	}
	listed := holders.Record{Complete: true, Holders: []holders.Holder{pod("a", "", "ua"), pod("b", "gpus", "")}}
	prepared := func(complete bool, claims ...string) holders.Record {
		r := holders.Record{Complete: complete}
		for _, name := range claims {
			r.Holders = append(r.Holders, pod("", name, "c"))
		}
		return r
	}
	for name, c := range map[string]struct {
		claims holders.Record
		want   bool
	}{
		"no claims":        {prepared(true), true},
		"a pod has it":     {prepared(true, "gpus"), true},
		"no pod has it":    {prepared(true, "gpus", "other"), false},
		"one is unread":    {prepared(false, "gpus"), false},
		"the lists differ": {prepared(true, "other"), false},
	} {
		if got := withoutUnlisted(listed, c.claims); got.Complete != c.want || len(got.Holders) != 2 {
			t.Errorf("%s: %+v", name, got)
		}
	}

	s := kubeapitest.Start(t)
	s.PutClaim(kubeapi.ResourceClaim{
		Metadata: kubeapi.ObjectMeta{Namespace: "team", Name: "gpus"},
		Status:   kubeapi.ResourceClaimStatus{ReservedFor: []kubeapi.ClaimConsumerReference{{Resource: "pods", Name: "other", UID: "uo"}, {Resource: "pods", Name: "b", UID: "ub"}}},
	})
	api, err := kubeapi.New(kubeapi.Options{Address: s.URL})
	check.NoError(t, err)
	r := run{api: api}
	if got := r.withUIDs(t.Context(), listed); got.Holders[0].Work.ID != "ua" || got.Holders[1].Work.ID != "ub" || listed.Holders[1].Work.ID != "" {
		t.Errorf("%+v", got)
	}
	if n := len(s.Requests()); n != 1 {
		t.Errorf("%d requests", n)
	}
}

// A check that has just ended may not be in the state yet.
func TestChecksFolded(t *testing.T) {
	now := time.Unix(1e9, 0)
	for age, want := range map[time.Duration]uint64{0: 1, time.Second - 1: 1, time.Second: 2} {
		if got := checksFolded(monitor.Stats{Checks: 2, LastCheck: now.Add(-age)}, now); got != want {
			t.Errorf("after %v: %d", age, got)
		}
	}
	if got := checksFolded(monitor.Stats{}, now); got != 0 {
		t.Errorf("none: %d", got)
	}
}
