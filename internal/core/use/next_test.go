package use_test

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

var (
	start = time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)

	one, two = pod("default", "one", "uid-1"), pod("default", "two", "uid-2")
	task     = holders.Work{Orchestrator: holders.Nomad, Namespace: "default", Name: "train", Container: "main", ID: "alloc-1"}
)

func pod(namespace, name, uid string) holders.Work {
	return holders.Work{Orchestrator: holders.Kubernetes, Namespace: namespace, Name: name, Container: "main", ID: uid}
}

// group returns what the control group of a process of o shows.
func group(o holders.Work) holders.Work { return holders.Work{Orchestrator: o.Orchestrator, ID: o.ID} }

func record(holds ...holders.Holder) *holders.Record {
	r := &holders.Record{Holders: holds, Complete: true, AllWork: true, Work: map[string]holders.Work{}}
	for _, h := range holds {
		r.Work[h.Work.ID] = h.Work
	}
	return r
}

func hold(o holders.Work, n int) holders.Holder {
	id := coretest.GPU(n)
	return holders.Holder{Work: o, Resource: "nvidia.com/gpu", Unit: inventory.UnitID(id), Device: id, At: gpu.WholeGPU(id)}
}

// reading is one input, of which a test changes parts.
type reading struct {
	inv     *inventory.Allocatable
	at      time.Duration
	record  *holders.Record
	percent map[int]uint64 // utilisation by GPU; a GPU that is missing did not respond
	procs   map[int]int    // GPU by PID
	owners  map[int]holders.Work
	names   map[int]string
	unknown bool // control groups can't be read
}

func (r reading) input() use.Input {
	in := use.Input{At: start.Add(r.at), Orchestrator: holders.Kubernetes, Allocatable: r.inv, Record: r.record, Origins: map[int]use.Origin{}}
	for u := range r.inv.Devices() {
		percent, ok := r.percent[u.Device.Index]
		if !ok {
			in.Usage = append(in.Usage, gpu.Usage{Device: u.Device.ID})
			continue
		}
		processes := []gpu.Process{}
		for pid, n := range r.procs {
			if n == u.Device.Index {
				processes = append(processes, gpu.Process{At: u.Device.At, PID: pid, Started: uint64(pid)})
			}
		}
		slices.SortFunc(processes, func(a, b gpu.Process) int { return a.PID - b.PID })
		in.Usage = append(in.Usage, gpu.Usage{Device: u.Device.ID, At: in.At, GPU: gpu.OptionalUint64Of(percent), Processes: &processes})
	}
	for pid := range r.procs {
		in.Origins[pid] = use.Origin{Started: uint64(pid), Name: r.names[pid], Owner: r.owners[pid], Unknown: r.unknown}
	}
	return in
}

func gpus(t *testing.T, s gpu.Snapshot, change ...func(*core.Config)) *inventory.Allocatable {
	t.Helper()
	c := core.DefaultConfig()
	for _, f := range change {
		f(&c)
	}
	inv := core.Build(s, health.Ledger{}, c).WithoutHost()
	if inv.Len() == 0 {
		t.Fatal("no units")
	}
	return inv
}

