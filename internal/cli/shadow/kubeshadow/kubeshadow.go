// Package kubeshadow has both sides of a comparison on a Kubernetes node: what this agent would offer and answer, and what the kubelet
// got from another device plugin.
package kubeshadow

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/cli/shadow"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// Options are where the kubelet's side is read, and how this agent answers.
type Options struct {
	Socket   string               // of the kubelet's pod-resources API
	ProcRoot string               // procfs of the host; "" = /proc
	Answers  deviceplugin.Options // DevRoot, MPSRoot and Lists count
}

// domain is that of the resources that are compared: the kubelet's others are from plugins for other devices.
const domain = inventory.ResourceDomain

// Compare compares a state with what the kubelet has.
func Compare(ctx context.Context, s core.State, o Options) (shadow.Report, error) {
	if o.Socket == "" {
		return shadow.Report{}, errors.New("no socket of the kubelet's pod-resources API: give --pod-resources-socket")
	}
	node, err := podresources.ReadNode(ctx, o.Socket)
	if err != nil {
		return shadow.Report{}, err
	}
	here, there := offersOf(s.Allocatable), offersOfNode(node)
	c := comparison{allocatable: s.Allocatable, options: o}
	c.compareHeld(here, there, node)
	c.differences = append(c.differences, shadow.Compare(here, there, true)...)
	if state := s.Allocatable.Driver(); state.Reason != "" {
		c.notCompared = append(c.notCompared, "the driver here: "+state.Reason)
	}
	c.compareAnswers(node.Containers)
	differences := shadow.WithReasons(c.differences, s.Allocatable)
	return shadow.NewReport("the kubelet's pod-resources API "+o.Socket, here, there, differences, c.notCompared), nil
}

// offersOf are the resources of this agent.
func offersOf(inv *inventory.Allocatable) (offers []shadow.Offer) {
	for u := range inv.Units() {
		d := shadow.Device{ID: string(u.ID), Healthy: u.Health.Schedulable(), Place: node(u.Device.NUMANode)}
		if text := u.Health.String(); text != health.Healthy.String() {
			d.Remark = text
		}
		offers = withDevice(offers, kubeadapter.ResourceOf(u), d)
	}
	return offers
}

// withDevice returns the resources with a device of one of them more.
func withDevice(offers []shadow.Offer, resource string, d shadow.Device) []shadow.Offer {
	i := slices.IndexFunc(offers, func(o shadow.Offer) bool { return o.Name == resource })
	if i < 0 {
		i = len(offers)
		offers = append(offers, shadow.Offer{Name: resource})
	}
	offers[i].Devices = append(offers[i].Devices, d)
	return offers
}

// offersOfNode are the resources of the other plugin.
func offersOfNode(n podresources.Node) (offers []shadow.Offer) {
	for _, d := range n.Allocatable {
		if strings.HasPrefix(d.Resource, domain) {
			offers = withDevice(offers, d.Resource, shadow.Device{ID: d.ID, Healthy: true, Place: node(d.NUMANode)})
		}
	}
	return offers
}

func node(numa int) string {
	if numa < 0 {
		return ""
	}
	return fmt.Sprintf("NUMA node %d", numa)
}

// comparison collects what differs.
type comparison struct {
	allocatable *inventory.Allocatable
	options     Options
	differences []shadow.Difference
	notCompared []string
}

// compareHeld finds devices that pods hold and that this agent would not list: the kubelet would not know them after a swap.
func (c *comparison) compareHeld(here, there []shadow.Offer, n podresources.Node) {
	offered := map[string]bool{}
	for _, o := range append(here, there...) {
		for _, d := range o.Devices {
			offered[o.Name+" "+d.ID] = true
		}
	}
	for _, held := range n.Containers {
		for _, id := range held.IDs {
			if strings.HasPrefix(held.Resource, domain) && !offered[held.Resource+" "+id] {
				c.differences = append(c.differences, shadow.Difference{
					Kind: shadow.KindDevice, Offer: held.Resource, Device: id, Work: work(held), Here: "not offered", There: "held, not allocatable",
				})
			}
		}
	}
}

func work(c podresources.Container) string { return c.Namespace + "/" + c.Pod + " " + c.Container }
