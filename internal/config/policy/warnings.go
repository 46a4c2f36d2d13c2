package policy

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// warning is a field that NVIDIA's k8s-device-plugin reads and drops, with a line in its log (v0.20.0:
// api/config/v1/config.go, DisableResourceNamingInConfig), and that has an effect here.
type warning struct {
	line int
	text string
}

// warn adds a warning about a field: what NVIDIA's plugin does instead, and the effect here.
func (c *compiler) warn(v value, there, here string) {
	c.warnings = append(c.warnings, warning{v.Line(), fmt.Sprintf("%s: NVIDIA's k8s-device-plugin ignores this field and %s; here %s", v.Where(), there, here)})
}

// sortedWarnings are the warnings in the order of the file.
func (c *compiler) sortedWarnings() (lines []string) {
	slices.SortStableFunc(c.warnings, func(a, b warning) int { return cmp.Compare(a.line, b.line) })
	for _, w := range c.warnings {
		lines = append(lines, w.text)
	}
	return lines
}

// warnRename is about "rename" of a shared resource, unless NVIDIA's plugin gives the same name.
func (c *compiler) warnRename(v value, s inventory.Share, byDefault bool) {
	there := s.Pool
	if byDefault {
		there += sharedSuffix
	}
	if v.Given() && s.Rename != there {
		c.warn(v, "offers the shares as "+domain+there, "they are "+domain+s.Rename)
	}
}

// warnDevices is about "devices" of a shared resource.
func (c *compiler) warnDevices(v value, pool string) {
	if isSubset(v) {
		c.warn(v, "shares every device of "+domain+pool, "only the devices that it selects are shared, the others stay "+domain+pool)
	}
}

// warnNames is about the section "resources", unless NVIDIA's plugin gives the same names.
func (c *compiler) warnNames(f fields) {
	gpus, instances := false, false
	for _, n := range c.policy.Names {
		if n.Select.Full {
			gpus = gpus || n.Pool != inventory.DefaultPool
		} else {
			instances = instances || n.Pool != inventory.MIGPool(n.Select.Profiles[0])
		}
	}
	if gpus {
		c.warn(f.At("gpus"), "offers every full GPU as "+domain+inventory.DefaultPool, "GPUs have the names that it gives")
	}
	if instances {
		c.warn(f.At("mig"), "names MIG instances by its MIG strategy and their profile", "MIG instances have the names that it gives")
	}
}

// warnBesideMPS is about "sharing.timeSlicing" in a file with MPS (api/config/v1/sharing.go, ReplicatedResources).
func (c *compiler) warnBesideMPS(v value) {
	c.warn(v, "shares nothing by time-slicing while there is sharing.mps", "each resource is shared as the file has it")
}
