package inventory

import (
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Selector selects devices. Each condition that is set must hold, and it holds if one of its values does. The zero
// value selects every device. A condition on a GPU also selects its MIG instances.
type Selector struct {
	At       string           // place in the configuration, for messages: "policy.yaml:12: rules[0].select"
	IDs      []gpu.DeviceID   // UUIDs of GPUs and of MIG instances
	PCI      []gpu.PCIAddress // of GPUs
	Indices  []gpu.DeviceIndex
	Models   []string // NVML product names of GPUs; * matches any text
	Profiles []string // MIG profiles; * matches any text; a full GPU has none
	Full     bool     // full GPUs only
	Memory   Range    // memory of the device itself, in bytes
}

// Range is a closed interval. A Max of 0 means no maximum.
type Range struct{ Min, Max uint64 }

func (r Range) contains(n uint64) bool { return n >= r.Min && (r.Max == 0 || n <= r.Max) }

// Selects reports whether the selector selects a device that has the number at.
func (s *Selector) Selects(d *gpu.Device, at gpu.DeviceIndex) bool {
	return matchesAny(s.IDs, func(id gpu.DeviceID) bool { return id == d.ID || id == d.At.GPU }) &&
		matchesAny(s.PCI, func(a gpu.PCIAddress) bool { return a == d.PCI }) &&
		matchesAny(s.Indices, func(i gpu.DeviceIndex) bool {
			return i.GPU == at.GPU && (i.Instance < 0 || d.Profile != "" && i.Instance == at.Instance)
		}) &&
		matchesAny(s.Models, func(p string) bool { return matchesPattern(p, d.Model) || matchesPattern(p, d.Product()) }) &&
		matchesAny(s.Profiles, func(p string) bool { return d.Profile != "" && matchesPattern(p, d.Profile) }) &&
		(!s.Full || d.Profile == "") &&
		s.Memory.contains(d.Memory)
}

// matchesAny reports whether a condition holds: it has no values, or one of them does.
func matchesAny[T comparable](values []T, holds func(T) bool) bool {
	return len(values) == 0 || slices.ContainsFunc(values, holds)
}

// matchesPattern reports whether pattern matches all of s. In a pattern, * matches any text, also none.
func matchesPattern(pattern, s string) bool {
	head, rest, wild := strings.Cut(pattern, "*")
	if !wild {
		return pattern == s
	}
	s, ok := strings.CutPrefix(s, head)
	if !ok {
		return false
	}
	parts := strings.Split(rest, "*")
	tail := parts[len(parts)-1]
	for _, part := range parts[:len(parts)-1] {
		_, after, ok := strings.Cut(s, part)
		if !ok {
			return false
		}
		s = after
	}
	return strings.HasSuffix(s, tail)
}
