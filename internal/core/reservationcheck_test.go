package core_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// checkedWith is a health check of a GPU that lists processes.
func checkedWith(n int, processes ...gpu.Process) health.Observation {
	for i := range processes {
		processes[i].At.GPU = coretest.GPU(n)
	}
	return health.Observation{At: gpuAt(n), Kind: health.Checked, Processes: &processes}
}

// process has 2 MiB of a GPU, or of a GPU instance.
func process(pid int, gi uint32) gpu.Process {
	ci := uint32(0)
	if gi == gpu.Whole {
		ci = gpu.Whole
	}
	return gpu.Process{At: gpu.Placement{GI: gi, CI: ci}, PID: pid, Memory: gpu.OptionalUint64Of(2 << 20)}
}

// GPU 0 is exclusive, GPU 1 has two MIG instances, GPU 2 is shared by time-slicing; process 66 has ended since the check.
func TestReservationCheck(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	shared := inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2}
	cfg.Policy.Rules = []inventory.Rule{{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(2)}}, Sharing: &shared}}
	snapshot := coretest.WithMIG(coretest.GPUs(3), 1, "1g.10gb", "1g.10gb")
	first, second := coretest.Instance(1, 0), coretest.Instance(1, 1)
	var giFirst uint32
	for _, d := range snapshot.Devices {
		if d.ID == first {
			giFirst = d.At.GI
		}
	}
	const inUse = ": memory in use by processes without a reservation: "
	failed := func(n int, kind health.ObservationKind, detail string) health.Observation {
		return health.Observation{At: gpuAt(n), Kind: kind, Detail: detail}
	}
	for name, tc := range map[string]struct {
		obs  []health.Observation
		ids  []gpu.DeviceID // with "::0" for a replica
		want []string
	}{
		"never checked":       {nil, []gpu.DeviceID{coretest.GPU(0), first}, nil},
		"processes unknown":   {[]health.Observation{{At: gpuAt(0), Kind: health.Checked}}, []gpu.DeviceID{coretest.GPU(0)}, nil},
		"no process":          {[]health.Observation{checkedWith(0)}, []gpu.DeviceID{coretest.GPU(0)}, nil},
		"a process":           {[]health.Observation{checkedWith(0, process(31, gpu.Whole))}, []gpu.DeviceID{coretest.GPU(0)}, []string{string(coretest.GPU(0)) + inUse + "pid 31 (2 MiB)"}},
		"it has ended":        {[]health.Observation{checkedWith(0, process(66, gpu.Whole))}, []gpu.DeviceID{coretest.GPU(0)}, nil},
		"another has not":     {[]health.Observation{checkedWith(0, process(66, gpu.Whole), gpu.Process{At: gpuAt(0), PID: 67})}, []gpu.DeviceID{coretest.GPU(0)}, []string{string(coretest.GPU(0)) + inUse + "pid 67"}},
		"of another GPU":      {[]health.Observation{checkedWith(1, process(31, giFirst))}, []gpu.DeviceID{coretest.GPU(0)}, nil},
		"of an instance":      {[]health.Observation{checkedWith(1, process(31, giFirst))}, []gpu.DeviceID{first, second}, []string{string(first) + inUse + "pid 31 (2 MiB)"}},
		"of no instance":      {[]health.Observation{checkedWith(1, process(31, gpu.Whole))}, []gpu.DeviceID{first, second}, nil},
		"of a shared device":  {[]health.Observation{checkedWith(2, process(31, gpu.Whole))}, []gpu.DeviceID{coretest.GPU(2) + "::0", coretest.GPU(2) + "::1"}, nil},
		"gone at the next":    {[]health.Observation{checkedWith(0, process(31, gpu.Whole)), checkedWith(0)}, []gpu.DeviceID{coretest.GPU(0)}, nil},
		"a check failed":      {[]health.Observation{checkedWith(0), failed(0, health.ProbeFailed, "nvmlDeviceGetUUID: Unknown Error")}, []gpu.DeviceID{coretest.GPU(0)}, []string{string(coretest.GPU(0)) + ": last health check not answered (nvmlDeviceGetUUID: Unknown Error)"}},
		"a call is pending":   {[]health.Observation{checkedWith(1), failed(1, health.CallPending, "nvmlDeviceGetFieldValues")}, []gpu.DeviceID{second}, []string{string(second) + ": last health check not answered (nvmlDeviceGetFieldValues)"}},
		"shared, not checked": {[]health.Observation{checkedWith(2), failed(2, health.CallPending, "")}, []gpu.DeviceID{coretest.GPU(2) + "::0", coretest.GPU(2) + "::1"}, []string{string(coretest.GPU(2)) + ": last health check not answered"}},
		"answered again":      {[]health.Observation{failed(0, health.ProbeFailed, ""), checkedWith(0)}, []gpu.DeviceID{coretest.GPU(0)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var l health.Ledger
			for i, o := range tc.obs {
				l = l.Apply(cfg.Health, time.Unix(int64(i)*10, 0), o)
			}
			var ids []inventory.UnitID
			for _, id := range tc.ids {
				ids = append(ids, inventory.UnitID(id))
			}
			plan, err := core.Build(snapshot, health.Ledger{}, cfg).WithoutHost().Reserve(ids...)
			if err != nil {
				t.Fatal(err)
			}
			findings := inventory.Check(l, plan.Units, func(p gpu.Process) bool { return p.PID != 66 })
			var texts []string
			for _, f := range findings {
				texts = append(texts, string(f.Device.ID)+": "+f.Reason())
			}
			if got := strings.Join(texts, "\n"); got != strings.Join(tc.want, "\n") {
				t.Errorf("found\n%s\nwant\n%s", got, strings.Join(tc.want, "\n"))
			}
		})
	}
}

// An error names each device and process, up to a number, and the parts of one finding.
func TestReservationCheckError(t *testing.T) {
	f := inventory.Finding{Device: gpu.Device{ID: "GPU-a"}, Failed: true, Failure: "x"}
	for pid := range 12 {
		f.Processes = append(f.Processes, gpu.Process{PID: 100 + pid})
	}
	err := fmt.Errorf("wrapped: %w", &inventory.CheckError{Findings: []inventory.Finding{f, {Device: gpu.Device{ID: "GPU-b"}, Failed: true}}})
	const want = "wrapped: reservation check: GPU-a: last health check not answered (x); memory in use by processes without a reservation: " +
		"pid 100, pid 101, pid 102, pid 103, pid 104, pid 105, pid 106, pid 107, 4 more; GPU-b: last health check not answered"
	if check, ok := errors.AsType[*inventory.CheckError](err); err.Error() != want || !ok || len(check.Findings) != 2 {
		t.Errorf("%v", err)
	}
}
