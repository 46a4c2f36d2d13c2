package cli

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/mps/supervisor"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// The limits are those of NVIDIA's mps-control-daemon, an equal part for each client, unless the policy has others.
func TestMPSPools(t *testing.T) {
	ready := report.Driver{State: "ready"}
	shared := func(id, pool string, replicas int) report.Device {
		return report.Device{ID: gpu.DeviceID("GPU-" + id), Pool: pool, Sharing: "mps", Replicas: replicas, MemoryBytes: 80 << 30}
	}
	limited, gone, sliced, sick := shared("2", "few", 2), shared("3", "old", 2), shared("4", "gpu.shared", 4), shared("1", "gpu.mps", 1)
	limited.MPSMemoryBytes, limited.MPSThreadPercent = 30<<30, 70
	others := shared("5", "others", 2)
	gone.Cause, sliced.Sharing, sick.Cause, others.Cause = "WITHDRAWN", "time-slicing", "OCCUPIED", "OVERLAP"
	for name, tc := range map[string]struct {
		report report.Report
		want   map[string]supervisor.Pool // by name
		fails  bool
	}{
		"equal parts": {report.Report{Driver: ready, Devices: []report.Device{shared("1", "gpu.mps", 3), shared("0", "gpu.mps", 3)}},
			map[string]supervisor.Pool{"gpu.mps": {Name: "gpu.mps", Threads: 33, Devices: []supervisor.Device{{ID: "GPU-0", MiB: 27306}, {ID: "GPU-1", MiB: 27306}}}}, false},
		"the policy's": {report.Report{Driver: ready, Devices: []report.Device{limited}},
			map[string]supervisor.Pool{"few": {Name: "few", Threads: 70, Devices: []supervisor.Device{{ID: "GPU-2", MiB: 30720}}}}, false},
		"a unit with another health": {report.Report{Driver: ready, Devices: []report.Device{shared("1", "gpu.mps", 3), sick}},
			map[string]supervisor.Pool{"gpu.mps": {Name: "gpu.mps", Threads: 25, Devices: []supervisor.Device{{ID: "GPU-1", MiB: 20480}}}}, false},
		"withdrawn, another agent's, and not by MPS": {report.Report{Driver: ready, Devices: []report.Device{gone, others, sliced}}, map[string]supervisor.Pool{}, false},
		"an operator has released the driver": {report.Report{Driver: report.Driver{State: "released"}, Devices: []report.Device{limited}},
			map[string]supervisor.Pool{}, false},
		"the driver is released for a reset": {report.Report{Driver: report.Driver{State: "released", ResetOf: "GPU-9"}, Devices: []report.Device{limited}}, nil, true},
		"no driver":                          {report.Report{Driver: report.Driver{State: "failed", Reason: "version mismatch"}}, nil, true},
		"just started":                       {report.Report{Driver: ready, Provisional: true}, nil, true},
	} {
		pools, err := mpsPools(tc.report)
		got := map[string]supervisor.Pool{}
		for _, p := range pools {
			got[p.Name] = p
		}
		if (err != nil) != tc.fails || !tc.fails && !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: %+v, %v", name, pools, err)
		}
	}
}

// Which GPUs have work is what the daemons of other GPUs of a pool wait for.
func TestHeldGPUs(t *testing.T) {
	held := report.Device{ID: "GPU-1::0", GPU: "GPU-1", Owners: []report.Owner{{Name: "train"}}}
	free := report.Device{ID: "GPU-2", GPU: "GPU-2"}
	r := report.Report{Devices: []report.Device{held, free}}
	if got := heldGPUs(r); !slices.Equal(got, []gpu.DeviceID{"GPU-1"}) {
		t.Errorf("held %v", got)
	}
	r.OwnersUnknown = &report.Unknown{}
	if got := heldGPUs(r); !slices.Equal(got, []gpu.DeviceID{"GPU-1", "GPU-2"}) {
		t.Errorf("without a complete record: held %v", got)
	}
	unread := report.Report{Devices: []report.Device{free}}.WithUse(use.Table{})
	if got := heldGPUs(unread); !slices.Equal(got, []gpu.DeviceID{"GPU-2"}) {
		t.Errorf("before the first reading, or with occupancy = off: held %v", got)
	}
}

// What agents have taken is in the file of the node.
func TestTakenGPUs(t *testing.T) {
	dir := t.TempDir()
	if taken, err := takenGPUs(dir); err != nil || len(taken) > 0 {
		t.Errorf("without a file: %v, %v", taken, err)
	}
	marks := map[gpu.DeviceID]ownership.Mark{"GPU-1": {Agent: "k8s-gpu", Purpose: inventory.Proof}}
	if err := ownership.Write(dir, ownership.File{Taken: marks}); err != nil {
		t.Fatal(err)
	}
	if taken, err := takenGPUs(dir); err != nil || !maps.Equal(taken, map[gpu.DeviceID]string{"GPU-1": "k8s-gpu"}) {
		t.Errorf("%v, %v", taken, err)
	}
	if err := os.WriteFile(filepath.Join(dir, ownership.FileName), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := takenGPUs(dir); err == nil {
		t.Error("a damaged file has no GPU")
	}
}
