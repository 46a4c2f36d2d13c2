// Package rig runs the built agents as real processes, each under a small stand-in for its orchestrator
// that speaks the real protocol. The demo and the measurements are built on it.
package rig

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Nomad is a small Nomad client: it launches the plugin as an agent does, over go-plugin, and has its fingerprints.
type Nomad struct {
	client *plugin.Client
	device device.DevicePlugin
	seen   *watch.Value[fingerprint]
	stats  *watch.Value[[]*device.DeviceGroupStats] // the latest ones
}

// fingerprint is what the plugin sent last.
type fingerprint struct {
	groups []*device.DeviceGroup
	err    error
}

// nomadConfig is the config block.
func (s Setup) nomadConfig() map[string]any {
	if s.Peer {
		return map[string]any{}
	}
	c := map[string]any{"policy_file": s.Policy}
	if s.Injection != "" {
		c["injection"] = []string{s.Injection}
	}
	if s.Hasty {
		c["fingerprint_period"] = "2s"
	}
	for key, value := range s.settings() {
		c[key] = value
	}
	return c
}

// StartNomad launches a nomad-gpu binary, whose log goes to log.
func StartNomad(ctx context.Context, binary string, s Setup, log io.Writer) (*Nomad, error) {
	n := &Nomad{
		client: nomadtest.NewClient(s.command(binary), hclog.New(&hclog.LoggerOptions{Name: "nomad", Level: hclog.Debug, Output: log})),
		seen:   watch.NewValue(fingerprint{}),
		stats:  watch.NewValue[[]*device.DeviceGroupStats](nil),
	}
	if err := n.connect(ctx, s); err != nil {
		n.client.Kill()
		return nil, fmt.Errorf("nomad-gpu: %w", err)
	}
	return n, nil
}

func (n *Nomad) connect(ctx context.Context, s Setup) error {
	var err error
	if n.device, err = nomadtest.Dispense(n.client); err != nil {
		return err
	}
	if err := nomadtest.SetConfig(n.device, s.nomadConfig()); err != nil {
		return err
	}
	stream, err := n.device.Fingerprint(ctx)
	if err != nil {
		return err
	}
	go n.follow(stream)
	if s.Statistics == 0 {
		return nil
	}
	statistics, err := n.device.Stats(ctx, s.Statistics)
	if err != nil {
		return err
	}
	go func() {
		for r := range statistics { // ends when the plugin does
			n.stats.Store(r.Groups)
		}
	}()
	return nil
}

// follow ends when the plugin does.
func (n *Nomad) follow(stream <-chan *device.FingerprintResponse) {
	for r := range stream {
		n.seen.Store(fingerprint{r.Devices, r.Error})
	}
}

// Await waits until ok holds for the devices by ID.
func (n *Nomad) Await(ctx context.Context, what string, ok func(map[string]View) bool) error {
	for f := range n.seen.Watch(ctx) {
		if f.err != nil {
			return fmt.Errorf("nomad's stream ended, and with it its devices: %w", f.err)
		}
		if ok(views(f.groups)) {
			return nil
		}
	}
	return fmt.Errorf("nomad: %s: %w", what, ctx.Err())
}

// Devices is what the scheduler sees now, by device ID.
func (n *Nomad) Devices() map[string]View { return views(n.seen.Load().groups) }

func views(groups []*device.DeviceGroup) map[string]View {
	seen := map[string]View{}
	for _, g := range groups {
		for _, d := range g.Devices {
			v := View{ID: d.ID, Name: strings.Join([]string{g.Vendor, g.Type, g.Name}, "/"), Healthy: d.Healthy, Reason: d.HealthDesc}
			if d.HwLocality != nil {
				v.Where = d.HwLocality.PciBusID
			}
			seen[d.ID] = v
		}
	}
	return seen
}

// Groups are the device groups of the latest fingerprint.
func (n *Nomad) Groups() []*device.DeviceGroup { return n.seen.Load().groups }

// NextStatistics waits for statistics that the plugin sends from now on.
func (n *Nomad) NextStatistics(ctx context.Context) []*device.DeviceGroupStats {
	first := true
	for groups := range n.stats.Watch(ctx) {
		if !first && groups != nil {
			return groups
		}
		first = false
	}
	return nil
}

// Attributes are those of each group, a line each, sorted.
func (n *Nomad) Attributes() []string {
	var lines []string
	for _, g := range n.seen.Load().groups {
		var attrs []string
		for key, a := range g.Attributes {
			attrs = append(attrs, key+"="+strings.TrimSpace(a.GoString()))
		}
		slices.Sort(attrs)
		lines = append(lines, g.Name+": "+strings.Join(attrs, "  "))
	}
	slices.Sort(lines)
	return lines
}

// Reserve returns what a task with the devices would get.
func (n *Nomad) Reserve(ids ...string) (Grant, error) {
	r, err := n.device.Reserve(ids)
	if err != nil {
		return Grant{}, err
	}
	g := Grant{Env: r.Envs}
	for _, d := range r.Devices {
		g.Nodes = append(g.Nodes, d.TaskPath+" "+d.CgroupPerms)
	}
	return g, nil
}

// Ping makes a call that does nothing.
func (n *Nomad) Ping() error {
	_, err := n.device.PluginInfo()
	return err
}

// PID is the plugin's process.
func (n *Nomad) PID() string { return n.client.ID() }

// Stop ends the plugin as an agent does.
func (n *Nomad) Stop() { n.client.Kill() }
