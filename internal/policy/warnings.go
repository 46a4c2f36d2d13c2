package policy

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core"
)

// warning is what a file that moves over from NVIDIA's k8s-device-plugin means here and did not mean there. That plugin
// reads the fields and drops them, with a line in its log (v0.20.0: api/config/v1/config.go,
// DisableResourceNamingInConfig).
type warning struct {
	line int
	text string
}

// ignored notes a field that NVIDIA's plugin ignores: what it does instead, and what happens here.
func (c *compiler) ignored(v value, there, here string) {
	c.warnings = append(c.warnings, warning{v.line, fmt.Sprintf("%s: NVIDIA's k8s-device-plugin ignores this field and %s; here %s", v.where(), there, here)})
}

// sortedWarnings are the warnings in the order of the file.
func (c *compiler) sortedWarnings() (lines []string) {
	slices.SortStableFunc(c.warnings, func(a, b warning) int { return cmp.Compare(a.line, b.line) })
	for _, w := range c.warnings {
		lines = append(lines, w.text)
	}
	return lines
}

// ignoredRename is about the field "rename" of a resource that is shared, unless it says what NVIDIA's plugin does anyway.
func (c *compiler) ignoredRename(v value, s core.Share, byDefault bool) {
	there := s.Pool
	if byDefault {
		there += sharedSuffix
	}
	if v.given() && s.Rename != there {
		c.ignored(v, "offers the shares as "+domain+there, "they are "+domain+s.Rename)
	}
}

// ignoredDevices is about the field "devices" of a resource that is shared.
func (c *compiler) ignoredDevices(v value, pool string) {
	if v.isSome() {
		c.ignored(v, "shares every device of "+domain+pool, "only the devices that it selects are shared, the others stay "+domain+pool)
	}
}

// ignoredNames is about the section "resources", unless it gives the names that NVIDIA's plugin gives anyway.
func (c *compiler) ignoredNames(f fields) {
	gpus, instances := false, false
	for _, n := range c.policy.Names {
		if n.Select.Full {
			gpus = gpus || n.Pool != core.DefaultPool
		} else {
			instances = instances || n.Pool != core.MIGPool(n.Select.Profiles[0])
		}
	}
	if gpus {
		c.ignored(f.at("gpus"), "offers every full GPU as "+domain+core.DefaultPool, "GPUs have the names that it gives")
	}
	if instances {
		c.ignored(f.at("mig"), "names MIG instances by its MIG strategy and their profile", "MIG instances have the names that it gives")
	}
}

// ignoredBesideMPS is about the section "sharing.timeSlicing" of a file with MPS, too (api/config/v1/sharing.go,
// ReplicatedResources).
func (c *compiler) ignoredBesideMPS(v value) {
	c.ignored(v, "shares nothing by time-slicing while there is sharing.mps", "each resource is shared as the file says")
}
