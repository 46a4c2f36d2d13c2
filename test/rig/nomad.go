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

	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

// Nomad is a small Nomad client: it launches the plugin as an agent does, over go-plugin.
type Nomad struct {
	*NomadClient
	client *plugin.Client
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
	if s.NomadAddress != "" {
		c["nomad_address"] = s.NomadAddress
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
		NomadClient: NewNomadClient(),
		client:      nomadtest.NewClient(s.command(binary), hclog.New(&hclog.LoggerOptions{Name: "nomad", Level: hclog.Debug, Output: log})),
	}
	if err := n.connect(ctx, s); err != nil {
		n.client.Kill()
		return nil, fmt.Errorf("nomad-gpu: %w", err)
	}
	return n, nil
}

func (n *Nomad) connect(ctx context.Context, s Setup) error {
	p, err := nomadtest.Dispense(n.client)
	if err != nil {
		return err
	}
	if err := nomadtest.SetConfig(p, s.nomadConfig()); err != nil {
		return err
	}
	if err := n.Follow(ctx, p); err != nil || s.Statistics == 0 {
		return err
	}
	return n.FollowStatistics(ctx, s.Statistics)
}

// Attributes are those of each group, a line each, sorted.
func (n *Nomad) Attributes() []string {
	var lines []string
	for _, g := range n.Groups() {
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

// Ping makes a call that does nothing.
func (n *Nomad) Ping() error {
	_, err := n.plugin.PluginInfo()
	return err
}

// PID is the plugin's process.
func (n *Nomad) PID() string { return n.client.ID() }

// Stop ends the plugin as an agent does.
func (n *Nomad) Stop() { n.client.Kill() }