// A process is unreserved only by evidence, and, if it belongs to work, only after a while.
func TestUnreserved(t *testing.T) {
	incomplete := record(hold(one, 1))
	incomplete.Complete, incomplete.AllWork = false, false
	filtered := record(hold(one, 1)) // a token that does not show all work
	filtered.AllWork = false
	noUID := record(holders.Holder{Work: pod("default", "one", ""), Device: coretest.GPU(0)})
	for name, tc := range map[string]struct {
		owner       holders.Work
		record      *holders.Record
		unknown     bool
		soon, later bool // unreserved at the first reading, after a minute
		observed    bool // the process is evidence that its work holds the device
	}{
		"of no work":                                        {record: record(hold(one, 0)), soon: true, later: true},
		"of no work, record unknown":                        {soon: true, later: true},
		"control group unreadable":                          {record: record(), unknown: true},
		"of the holder":                                     {owner: group(one), record: record(hold(one, 0))},
		"of work with another device":                       {owner: group(one), record: record(hold(one, 1)), later: true},
		"of work that has ended":                            {owner: group(two), record: record(hold(one, 0)), later: true},
		"of work that the record may not list":              {owner: group(two), record: filtered, observed: true},
		"of listed work, others may be missing":             {owner: group(one), record: filtered, later: true},
		"record incomplete":                                 {owner: group(one), record: incomplete, observed: true},
		"record unknown":                                    {owner: group(one), observed: true},
		"UID of the holder unknown":                         {owner: group(one), record: noUID},
		"of a pod without a control group":                  {owner: holders.Work{Orchestrator: holders.Kubernetes}, record: record(hold(one, 0))},
		"of a pod without a control group, nothing is held": {owner: holders.Work{Orchestrator: holders.Kubernetes}, record: record(), later: true},
		"of the other orchestrator":                         {owner: task, record: record(), observed: true},
		"of the other orchestrator, and of none":            {owner: task, record: record(hold(one, 0))},
		"of a pod without devices, nothing is held":         {owner: group(two), record: record(), later: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := reading{inv: gpus(t, coretest.GPUs(2)), record: tc.record, percent: map[int]uint64{0: 0, 1: 0}, procs: map[int]int{7: 0}, unknown: tc.unknown}
			if tc.owner != (holders.Work{}) {
				r.owners = map[int]holders.Work{7: tc.owner}
			}
			var table use.Table
			for i, want := range []bool{tc.soon, tc.soon, tc.later, tc.later} {
				r.at = []time.Duration{0, 3 * time.Second, 33 * time.Second, time.Minute}[i]
				table = table.Next(r.input())
				d, _ := table.Device(coretest.GPU(0))
				if len(d.Processes) != 1 || d.Processes[0].Unreserved != want {
					t.Errorf("at %v: %+v, want unreserved: %t", r.at, d.Processes, want)
				}
				if observed := len(d.Holders) == 1 && d.Holders[0].Observed && d.Holders[0].Work.ID == tc.owner.ID; observed != tc.observed {
					t.Errorf("at %v: holders %+v, want that of the process: %t", r.at, d.Holders, tc.observed)
				}
				occupied := table.Occupied(r.inv)
				if want := want && r.at >= 5*time.Second; (len(occupied) == 1) != want || want && occupied[0].Detail != "pid 7" {
					t.Errorf("at %v: %v, want withheld: %t", r.at, occupied, want)
				}
			}
			r.procs, r.at = nil, r.at+3*time.Second
			if table = table.Next(r.input()); table.Occupied(r.inv) != nil {
				t.Errorf("after its end: %v", table.Occupied(r.inv))
			}
		})
	}
}

// The record lists work after its process has been seen: it is at no time unreserved.
func TestRecordIsBehind(t *testing.T) {
	inv := gpus(t, coretest.GPUs(1))
	r := reading{inv: inv, percent: map[int]uint64{0: 0}, procs: map[int]int{7: 0}, owners: map[int]holders.Work{7: group(one)}}
	var table use.Table
	for second := range 60 {
		r.at, r.record = time.Duration(second)*time.Second, record()
		if second >= 25 {
			r.record = record(hold(one, 0))
		}
		table = table.Next(r.input())
		if d := table.Devices[0]; len(d.Unreserved()) > 0 || (len(d.Owners()) == 1) != (second >= 25) || d.HeldSince.IsZero() != (second < 25) {
			t.Fatalf("after %d s: %+v", second, d)
		}
	}
	if p := table.Devices[0].Processes[0]; p.Owner.Name != "one" || p.Owner.Namespace != "default" {
		t.Errorf("the process has no names from the record: %+v", p)
	}
}

