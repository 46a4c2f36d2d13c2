package nomad

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// decide returns what is decided on a reading.
func decide(r *region, policy rescue.Policy) rescue.Result {
	state := rescue.State{Ledger: rescue.NewLedger()}.Lead()
	return policy.Next(state, rescue.NewFleet(r.cluster()), r.at)
}

func acts(r rescue.Result) (ids []string) {
	for _, a := range r.Acts {
		ids = append(ids, a.Work[0].ID)
	}
	return ids
}

// Of the work on a faulty GPU of one of two nodes, a service and a batch job are moved, a system job is refused, and what has no place waits.
func TestDecision(t *testing.T) {
	for _, tc := range []struct {
		jobType string
		full    bool
		want    string
	}{
		{"service", false, "moved"}, {"batch", false, "moved"}, {"system", false, string(rescue.ReasonController)}, {"sysbatch", false, string(rescue.ReasonController)},
		{"service", true, string(rescue.ReasonNoPlace)},
	} {
		r := newRegion(2, 2)
		r.fail(0, 0, xid95)
		a := r.run("web", tc.jobType, 0, 0)
		r.run("neighbour", "service", 0, 1)
		if tc.full {
			r.run("full", "service", 1, 0, 1)
		}
		r.follow(t, a, nil)
		got, policy := "nothing", rescue.Default()
		switch result := decide(r, policy); {
		case fmt.Sprint(acts(result)) == "[web]":
			got = "moved"
		case len(result.Refusals) == 1:
			got = string(result.Refusals[0].Reason)
		case len(result.Waits) == 1:
			got = string(result.Waits[0].Reason)
		}
		if got != tc.want {
			t.Errorf("%s, full %t: %s, want %s", tc.jobType, tc.full, got, tc.want)
		}
	}
}

// All instances of a faulty GPU in MIG mode are one rescue, and so are all replicas of a shared one.
func TestDecisionOnSharedGPUs(t *testing.T) {
	for _, ids := range [][]string{{"MIG-a", "MIG-b"}, {"GPU-x::0", "GPU-x::1"}} {
		r := newRegion(2, 0)
		for n := range 2 {
			group := r.nodes[n].NodeResources.Devices[0]
			for _, id := range ids {
				if n > 0 {
					id = strings.Replace(id, "-", "-other", 1)
				}
				group.Instances = append(group.Instances, &api.NodeDevice{ID: id, Healthy: n > 0, HealthDescription: xid95, Locality: &api.NodeDeviceLocality{PciBusID: "0000:01:00.0"}})
			}
		}
		for i, id := range ids {
			a := r.run(fmt.Sprintf("w%d", i), "service", 0, 0)
			a.AllocatedResources.Tasks["t"].Devices[0].DeviceIDs = []string{id}
			r.follow(t, a, nil)
		}
		result := decide(r, rescue.Default())
		if len(result.Acts) != 2 || len(result.State.Ledger.Rescues) != 1 {
			t.Errorf("%v: acts %v, %d rescues, waits %+v", ids, acts(result), len(result.State.Ledger.Rescues), result.Waits)
		}
	}
}

// A device whose health is told by a text of another form causes no act, with any policy.
func TestNoDecisionOnUnknownFault(t *testing.T) {
	r := newRegion(2, 1)
	r.fail(0, 0, "XID 95")
	r.follow(t, r.run("web", "service", 0, 0), nil)
	policy := rescue.Default()
	policy.Delay, policy.Preempt = 0, true
	if result := decide(r, policy); len(result.Acts) > 0 {
		t.Errorf("acts %v", acts(result))
	}
}

// A job that takes any GPU has a place on each model; one that takes a model has none on another.
func TestKinds(t *testing.T) {
	for _, tc := range []struct {
		device string
		count  uint64
		want   int
	}{{"nvidia/gpu", 1, 1}, {"gpu", 1, 1}, {"nvidia/gpu/H100", 1, 0}, {"nvidia/gpu-shared", 1, 0}} {
		r := newRegion(2, 1)
		r.nodes[1].NodeResources.Devices[0].Name = "H200"
		r.fail(0, 0, xid95)
		a := r.run("web", "service", 0, 0)
		r.follow(t, a, func(j *api.Job) { j.TaskGroups[0].Tasks[0].Resources.Devices[0].Name = tc.device })
		if result := decide(r, rescue.Default()); len(result.Acts) != tc.want {
			t.Errorf("%s: acts %v, waits %+v", tc.device, acts(result), result.Waits)
		}
	}
}

