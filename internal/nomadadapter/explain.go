package nomadadapter

import (
	"maps"
	"slices"
	"strconv"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// GroupInfo is the device group of a unit as jobs request it.
type GroupInfo struct {
	ID         string            // "nvidia/gpu/H100": the vendor, the type and the name
	Attributes map[string]string // that constraints can refer to: those that all units of the group have in common
}

// Group returns the group of a unit of an inventory, by the names that this plugin has assigned; false if it is in none.
func (p *Plugin) Group(inv *inventory.Allocatable, id inventory.UnitID) (GroupInfo, bool) {
	r := p.currentRun()
	return groupOf(inv, p.names.groups(inv, r.settings.GroupBy), id)
}

// GroupOf returns the group of a unit by the names that a plugin would assign which has not run before.
func GroupOf(inv *inventory.Allocatable, by config.GroupBy, id inventory.UnitID) (GroupInfo, bool) {
	var names groupNamer
	return groupOf(inv, names.groups(inv, by), id)
}

func groupOf(inv *inventory.Allocatable, groups []group, id inventory.UnitID) (GroupInfo, bool) {
	for _, g := range groups {
		if !slices.ContainsFunc(g.units, func(u inventory.Unit) bool { return u.ID == id }) {
			continue
		}
		info := GroupInfo{ID: vendor + "/" + g.key.groupType + "/" + g.name, Attributes: map[string]string{}}
		common := commonAttributes(inv.Driver(), g.units)
		for _, key := range slices.Sorted(maps.Keys(common)) {
			info.Attributes[key] = common[key].String()
		}
		return info, true
	}
	return GroupInfo{}, false
}

// String is the attribute as a constraint has it: "81559 MiB".
func (a attribute) String() string {
	if a.text != "" {
		return a.text
	}
	text := strconv.FormatInt(a.number, 10)
	if a.unit != "" {
		text += " " + a.unit
	}
	return text
}