// Without the record the control groups show the holders. The latest holders of a record are kept for a while.
func TestHolders(t *testing.T) {
	inv := gpus(t, coretest.GPUs(2))
	id := coretest.GPU(0)
	r := reading{inv: inv, percent: map[int]uint64{0: 0, 1: 0}, procs: map[int]int{7: 0}, owners: map[int]holders.Work{7: task}}
	table := use.Table{}.Next(r.input())
	if d, _ := table.Device(id); len(d.Holders) != 1 || !d.Holders[0].Observed || d.Owners()[0] != task || table.HoldersKnown {
		t.Errorf("observed: %+v", d)
	}
	r.at, r.record = 3*time.Second, record(hold(one, 0))
	table = table.Next(r.input())
	if d, _ := table.Device(id); len(d.Owners()) != 2 || !table.HoldersKnown || !d.HeldSince.Equal(start) {
		t.Errorf("both: %+v", d)
	}
	r.procs, r.record, r.at = nil, nil, 30*time.Second
	table = table.Next(r.input())
	if d, _ := table.Device(id); len(d.Owners()) != 1 || d.Owners()[0] != one || table.HoldersKnown {
		t.Errorf("record unavailable for 27 s: %+v", d)
	}
	r.at = 63 * time.Second
	table = table.Next(r.input())
	if d, _ := table.Device(id); len(d.Owners()) != 0 || !d.HeldSince.IsZero() {
		t.Errorf("record unavailable for a minute: %+v", d)
	}
}

func TestHeldAndIdle(t *testing.T) {
	r := reading{inv: gpus(t, coretest.GPUs(1))}
	var table use.Table
	for i, step := range []struct {
		owners     []holders.Work
		percent    int // -1 = no response
		held, idle int // index of the step since when; -1 = not
	}{
		{nil, 0, -1, -1}, {[]holders.Work{one}, 0, 1, 1}, {[]holders.Work{one}, 0, 1, 1}, {[]holders.Work{one}, 5, 1, -1},
		{[]holders.Work{one}, 0, 1, 4}, {[]holders.Work{one}, -1, 1, 4}, {[]holders.Work{one, two}, 0, 1, 4}, {[]holders.Work{two}, 0, 1, 4},
		{[]holders.Work{one}, 0, 8, 8}, {nil, 0, -1, -1},
	} {
		r.at, r.percent = time.Duration(i)*time.Second, map[int]uint64{0: uint64(max(step.percent, 0))}
		if step.percent < 0 {
			r.percent = nil
		}
		r.record = record()
		for _, o := range step.owners {
			r.record.Holders = append(r.record.Holders, hold(o, 0))
		}
		table = table.Next(r.input())
		since := func(i int) time.Time {
			if i < 0 {
				return time.Time{}
			}
			return start.Add(time.Duration(i) * time.Second)
		}
		if d := table.Devices[0]; !d.HeldSince.Equal(since(step.held)) || !d.IdleSince.Equal(since(step.idle)) {
			t.Errorf("step %d: held since %v, idle since %v", i, d.HeldSince, d.IdleSince)
		}
	}
}

// Since when work has a device is in the record, also after a restart of the agent; the first reading may not have the record yet. A time that is
// ahead, by another clock, does not count. Idle is what this process has seen.
func TestHeldSinceOfTheRecord(t *testing.T) {
	began, id := start.Add(-7*time.Hour), coretest.GPU(0)
	r := reading{inv: gpus(t, coretest.GPUs(1)), percent: map[int]uint64{0: 0}, procs: map[int]int{7: 0}, owners: map[int]holders.Work{7: one}}
	table := use.Table{}.Next(r.input())
	for i, step := range []struct {
		record map[gpu.DeviceID]time.Time
		want   time.Time
	}{
		{nil, start}, {map[gpu.DeviceID]time.Time{id: began}, began}, {nil, began}, {map[gpu.DeviceID]time.Time{id: start.Add(time.Hour)}, began},
	} {
		r.at, r.record = time.Duration(i+1)*time.Second, record(hold(one, 0))
		r.record.HeldSince = step.record
		table = table.Next(r.input())
		if d := table.Devices[0]; !d.HeldSince.Equal(step.want) || !d.IdleSince.Equal(start) {
			t.Errorf("step %d: held since %v, want %v; idle since %v", i, d.HeldSince, step.want, d.IdleSince)
		}
	}
	r.record, r.procs = record(hold(two, 0)), nil
	r.record.HeldSince, r.at = map[gpu.DeviceID]time.Time{id: start}, time.Minute
	if d := table.Next(r.input()).Devices[0]; !d.HeldSince.Equal(start) || !d.IdleSince.Equal(start.Add(time.Minute)) {
		t.Errorf("the next pod, placed while the other one had the GPU: held since %v, idle since %v", d.HeldSince, d.IdleSince)
	}
}

