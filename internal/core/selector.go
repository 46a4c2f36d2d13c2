package core

import (
	"slices"
	"strings"
)

// Selector says which devices are meant. Every condition that is given must hold, and holds if one of its
// values does; the zero value selects every device. What is said of a GPU selects its MIG instances too.
type Selector struct {
	At       string       // where it was written, for messages: "policy.yaml:12: rules[0].select"
	IDs      []DeviceID   // UUIDs of GPUs and of MIG instances
	PCI      []PCIAddress // of GPUs
	Indices  []DeviceIndex
	Models   []string // NVML product names of GPUs, with * for any text
	Profiles []string // MIG profiles, with * for any text; a full GPU has none
	Full     bool     // no MIG instances
	Memory   Range    // of the device itself, in bytes
}

// Range is a closed interval; a Max of 0 is none.
type Range struct{ Min, Max uint64 }

func (r Range) contains(n uint64) bool { return n >= r.Min && (r.Max == 0 || n <= r.Max) }

// Selects reports whether a device with that number is meant.
func (s *Selector) Selects(d *Device, at DeviceIndex) bool {
	return matchesAny(s.IDs, func(id DeviceID) bool { return id == d.ID || id == d.At.GPU }) &&
		matchesAny(s.PCI, func(a PCIAddress) bool { return a == d.PCI }) &&
		matchesAny(s.Indices, func(i DeviceIndex) bool {
			return i.GPU == at.GPU && (i.Instance < 0 || d.Profile != "" && i.Instance == at.Instance)
		}) &&
		matchesAny(s.Models, func(p string) bool { return matchesPattern(p, d.Model) || matchesPattern(p, d.Product()) }) &&
		matchesAny(s.Profiles, func(p string) bool { return d.Profile != "" && matchesPattern(p, d.Profile) }) &&
		(!s.Full || d.Profile == "") &&
		s.Memory.contains(d.Memory)
}

// matchesAny reports whether a condition holds: one of its values does, or none is given.
func matchesAny[T comparable](values []T, holds func(T) bool) bool {
	return len(values) == 0 || slices.ContainsFunc(values, holds)
}

// matchesPattern reports whether all of s fits a pattern, in which * is any text, also none.
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
