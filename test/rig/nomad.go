// Package rig runs the built agents as real processes, each under a small stand-in for its orchestrator
// that speaks the real protocol. The demo and the measurements are built on it.
package rig

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/internal/watch"
)

// Nomad is a small Nomad client: it launches the plugin as an agent does, over go-plugin, and has its fingerprints.
type Nomad struct {
	client *plugin.Client
	device device.DevicePlugin
	seen   *watch.Value[fingerprints]
}

// fingerprints are what the plugin has sent.
type fingerprints struct {
	first, latest []*device.DeviceGroup
	err           error
}

// nomadConfig is the config block.
func (s Setup) nomadConfig() map[string]any {
	c := map[string]any{"policy_file": s.Policy}
	if s.Hasty {
		c["fingerprint_period"] = "2s"
	}
	for key, value := range s.settings() {
		c[key] = value
		if b, err := strconv.ParseBool(value); err == nil {
			c[key] = b
		}
	}
	return c
}

// StartNomad launches a nomad-gpu binary, whose log goes to log.
func StartNomad(ctx context.Context, binary string, s Setup, log io.Writer) (*Nomad, error) {
	n := &Nomad{
		client: nomadtest.NewClient(exec.Command(binary), hclog.New(&hclog.LoggerOptions{Name: "nomad", Level: hclog.Debug, Output: log})),
		seen:   watch.NewValue(fingerprints{}),
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
	return nil
}

// follow ends when the plugin does.
func (n *Nomad) follow(stream <-chan *device.FingerprintResponse) {
	for r := range stream {
		f := n.seen.Load()
		f.latest, f.err = r.Devices, r.Error
		if f.first == nil {
			f.first = f.latest
		}
		n.seen.Store(f)
	}
}

// Await waits until ok holds for the devices by ID.
func (n *Nomad) Await(ctx context.Context, what string, ok func(map[string]View) bool) error {
	for f := range n.seen.Watch(ctx) {
		if f.err != nil {
			return fmt.Errorf("nomad's stream ended, and with it its devices: %w", f.err)
		}
		if ok(views(f.latest)) {
			return nil
		}
	}
	return fmt.Errorf("nomad: %s: %w", what, ctx.Err())
}

// Devices is what the scheduler sees now, by device ID.
func (n *Nomad) Devices() map[string]View { return views(n.seen.Load().latest) }

// First is what the scheduler saw first.
func (n *Nomad) First() map[string]View { return views(n.seen.Load().first) }

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

// Attributes are those of each group, a line each, sorted.
func (n *Nomad) Attributes() []string {
	var lines []string
	for _, g := range n.seen.Load().latest {
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

// Stats returns the plugin's statistics.
func (n *Nomad) Stats(ctx context.Context, interval time.Duration) (<-chan *device.StatsResponse, error) {
	return n.device.Stats(ctx, interval)
}

// Kill ends the plugin with SIGKILL.
func (n *Nomad) Kill() error {
	pid, err := strconv.Atoi(n.client.ID())
	if err != nil {
		return err
	}
	err = syscall.Kill(pid, syscall.SIGKILL)
	n.client.Kill() // waits for the end
	return err
}

// Stop ends the plugin as an agent does.
func (n *Nomad) Stop() { n.client.Kill() }