// A holder of a GPU has its instances and the other way round. The processes of an instance are not those of the others.
func TestInstances(t *testing.T) {
	inv := gpus(t, coretest.WithMIG(coretest.GPUs(1), 0, "1g.10gb", "1g.10gb"), func(c *core.Config) { c.MIG = inventory.MIGMixed })
	devices := slices.Collect(inv.Devices())
	a, b := devices[0].Device, devices[1].Device
	process := []gpu.Process{{At: a.At, PID: 7, Started: 7}}
	none := []gpu.Process{}
	in := use.Input{
		At: start, Orchestrator: holders.Kubernetes, Allocatable: inv, Record: record(holders.Holder{Work: one, Device: a.ID}),
		Usage:   []gpu.Usage{{Device: a.ID, At: start, Processes: &process}, {Device: b.ID, At: start, Processes: &none}},
		Origins: map[int]use.Origin{7: {Started: 7, Owner: group(one)}},
	}
	table := use.Table{}.Next(in)
	if x, y := table.Devices[0], table.Devices[1]; len(x.Holders) != 1 || len(x.Processes) != 1 || len(x.Unreserved()) != 0 || len(y.Holders) != 0 || y.Processes == nil || len(y.Processes) != 0 {
		t.Errorf("%+v\n%+v", x, y)
	}
}

// The MPS server belongs to no client's control group. It makes a device unreserved only where MPS is not configured. Shared devices are
// never withheld.
func TestSharedDevices(t *testing.T) {
	for _, mode := range []inventory.SharingMode{inventory.Exclusive, inventory.TimeSlicing, inventory.MPS} {
		inv := gpus(t, coretest.GPUs(1), func(c *core.Config) {
			if mode != inventory.Exclusive {
				c.Policy = inventory.Policy{Rules: []inventory.Rule{{Sharing: &inventory.Sharing{Mode: mode, Replicas: 4}}}}
			}
		})
		r := reading{
			inv: inv, percent: map[int]uint64{0: 0}, record: record(), procs: map[int]int{7: 0, 8: 0},
			names: map[int]string{7: "nvidia-cuda-mps", 8: "python"},
		}
		var table use.Table
		for i := range 3 {
			r.at = time.Duration(i) * 3 * time.Second
			table = table.Next(r.input())
		}
		want := map[inventory.SharingMode]int{inventory.Exclusive: 2, inventory.TimeSlicing: 2, inventory.MPS: 1}[mode]
		if got := table.Devices[0].Unreserved(); len(got) != want || got[len(got)-1].Name != "python" {
			t.Errorf("%s: %+v", mode, got)
		}
		occupied := table.Occupied(inv)
		if (len(occupied) == 1) != (mode == inventory.Exclusive) {
			t.Errorf("%s: %v", mode, occupied)
		}
		if mode == inventory.Exclusive && occupied[0].Detail != "pid 7 (nvidia-cuda-mps), pid 8 (python)" {
			t.Error(occupied)
		}
	}
}

