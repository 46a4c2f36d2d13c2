package nomadadapter

import (
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Groups are the device groups of the fingerprint that a plugin without saved group names would send.
func Groups(inv *inventory.Allocatable, by config.GroupBy) []*device.DeviceGroup {
	_, groups := assignment{by: by}.groups(inv)
	all := []*device.DeviceGroup{}
	for _, l := range newListings(inv, groups) {
		all = append(all, l.wire())
	}
	return all
}
