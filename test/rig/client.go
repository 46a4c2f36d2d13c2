package rig

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// View is one device as one scheduler sees it.
type View struct {
	ID, Name, Where string // Name: the resource, or the group
	Healthy         bool
	Reason          string // of a kubelet: "", as its API has no field for it
}

// Grant is what a container would get.
type Grant struct {
	Env           map[string]string
	Mounts, Nodes []string
	CDI           []string // names of CDI devices
}

// NomadClient is Nomad's side of a device plugin. It keeps each fingerprint, and the latest statistics. A plugin may end and another one be followed.
type NomadClient struct {
	mu      sync.Mutex
	plugin  device.DevicePlugin // the latest
	streams int
	prints  []Fingerprint
	changed *watch.Value[struct{}]
	stats   *watch.Value[[]*device.DeviceGroupStats]
}

// NewNomadClient returns a client without a plugin.
func NewNomadClient() *NomadClient {
	return &NomadClient{changed: watch.NewValue(struct{}{}), stats: watch.NewValue[[]*device.DeviceGroupStats](nil)}
}

// Fingerprint is one message of a stream.
type Fingerprint struct {
	Stream int // counted from 1
	Groups []*device.DeviceGroup
	Err    error
}

// Follow opens the stream of fingerprints of a plugin, which gets the calls from now on.
func (c *NomadClient) Follow(ctx context.Context, p device.DevicePlugin) error {
	stream, err := p.Fingerprint(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.plugin = p
	c.streams++
	number := c.streams
	c.mu.Unlock()
	go func() { // until the plugin or ctx ends
		for r := range stream {
			c.mu.Lock()
			c.prints = append(c.prints, Fingerprint{number, r.Devices, r.Error})
			c.mu.Unlock()
			c.changed.Store(struct{}{})
		}
	}()
	return nil
}

// FollowStatistics opens the stream of statistics of the plugin that is followed.
func (c *NomadClient) FollowStatistics(ctx context.Context, interval time.Duration) error {
	statistics, err := c.plugin.Stats(ctx, interval)
	if err != nil {
		return err
	}
	go func() { // until the plugin or ctx ends
		for r := range statistics {
			c.stats.Store(r.Groups)
		}
	}()
	return nil
}

// Fingerprints are all so far, oldest first.
func (c *NomadClient) Fingerprints() []Fingerprint {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clip(c.prints)
}

// Last is the latest fingerprint; zero if there is none.
func (c *NomadClient) Last() Fingerprint {
	all := c.Fingerprints()
	if len(all) == 0 {
		return Fingerprint{}
	}
	return all[len(all)-1]
}

// Groups are the device groups of the latest fingerprint.
func (c *NomadClient) Groups() []*device.DeviceGroup { return c.Last().Groups }

// Devices is what the scheduler sees now, by device ID.
func (c *NomadClient) Devices() map[string]View { return c.Last().Devices() }

// Await waits until ok holds for the devices by ID.
func (c *NomadClient) Await(ctx context.Context, what string, ok func(map[string]View) bool) error {
	for range c.changed.Watch(ctx) {
		f := c.Last()
		if f.Err != nil {
			return fmt.Errorf("nomad's stream ended, and with it its devices: %w", f.Err)
		}
		if f.Stream > 0 && ok(f.Devices()) {
			return nil
		}
	}
	return fmt.Errorf("nomad: %s: %w", what, ctx.Err())
}

// Statistics are the latest.
func (c *NomadClient) Statistics() []*device.DeviceGroupStats { return c.stats.Load() }

// NextStatistics waits for statistics that the plugin sends from now on.
func (c *NomadClient) NextStatistics(ctx context.Context) []*device.DeviceGroupStats {
	first := true
	for groups := range c.stats.Watch(ctx) {
		if !first && groups != nil {
			return groups
		}
		first = false
	}
	return nil
}

// Reserve returns what a task with the devices would get.
func (c *NomadClient) Reserve(ids ...string) (Grant, error) {
	c.mu.Lock()
	p := c.plugin
	c.mu.Unlock()
	r, err := p.Reserve(ids)
	if err != nil {
		return Grant{}, err
	}
	g := Grant{Env: r.Envs}
	for _, m := range r.Mounts {
		g.Mounts = append(g.Mounts, m.HostPath+" -> "+m.TaskPath)
	}
	for _, d := range r.Devices {
		g.Nodes = append(g.Nodes, d.TaskPath+" "+d.CgroupPerms)
	}
	if names := g.Env["CDI_DEVICES"]; names != "" { // as podman's driver reads it
		delete(g.Env, "CDI_DEVICES")
		err = json.Unmarshal([]byte(names), &g.CDI)
	}
	return g, err
}

// Devices are those of a fingerprint, by ID.
func (f Fingerprint) Devices() map[string]View {
	seen := map[string]View{}
	for _, g := range f.Groups {
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

// Check makes the checks of Nomad's client.
func (f Fingerprint) Check() error {
	if f.Err != nil {
		return f.Err
	}
	seen := map[string]string{}
	for _, g := range f.Groups {
		if err := g.Validate(); err != nil {
			return err
		}
		for _, d := range g.Devices {
			if other, twice := seen[d.ID]; twice {
				return fmt.Errorf("%s is in %q and in %q", d.ID, other, g.Name)
			}
			seen[d.ID] = g.Name
		}
	}
	return nil
}

// KubeletDevices is what the scheduler sees now of a kubelet, by device ID.
func KubeletDevices(k *kubelettest.Kubelet) map[string]View {
	seen := map[string]View{}
	for _, r := range k.Registrations() {
		devices, _ := k.Devices(r.Resource)
		for _, d := range devices {
			v := View{ID: d.GetID(), Name: r.Resource, Healthy: d.GetHealth() == v1beta1.Healthy, Where: "-"}
			for _, node := range d.GetTopology().GetNodes() {
				v.Where = fmt.Sprintf("NUMA %d", node.GetID())
			}
			seen[v.ID] = v
		}
	}
	return seen
}

// Allocate returns what a container of a pod with the devices would get.
func Allocate(ctx context.Context, k *kubelettest.Kubelet, resource string, ids ...string) (Grant, error) {
	r, err := k.Allocate(ctx, resource, ids...)
	if err != nil {
		return Grant{}, err
	}
	g := Grant{Env: r.GetEnvs()}
	for _, m := range r.GetMounts() {
		g.Mounts = append(g.Mounts, m.GetHostPath()+" -> "+m.GetContainerPath())
	}
	for _, d := range r.GetDevices() {
		g.Nodes = append(g.Nodes, d.GetContainerPath()+" "+d.GetPermissions())
	}
	for _, d := range r.GetCdiDevices() {
		g.CDI = append(g.CDI, d.GetName())
	}
	return g, nil
}
