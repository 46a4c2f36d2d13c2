package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Summary is a line for each option without effect, and each request of the settings, whatever devices the node has.
func (s Kubernetes) Summary() []string {
	f := s.File
	f.MIG, f.MPSRoot = s.Core.MIG, s.MPSRoot
	return slices.Concat(s.Notes, s.apiSummary(), s.HandOver.summary(), f.Summary(), s.limitSummary())
}

// limitSummary is a line about limits that no container can have, as it gets no CDI device from the device plugins.
func (s Kubernetes) limitSummary() []string {
	at, has := s.File.LimitRequired(), s.Strategies
	if at == "" || s.Core.API == inventory.DRA || has.Auto || has.CDIAnnotations || has.CDICRI {
		return nil
	}
	return []string{fmt.Sprintf("%s: limit required takes no work of device plugins: device list strategy %s has no CDI device, by which NVIDIA's hook sets the limit: "+
		"want auto, cdi-cri or cdi-annotations, or limit: best-effort", at, has)}
}

// Summary is a line for each request of a file, whatever devices the node has.
func (f File) Summary() (lines []string) {
	add := func(at string, parts ...string) {
		lines = append(lines, at+": "+strings.Join(parts, ", "))
	}
	if f.MIG != "" {
		add("MIG strategy", string(f.MIG))
	}
	if f.MPSRoot != "" {
		add("MPS root", f.MPSRoot)
	}
	for _, s := range f.Policy.Include {
		add(s.At, "offered; devices that no include selects are not")
	}
	for _, rule := range f.Policy.Rules {
		add(rule.Select.At, ruleSummary(rule)...)
	}
	for _, n := range f.Policy.Names {
		add(n.Select.At, "named "+n.Pool)
	}
	for _, s := range f.Policy.Shares {
		parts := []string{"pool " + s.Pool, s.Sharing.Description()}
		if s.First > 0 {
			parts = append(parts, fmt.Sprintf("%d of its devices", s.First))
		}
		if s.Rename != "" {
			parts = append(parts, "named "+s.Rename)
		}
		add(s.Select.At, parts...)
	}
	lines = append(lines, f.LimitsSummary()...)
	for _, line := range []string{f.ProveSummary(), f.ResetSummary()} {
		if line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

// ruleSummary is the effect of a rule on the devices that it selects.
func ruleSummary(r inventory.Rule) (parts []string) {
	if r.NotOffered != "" {
		return []string{"not offered: " + r.NotOffered}
	}
	if r.Sharing != nil {
		parts = append(parts, r.Sharing.Description())
	} else {
		parts = append(parts, "offered")
	}
	if r.MIG != "" {
		parts = append(parts, "MIG strategy "+string(r.MIG))
	}
	if r.Pool != "" {
		parts = append(parts, "named "+r.Pool)
	}
	if r.Injection != nil {
		parts = append(parts, "injection "+r.Injection.Name)
	}
	return parts
}