// What one job asks for does not keep another one from its places.
func TestKindsBesideModel(t *testing.T) {
	r := newRegion(2, 2)
	r.nodes[1].NodeResources.Devices[0].Name = "H200"
	r.fail(0, 0, xid95)
	r.fail(0, 1, xid95)
	web, h100 := r.run("web", "service", 0, 0), r.run("h100", "service", 0, 1)
	r.follow(t, web, func(j *api.Job) { j.TaskGroups[0].Tasks[0].Resources.Devices[0].Name = "nvidia/gpu" })
	r.follow(t, h100, func(j *api.Job) { j.TaskGroups[0].Tasks[0].Resources.Devices[0].Name = "nvidia/gpu/H100" })
	policy := rescue.Default()
	policy.MaxGPUs = 2
	result := decide(r, policy)
	if !slices.Equal(acts(result), []string{"web"}) || len(result.Waits) != 1 || result.Waits[0].Reason != rescue.ReasonNoPlace {
		t.Errorf("acts %v, waits %+v", acts(result), result.Waits)
	}
}

// Work of which no place is certain takes no place of others.
func TestKindsBesideUnknown(t *testing.T) {
	r := newRegion(2, 2)
	r.nodes[1].NodeResources.Devices[0].Name = "H200"
	r.run("full", "service", 0, 1)
	r.fail(0, 0, xid95)
	a := r.run("web", "service", 0, 0)
	r.follow(t, a, func(j *api.Job) { j.TaskGroups[0].Tasks[0].Resources.Devices[0].Name = "nvidia/gpu" })
	pinned := r.run("pinned", "service", 1, 1)
	r.follow(t, pinned, func(j *api.Job) {
		j.TaskGroups[0].Tasks[0].Resources.Devices[0].Constraints = constraint("${device.ids}", "set_contains", "GPU-1-0")
	})
	if result := decide(r, rescue.Default()); !slices.Equal(acts(result), []string{"web"}) {
		t.Errorf("acts %v, waits %+v", acts(result), result.Waits)
	}
}

// fleet1000 is a region of 1,000 nodes with 8 GPUs and 8 allocations each.
func fleet1000() *region {
	r := newRegion(1000, 8)
	for n := range 1000 {
		for g := range 8 {
			r.run(fmt.Sprintf("%08d-%04d-4000-8000-000000000000", n, g), "service", n, g)
		}
		for i := range 120 {
			r.details[nodeID(n)].Attributes[fmt.Sprintf("attribute.number.%d", i)] = fmt.Sprintf("the value of attribute %d", i)
		}
	}
	for n := range r.details {
		r.details[n] = kept(r.details[n])
	}
	return r
}

// heap is what is in use, in MB.
func heap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc) / 1e6
}

// The time of one translation, and the memory of what is kept between reads (details) and shown.
func BenchmarkTranslate(b *testing.B) {
	before := heap()
	r := fleet1000()
	read := heap() - before
	b.ReportAllocs()
	var c rescue.Cluster
	for b.Loop() {
		c = r.cluster()
	}
	b.ReportMetric(read, "MB-reading")
	b.ReportMetric(heap()-before-read, "MB-shown")
	if len(c.Work) != 8000 {
		b.Fatal(len(c.Work))
	}
	runtime.KeepAlive(r)
}

// The same with a fault on one GPU, whose work is followed.
func BenchmarkTranslateFollowed(b *testing.B) {
	r := fleet1000()
	r.fail(0, 0, xid95)
	r.allocs = r.allocs[:7000]
	for i := range 100 {
		a := r.allocs[i]
		j := job(a, 1)
		s, err := specOf(j, "g")
		if err != nil {
			b.Fatal(err)
		}
		r.followed[a.ID] = &followed{alloc: a, specs: []*spec{s}}
	}
	for b.Loop() {
		r.cluster()
	}
}
