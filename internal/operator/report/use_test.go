package report_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// What operators see of owners and processes, as text and as JSON.
func TestWithUse(t *testing.T) {
	cfg := core.DefaultConfig()
	state := core.NewState(cfg).Read(cfg, time.Now(), coretest.GPUs(4)).Observe(cfg, time.Now(), health.Observation{
		At: gpu.WholeGPU(coretest.GPU(3)), Kind: health.Checked, Processes: &[]gpu.Process{{At: gpu.WholeGPU(coretest.GPU(3)), PID: 9}},
	})
	began := time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)
	pod := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: "one", Container: "main", ID: "uid-1", Claim: "gpus"}
	task := holders.Work{Orchestrator: holders.Nomad, Namespace: "batch", Name: "train", Container: "main", ID: "alloc-1"}
	process := func(pid int, mib uint64) gpu.Process {
		return gpu.Process{PID: pid, Memory: gpu.OptionalUint64{Value: mib << 20, OK: mib > 0}}
	}
	r := report.DescribeState(state, cfg).WithUse(use.Table{Problems: problem.Each(problem.Owners, "owners: no answer"), Devices: []use.Device{
		{
			ID: coretest.GPU(0), Holders: []holders.Holder{{Work: pod}}, HeldSince: began, IdleSince: began.Add(time.Minute),
			Processes: []use.Process{{Process: process(7, 512), Name: "python", Owner: holders.Work{Orchestrator: holders.Kubernetes, ID: "uid-1"}}},
		},
		{ID: coretest.GPU(1), Holders: []holders.Holder{{Work: task}, {Work: holders.Work{Orchestrator: holders.Nomad, ID: "alloc-2"}}}, HeldSince: began},
		{ID: coretest.GPU(2), Processes: []use.Process{{Process: process(8, 0), Unreserved: true}}},
		{ID: coretest.GPU(3), Processes: []use.Process{}},
	}})
	table, _ := render(t, r)
	var lines []string
	for line := range strings.Lines(table) {
		if strings.HasPrefix(line, "owner") || strings.HasPrefix(line, "process") || strings.HasPrefix(line, "warning") {
			lines = append(lines, strings.TrimSuffix(strings.ReplaceAll(line, "00000000-0000-4000-8000-00000000000", ""), "\n"))
		}
	}
	if diff := cmp.Diff([]string{
		"warning: owners: no answer",
		"owner: GPU 0 GPU-0: pod default/one (claim gpus), container main, since 2026-11-20T10:00:00Z, idle since 2026-11-20T10:01:00Z",
		"owner: GPU 1 GPU-1: job batch/train (allocation alloc-1), task main, since 2026-11-20T10:00:00Z",
		"owner: GPU 1 GPU-1: allocation alloc-2, since 2026-11-20T10:00:00Z",
		"process: GPU 0 GPU-0: pid 7 python (512 MiB), of the pod with UID uid-1",
		"process: GPU 2 GPU-2: pid 8, without a reservation",
	}, lines); diff != "" {
		t.Error(diff)
	}
	text, err := json.Marshal([]any{r.Devices[0].Processes, r.Devices[2].Processes})
	if want := `[[{"pid":7,"memoryBytes":536870912,"name":"python","owner":{"orchestrator":"kubernetes","id":"uid-1"}}],[{"pid":8,"unreserved":true}]]`; err != nil || string(text) != want {
		t.Errorf("%s, %v", text, err)
	}
}
