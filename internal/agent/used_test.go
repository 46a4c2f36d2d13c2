package agent

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

// The MPS server of a pool that no work has is no use of a GPU. It is one while work has another GPU of the pool: its
// daemon is not ended then.
func TestMPSServerIsNoUse(t *testing.T) {
	cfg, now := core.DefaultConfig(), time.Now()
	cfg.Policy.Rules = []inventory.Rule{
		{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(0), coretest.GPU(1)}}, Pool: "few", Sharing: &inventory.Sharing{
			Mode: inventory.MPS, Replicas: 2, OnePerRequest: true,
		}},
		{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(2)}}, Pool: "others", Sharing: &inventory.Sharing{
			Mode: inventory.MPS, Replicas: 2, OnePerRequest: true,
		}},
	}
	s := core.NewState(cfg).Read(cfg, now, coretest.GPUs(4))
	server := use.Process{Process: gpu.Process{PID: 7}, Name: "nvidia-cuda-mps", MPSServer: true}
	client := use.Process{Process: gpu.Process{PID: 8}, Name: "python"}
	train := []holders.Holder{{Work: holders.Work{Namespace: "default", Name: "train"}}}
	for name, tc := range map[string]struct {
		here, beside, elsewhere use.Device
		want                    []string
	}{
		"nobody has the pool": {
			use.Device{Processes: []use.Process{server}}, use.Device{Processes: []use.Process{server}}, use.Device{Holders: train}, nil,
		},
		"work has another GPU of it": {
			use.Device{Processes: []use.Process{server}}, use.Device{Processes: []use.Process{server}, Holders: train}, use.Device{},
			[]string{"pid 7, the MPS server of pool few, whose " + string(coretest.GPU(1)) + " pod default/train has"},
		},
		"a client": {
			use.Device{Processes: []use.Process{server, client}}, use.Device{}, use.Device{}, []string{"pid 8"},
		},
	} {
		tc.here.ID, tc.beside.ID, tc.elsewhere.ID = coretest.GPU(0), coretest.GPU(1), coretest.GPU(2)
		table := use.Table{At: now, HoldersKnown: true, Devices: []use.Device{tc.here, tc.beside, tc.elsewhere}}
		g := usedBy(coretest.GPU(0), s.Allocatable, table, false)
		if !slices.Equal(g.processes, tc.want) || len(g.holders) > 0 || g.unread != "" {
			t.Errorf("%s: %+v, want %q", name, g, tc.want)
		}
	}
	table := use.Table{At: now, HoldersKnown: true, Devices: []use.Device{
		{ID: coretest.GPU(0), Processes: []use.Process{server, client}}, {ID: coretest.GPU(1), Holders: train},
	}}
	if g := usedBy(coretest.GPU(0), s.Allocatable, table, true); len(g.processes) != 1 || !strings.Contains(g.processes[0], "MPS server") {
		t.Errorf("taken, and its daemon has not ended: %+v", g)
	}
	if got := mpsPools(coretest.GPU(0), s.Allocatable); !slices.Equal(got, []string{"few"}) {
		t.Errorf("pools %q", got)
	}
	if got := mpsPools(coretest.GPU(3), s.Allocatable); len(got) > 0 {
		t.Errorf("pools %q of a GPU that is not shared", got)
	}
	isServer := mpsServers(use.Table{Devices: []use.Device{{ID: coretest.GPU(0), Processes: []use.Process{server, client}}}})
	if !isServer(server.Process) || isServer(client.Process) || isServer(gpu.Process{PID: 7, Started: 1}) {
		t.Error("which process is the server is not told by PID and start")
	}
}
