package nomad

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
)

// Explain is what an agent that has not run before adds to the command explain.
func Explain(s config.Nomad) explain.Adapter {
	return explainAdapter(s, func(inv *inventory.Allocatable, id inventory.UnitID) (nomadadapter.GroupInfo, bool) {
		return nomadadapter.GroupOf(inv, s.GroupBy, id)
	})
}

// groupOf returns the device group of a unit.
type groupOf func(*inventory.Allocatable, inventory.UnitID) (nomadadapter.GroupInfo, bool)

// explainAdapter is what Nomad's adapter adds to the command explain, with the groups of a plugin.
func explainAdapter(s config.Nomad, of groupOf) explain.Adapter {
	return explain.Adapter{
		Name:    func(u inventory.Unit) string { return u.Pool },
		Respond: func(p inventory.Plan) explain.Response { return responseOf(s, p) },
		Notes: func(inv *inventory.Allocatable, units []inventory.Unit, n int) []string {
			return nomadNotes(of, inv, units, n)
		},
		Prove: policy.Result{Prove: s.Prove}.ProveSummary(),
		Reset: policy.Result{Reset: s.Reset}.ResetSummary(),
	}
}

// responseOf is the response to Reserve.
func responseOf(s config.Nomad, p inventory.Plan) explain.Response {
	made := nomadadapter.Response(p, s)
	r := explain.Response{Env: made.Envs}
	for _, d := range made.Devices {
		r.DeviceNodes = append(r.DeviceNodes, explain.Node{HostPath: d.HostPath, ContainerPath: d.TaskPath, Permissions: d.CgroupPerms})
	}
	for _, m := range made.Mounts {
		r.Mounts = append(r.Mounts, explain.Mount{HostPath: m.HostPath, ContainerPath: m.TaskPath, ReadOnly: m.ReadOnly})
	}
	return r
}

// nomadNotes are what Nomad does with a request (scheduler/feasible/device.go): it takes all devices of a task from one group.
func nomadNotes(of groupOf, inv *inventory.Allocatable, units []inventory.Unit, n int) []string {
	var notes, ids []string
	for _, u := range units {
		g, ok := of(inv, u.ID)
		if !ok || slices.Contains(ids, g.ID) {
			continue
		}
		ids = append(ids, g.ID)
		var attributes []string
		for _, key := range slices.Sorted(maps.Keys(g.Attributes)) {
			attributes = append(attributes, key+"="+g.Attributes[key])
		}
		notes = append(notes, fmt.Sprintf("Nomad: device %q { count = %d }; constraints can use ${device.attr...}: %s", g.ID, max(n, 1), strings.Join(attributes, ", ")))
	}
	switch {
	case len(ids) > 1:
		notes = append(notes, "Nomad: these devices are of several groups: no task gets them together")
	case n > 0:
		notes = append(notes, "Nomad: the scheduler chooses free devices of the group itself and asks no plugin: the choice above is what the agent would prefer; group_by makes groups of devices that are near each other")
	default:
		notes = append(notes, `Nomad: a task can ask for a device by an attribute of its group, or by IDs: constraint { attribute = "${device.ids}"  operator = "set_contains_any"  value = "GPU-..." }`)
	}
	return notes
}
