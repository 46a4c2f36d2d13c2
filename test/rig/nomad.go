// Package rig runs the built agents as real processes, each under a small stand-in for its orchestrator
// that speaks the real protocol. The demo and the measurements are built on it.
package rig

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

// Nomad is a small Nomad client: it launches the plugin as an agent does, over go-plugin, and holds the
// fingerprint that came last.
type Nomad struct {
	client *plugin.Client
	device device.DevicePlugin

	mu      sync.Mutex
	groups  []*device.DeviceGroup
	err     error
	changed chan struct{} // closed and replaced with each fingerprint
}

// nomadConfig is the config block that the operator would write.
type nomadConfig struct {
	Enabled           bool     `codec:"enabled"`
	IgnoredGPUIDs     []string `codec:"ignored_gpu_ids"`
	FingerprintPeriod string   `codec:"fingerprint_period"`
	DriverRoot        string   `codec:"driver_root"`
	DevRoot           string   `codec:"dev_root"`
	SysfsRoot         string   `codec:"sysfs_root"`
	ProcfsRoot        string   `codec:"procfs_root"`
	StateDir          string   `codec:"state_dir"`
	PolicyFile        string   `codec:"policy_file"`
	HealthPeriod      string   `codec:"health_period"`
	HealthSettle      string   `codec:"health_settle"`
	RecoveryDwell     string   `codec:"recovery_dwell"`
}

func (s Setup) nomadConfig() nomadConfig {
	c := nomadConfig{
		Enabled: true, FingerprintPeriod: "1m",
		DriverRoot: s.Driver, DevRoot: s.Dev, SysfsRoot: s.Sysfs, ProcfsRoot: s.Procfs, StateDir: s.StateDir, PolicyFile: s.Policy,
		HealthPeriod: "10s", HealthSettle: "30s", RecoveryDwell: "1m",
	}
	if s.Hasty {
		c.FingerprintPeriod, c.HealthPeriod, c.HealthSettle, c.RecoveryDwell = "2s", "500ms", "2s", "2s"
	}
	return c
}

// StartNomad launches a nomad-gpu binary, whose log goes to log.
func StartNomad(ctx context.Context, binary string, s Setup, log io.Writer) (*Nomad, error) {
	n := &Nomad{
		client:  nomadtest.NewClient(exec.Command(binary), hclog.New(&hclog.LoggerOptions{Name: "nomad", Level: hclog.Debug, Output: log})),
		changed: make(chan struct{}),
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
		n.mu.Lock()
		n.groups, n.err = r.Devices, r.Error
		close(n.changed)
		n.changed = make(chan struct{})
		n.mu.Unlock()
	}
}

// Await waits until ok holds for the devices by ID.
func (n *Nomad) Await(ctx context.Context, what string, ok func(map[string]View) bool) error {
	for {
		n.mu.Lock()
		changed, err := n.changed, n.err
		n.mu.Unlock()
		if err != nil {
			return fmt.Errorf("nomad's stream ended, and with it its devices: %w", err)
		}
		if ok(n.Devices()) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("nomad: %s: %w", what, ctx.Err())
		}
	}
}

// Devices is what the scheduler sees now, by device ID.
func (n *Nomad) Devices() map[string]View {
	n.mu.Lock()
	defer n.mu.Unlock()
	seen := map[string]View{}
	for _, g := range n.groups {
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
	n.mu.Lock()
	defer n.mu.Unlock()
	var lines []string
	for _, g := range n.groups {
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

// Reserve says what a task with the devices would get.
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
