package explain_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
	"github.com/tandem-gpu/tandem/test/check"
)

// explain has what a share may use, by what that is limited, the limit of a container, and why a GPU can't be shared so.
func TestLimitsAreExplained(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.API = inventory.Nomad
	cfg.Policy = inventory.Policy{Limits: inventory.LimitPolicy{On: true, Reserve: 1 << 30}, Rules: []inventory.Rule{
		{Select: inventory.Selector{At: "p.yaml:3: rules[0].select", IDs: []gpu.DeviceID{coretest.GPU(0)}}, Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4, Limit: inventory.LimitRequired}},
		{Select: inventory.Selector{At: "p.yaml:4: rules[1].select", IDs: []gpu.DeviceID{coretest.GPU(1)}}, Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4, Memory: 20 << 30, Limit: inventory.LimitRequired}},
	}}
	state := core.NewState(cfg).Read(cfg, time.Unix(1, 0), coretest.GPUs(2),
		health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Checked}, health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.Checked})
	state = state.WithHost(cfg, time.Unix(1, 0), inventory.Host{Limits: &inventory.Limits{Withheld: map[gpu.DeviceID]inventory.LimitMissing{coretest.GPU(0): {}}}})
	e, err := explain.Explain(explain.Input{State: state, Adapter: adapter}, explain.Args{Pool: "gpu.shared", Count: 2})
	check.NoError(t, err)
	var text bytes.Buffer
	check.NoError(t, e.Write(&text))
	for _, want := range []string{
		"  memory limit: 40266 MiB\n",
		"not offered: the limits of 4 shares of 20480 MiB, 81920 MiB, are more than its 81559 MiB less the reserve of 1024 MiB",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	e, err = explain.Explain(explain.Input{State: state, Adapter: adapter}, explain.Args{})
	check.NoError(t, err)
	text.Reset()
	check.NoError(t, e.Write(&text))
	if want := "memory of a share 20133 MiB, limited by the task's control group (exec, java, raw_exec)"; !strings.Contains(text.String(), want) || e.Devices[0].MemoryLimit != 20133<<20 {
		t.Errorf("no %q in\n%s", want, text.String())
	}
}
