package limit_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
)

// Shares of the device plugin get the CDI name of their limit although nothing sets limits, because NVIDIA's hook does: their limit is read, whether it is required
// or not. Where the driver has no limits, or the control groups can't be read, a share whose limit is required takes no work, and another one has no limit. Shares
// of claims and of Nomad's tasks need what sets limits, and those of tasks the record of allocations, by which the agent knows which task has which.
func TestWithheld(t *testing.T) {
	const kind, failed = "k8s.device-plugin.nvidia.com/", "a limit can't be set"
	misc, tried := limit.Node{Backend: limit.Misc}, map[gpu.DeviceID]string{coretest.GPU(0): ""}
	reads := limit.Node{Backend: limit.Misc, CannotSet: "no limit-server"}
	for name, c := range map[string]struct {
		api     inventory.API
		support limit.Support
		why     string // "" = it takes work, with its limit
	}{
		"device plugin, only read":     {inventory.DevicePlugin, limit.Support{Node: reads}, ""},
		"device plugin, set":           {inventory.DevicePlugin, limit.Support{Node: misc, Tried: tried}, ""},
		"device plugin, set in vain":   {inventory.DevicePlugin, limit.Support{Node: misc, Tried: map[gpu.DeviceID]string{coretest.GPU(0): failed}}, failed},
		"device plugin, older driver":  {inventory.DevicePlugin, limit.Support{Node: limit.Node{Unsupported: "driver 580", CannotSet: "no limit-server"}}, "driver 580"},
		"device plugin, no controller": {inventory.DevicePlugin, limit.Support{Node: limit.Node{Unsupported: "neither the controller dmem nor misc", CannotSet: "no limit-server"}}, "neither the controller dmem nor misc"},
		"claim, only read":             {inventory.DRA, limit.Support{Node: reads}, "no limit-server"},
		"task, only read":              {inventory.Nomad, limit.Support{Node: reads}, "no limit-server"},
		"task, read at no time":        {inventory.Nomad, limit.Support{Node: misc, Tried: tried, Unread: "timeout"}, "timeout"},
		"task, allocations not read":   {inventory.Nomad, limit.Support{Node: misc, Tried: tried, Unlisted: "set nomad_address"}, "set nomad_address"},
		"claim, allocations not read":  {inventory.DRA, limit.Support{Node: misc, Tried: tried, Unlisted: "set nomad_address"}, ""},
	} {
		for _, mode := range []inventory.LimitMode{inventory.LimitRequired, inventory.LimitBestEffort} {
			cfg := core.DefaultConfig()
			cfg.API, cfg.Injection = c.api, inventory.Injection{Name: "cdi-cri", CDI: inventory.CDIRequired}
			cfg.Policy = inventory.Policy{Limits: inventory.LimitPolicy{On: true, Reserve: gib}, Rules: []inventory.Rule{{
				Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2, Memory: 20 * gib, Limit: mode},
			}}}
			inv := core.Build(coretest.GPUs(1), health.Ledger{}, cfg)
			cdi := &inventory.CDI{Kind: kind + "gpu", LimitKind: kind + "memory-limit", Limits: []uint64{20 * gib}, Defined: []gpu.DeviceID{coretest.GPU(0)}}
			if c.api == inventory.DRA {
				cdi.WithoutHook = cdi.Defined
			}
			of := inv.WithHost(inventory.Host{CDI: cdi, Limits: c.support.Limits(inv.WithoutHost())}, cfg.Overlap)
			var unit inventory.Unit
			for u := range of.Units() {
				unit = u
				break
			}
			plan, err := of.Reserve(unit.ID)
			refused := mode == inventory.LimitRequired && c.why != ""
			if refused && (err == nil || !strings.Contains(err.Error(), c.why)) || !refused && err != nil {
				t.Errorf("%s, %s: %v", name, mode, err)
			}
			if limited := slices.Contains(plan.CDI, kind+"memory-limit=20480"); limited != (c.api != inventory.DRA && !refused && (c.why == "" || c.support.Unlisted != "")) {
				t.Errorf("%s, %s: %q", name, mode, plan.CDI)
			}
		}
	}
}
