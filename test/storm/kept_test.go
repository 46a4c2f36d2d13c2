package storm

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// What an agent has bound is on disk within about a second: what came later is lost with a process that is killed, or that
// can't write.

// keptBy are the devices that an agent's history binds: that have a number, and those that a share has decided on.
func (a *agent) keptBy() (numbered, decided map[gpu.DeviceID]bool) {
	var file struct{ Record core.Checkpoint }
	numbered, decided = map[gpu.DeviceID]bool{}, map[gpu.DeviceID]bool{}
	if text, err := os.ReadFile(a.history()); err != nil || json.Unmarshal(text, &file) != nil {
		return numbered, decided
	}
	for _, n := range file.Record.Binding.Numbering.Numbers {
		numbered[n.ID] = true
	}
	for _, c := range file.Record.Binding.Counts {
		if !strings.HasPrefix(c.Share, a.p.split.pool("gpu")+" ") {
			continue // of another policy
		}
		for _, id := range slices.Concat(c.Taken, c.Rejected) {
			decided[id] = true
		}
	}
	return numbered, decided
}

// claimed are the devices that have a number in the claims of an agent.
func (a *agent) claimed() map[gpu.DeviceID]bool {
	var file struct {
		Numbers []struct{ ID gpu.DeviceID }
	}
	numbered := map[gpu.DeviceID]bool{}
	if text, err := os.ReadFile(filepath.Join(a.p.stateDir, "claims", a.name+".json")); err != nil || json.Unmarshal(text, &file) != nil {
		return numbered
	}
	for _, n := range file.Numbers {
		numbered[n.ID] = true
	}
	return numbered
}

// died enters what is lost with a process that has just ended.
func (a *agent) died() {
	numbered, decided := a.keptBy()
	kept := func(id gpu.DeviceID) bool {
		return numbered[id] || slices.ContainsFunc([]string{forNomad, forKubernetes}, func(name string) bool {
			return a.p.agents[name].claimed()[id] || a.p.agents[name].life.offer().has(id)
		})
	}
	a.p.deals.die(a.name, kept, func(id gpu.DeviceID) bool { return decided[id] })
}

// has reports whether a device has a number.
func (o *offered) has(id gpu.DeviceID) bool {
	if o == nil {
		return false
	}
	_, ok := o.Numbers[id]
	return ok
}
