// Package nomadshadow has both sides of a comparison on a Nomad client: the device groups that this agent would send, and those that the
// node has from another device plugin.
package nomadshadow

import (
	"context"
	"fmt"
	"strconv"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/cli/shadow"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
)

// vendor is the vendor of the groups that are compared: the node's others are from plugins for other devices.
const vendor = "nvidia"

// Compare compares a state with the devices of the agent's node.
func Compare(ctx context.Context, s core.State, by config.GroupBy, c *agentapi.Client) (shadow.Report, error) {
	n, err := c.Node(ctx)
	if err != nil {
		return shadow.Report{}, err
	}
	here, there := offersOf(nomadadapter.Groups(s.Allocatable, by)), offersOfNode(n)
	var notCompared []string
	if state := s.Allocatable.Driver(); state.Reason != "" {
		notCompared = append(notCompared, "the driver here: "+state.Reason)
	}
	differences := shadow.WithReasons(shadow.Compare(here, there, false), s.Allocatable)
	return shadow.NewReport("node "+n.Name+" of the Nomad agent", here, there, differences, notCompared), nil
}

// offersOf are the groups of this agent.
func offersOf(groups []*device.DeviceGroup) (offers []shadow.Offer) {
	for _, g := range groups {
		o := shadow.Offer{Name: g.Vendor + "/" + g.Type + "/" + g.Name, Attributes: map[string]string{}}
		for key, a := range g.Attributes {
			o.Attributes[key] = text(agentapi.Attribute{Float: a.Float, Int: a.Int, String: a.String, Bool: a.Bool, Unit: a.Unit})
		}
		for _, d := range g.Devices {
			entry := shadow.Device{ID: d.ID, Healthy: d.Healthy, Remark: d.HealthDesc}
			if d.HwLocality != nil {
				entry.Place = "PCI " + d.HwLocality.PciBusID
			}
			o.Devices = append(o.Devices, entry)
		}
		offers = append(offers, o)
	}
	return offers
}

// offersOfNode are the groups of the node.
func offersOfNode(n agentapi.Node) (offers []shadow.Offer) {
	for _, g := range n.NodeResources.Devices {
		if g.Vendor != vendor {
			continue
		}
		o := shadow.Offer{Name: g.Vendor + "/" + g.Type + "/" + g.Name, Attributes: map[string]string{}}
		for key, a := range g.Attributes {
			o.Attributes[key] = text(a)
		}
		for _, i := range g.Instances {
			entry := shadow.Device{ID: i.ID, Healthy: i.Healthy, Remark: i.HealthDescription}
			if i.Locality != nil && i.Locality.PciBusID != "" {
				entry.Place = "PCI " + printable(i.Locality.PciBusID)
			}
			o.Devices = append(o.Devices, entry)
		}
		offers = append(offers, o)
	}
	return offers
}

// printable is a text as it is, or quoted if it has bytes that are not printed: nomad-device-nvidia pads a PCI address with them.
func printable(text string) string {
	if quoted := strconv.Quote(text); quoted != `"`+text+`"` {
		return quoted
	}
	return text
}

// text is the value with its unit.
func text(a agentapi.Attribute) string {
	value := ""
	switch {
	case a.Int != nil:
		value = strconv.FormatInt(*a.Int, 10)
	case a.Float != nil:
		value = strconv.FormatFloat(*a.Float, 'g', -1, 64)
	case a.String != nil:
		value = strconv.Quote(*a.String)
	case a.Bool != nil:
		value = strconv.FormatBool(*a.Bool)
	}
	if a.Unit != "" {
		return fmt.Sprintf("%s %s", value, a.Unit)
	}
	return value
}
