package policy

import (
	"fmt"

	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// limitModes are the values of the key "limit" of a rule.
var limitModes = []string{inventory.LimitRequired.String(), inventory.LimitBestEffort.String()}

var limitKeys = []schema.Key{
	{Name: "experimental", Default: "false", Type: strictBool,
		Usage: "`true`: rules can have the key `limit`. They have not run on hardware so far, and only drivers from 615 on have them"},
	{Name: "reserve", Default: "1GiB", Type: sizeType, Usage: "memory of each GPU that no share has, for CUDA contexts and the driver: a whole number of MiB"},
	{Name: "overcommit", Default: "false", Type: strictBool,
		Usage: "`true`: the limits of the shares of a GPU may be more than its memory less `reserve`. Then work can run out of memory within its limit"},
}

// readLimits reads the section "memoryLimits"; the zero LimitPolicy without the switch.
func readLimits(v value) (p inventory.LimitPolicy) {
	f := fieldsOf(v, limitKeys)
	if !f.At("experimental").Bool(false) {
		for _, w := range f.Given("reserve", "overcommit") {
			w.Failf("has no effect without the switch for limits, which are experimental: want memoryLimits: {experimental: true}, or remove it")
		}
		return inventory.LimitPolicy{}
	}
	p = inventory.LimitPolicy{On: true, Reserve: inventory.DefaultReserve, Overcommit: f.At("overcommit").Bool(false)}
	if reserve := f.At("reserve"); reserve.Given() {
		p.Reserve = readWholeMiB(reserve)
	}
	return p
}

// readLimit reads "limit" and "memory" of a rule that shares devices by time-slicing.
func (c *compiler) readLimit(f fields, s *inventory.Sharing) {
	limit, memory, threads := f.At("limit"), f.At("memory"), f.At("threads")
	if threads.Given() {
		threads.Failf("time-slicing has no limit of threads: want use: mps, or remove it")
	}
	if !limit.Given() {
		if memory.Given() {
			memory.Failf("time-slicing limits no memory by itself: want limit: required or limit: best-effort (experimental), use: mps, or remove it")
		}
		return
	}
	text, ok := limit.OneOf(limitModes...)
	s.Memory = readWholeMiB(memory)
	switch {
	case !ok:
	case !c.policy.Limits.On:
		limit.Failf("limits are experimental and have a switch: want memoryLimits: {experimental: true}, or remove it")
	case text == inventory.LimitRequired.String():
		s.Limit = inventory.LimitRequired
	default:
		s.Limit = inventory.LimitBestEffort
	}
}

// readWholeMiB reads a size that the driver's limits can have. NVIDIA's hook refuses all but decimal numbers of MiB.
func readWholeMiB(v value) uint64 {
	size := readSize(v)
	if size != gpu.WholeMiB(size) {
		v.Failf("want whole MiB, such as %dMiB: limits of memory have no other sizes", size/gpu.MiB)
	}
	return size
}

// LimitsSummary is what the policy's limits of memory have in common, and by what they can hold; nil without limits.
func (r Result) LimitsSummary() []string {
	p := r.Policy.Limits
	if !p.On {
		return nil
	}
	sum := "have at most the rest together"
	if p.Overcommit {
		sum = "may have more than the rest together"
	}
	return []string{
		fmt.Sprintf("memory limits (experimental): %d MiB of each GPU are in no share; the shares %s", p.Reserve/gpu.MiB, sum),
		"memory limits on Nomad: by the task's control group (exec, java, raw_exec), or by NVIDIA's hook (docker and podman with CDI)",
		"memory limits on Kubernetes: by the pod's control group (api: dra), or by NVIDIA's hook (device plugins with CDI)",
	}
}

// LimitRequired is the place of the first rule with limit: required that offers devices; "" = there is none.
func (r Result) LimitRequired() string {
	for _, rule := range r.Policy.Rules {
		if rule.NotOffered == "" && rule.Sharing != nil && rule.Sharing.Limit == inventory.LimitRequired {
			return rule.Select.At
		}
	}
	return ""
}