// The MPS server is no work, also where its control group is of a pod or an allocation that no record shows: mps-daemon
// is the other orchestrator's.
func TestMPSServerIsNoHolder(t *testing.T) {
	inv := gpus(t, coretest.GPUs(1), func(c *core.Config) {
		c.Policy = inventory.Policy{Rules: []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 4}}}}
	})
	daemons := group(pod("kube-system", "mps-daemon", "uid-9"))
	r := reading{
		inv: inv, percent: map[int]uint64{0: 0}, procs: map[int]int{7: 0}, names: map[int]string{7: "nvidia-cuda-mps"},
		owners: map[int]holders.Work{7: daemons},
	}
	d := use.Table{}.Next(r.input()).Devices[0]
	if len(d.Holders) > 0 || len(d.Processes) != 1 || !d.Processes[0].MPSServer || d.Processes[0].Unreserved {
		t.Errorf("%+v", d)
	}
	r.names = map[int]string{7: "python"}
	if d := (use.Table{}.Next(r.input()).Devices[0]); len(d.Holders) != 1 || d.Processes[0].MPSServer {
		t.Errorf("another process: %+v", d)
	}
}

// While a device does not respond, its processes are those of the reading before that still run: it stays withheld. The text names eight.
func TestDeviceDoesNotRespond(t *testing.T) {
	r := reading{inv: gpus(t, coretest.GPUs(1)), percent: map[int]uint64{0: 0}, record: record(), procs: map[int]int{}}
	for pid := range 10 {
		r.procs[pid+1] = 0
	}
	var table use.Table
	for i := range 4 {
		if r.at = time.Duration(i) * 3 * time.Second; i > 0 {
			r.percent = nil
		}
		if table = table.Next(r.input()); i == 3 {
			break
		}
		occupied := table.Occupied(r.inv)
		if want := "pid 1, pid 2, pid 3, pid 4, pid 5, pid 6, pid 7, pid 8, 2 more"; i == 2 != (len(occupied) == 1) || i == 2 && occupied[0].Detail != want {
			t.Errorf("reading %d: %v", i, occupied)
		}
		if i == 2 {
			r.procs = map[int]int{10: 0}
		}
	}
	if p := table.Devices[0].Processes; len(p) != 1 || p[0].PID != 10 || table.Occupied(r.inv)[0].Detail != "pid 10" {
		t.Errorf("%+v", p)
	}
}

// Holders are distinct and in order, whatever the order of the record and of the processes.
func TestOrderOfHolders(t *testing.T) {
	inv := gpus(t, coretest.GPUs(1))
	r := reading{inv: inv, percent: map[int]uint64{0: 0}, record: record(hold(two, 0), hold(one, 0), hold(two, 0))}
	if d := (use.Table{}).Next(r.input()).Devices[0]; !slices.Equal(d.Holders, []holders.Holder{hold(one, 0), hold(two, 0)}) {
		t.Errorf("of the record: %+v", d.Holders)
	}
	r.record, r.procs, r.owners = nil, map[int]int{7: 0, 8: 0, 9: 0}, map[int]holders.Work{7: group(two), 8: group(one), 9: group(two)}
	if d := (use.Table{}).Next(r.input()).Devices[0]; !slices.Equal(d.Owners(), []holders.Work{group(one), group(two)}) || len(d.Holders) != 2 {
		t.Errorf("of processes: %+v", d.Holders)
	}
}

// The record has that work holds a device, and not which: a process shows it.
func TestUnnamedHolder(t *testing.T) {
	unnamed := holders.Work{Orchestrator: holders.Nomad}
	r := reading{inv: gpus(t, coretest.GPUs(1)), record: &holders.Record{Holders: []holders.Holder{{Work: unnamed, Device: coretest.GPU(0)}}}, percent: map[int]uint64{0: 0}}
	for _, c := range []struct {
		procs  map[int]int
		owners map[int]holders.Work
		want   holders.Work
	}{
		{nil, nil, unnamed},
		{map[int]int{7: 0}, map[int]holders.Work{7: task}, task},
		{map[int]int{7: 0, 8: 0}, map[int]holders.Work{7: task, 8: task}, task},
	} {
		r.procs, r.owners = c.procs, c.owners
		in := r.input()
		in.Orchestrator = holders.Nomad
		d := use.Table{}.Next(in).Devices[0]
		if owners := d.Owners(); !slices.Equal(owners, []holders.Work{c.want}) || len(d.Unreserved()) != 0 {
			t.Errorf("%v: %+v", c.procs, d)
		}
	}
}
