package policy

import (
	"cmp"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// by is between the reason and the line in inventory.Rule.NotOffered: "excluded by tandem.yaml:12".
const by = " by "

// readPolicy reads the section "policy".
func (c *compiler) readPolicy(v value) {
	f := fieldsOf(v, policyKeys)
	include := f.At("include")
	items := include.Items()
	if include.IsList() && len(items) == 0 {
		include.Failf("an empty list offers nothing: leave the key out to offer everything")
	}
	for _, item := range items {
		if s, ok := c.readSelector(item); ok {
			c.policy.Include = append(c.policy.Include, s)
		}
	}
	for _, item := range f.At("exclude").Items() {
		if s, ok := c.readSelector(item); ok {
			c.add(item, inventory.Rule{Select: s, NotOffered: "excluded" + by + c.line(item)})
		}
	}
	for _, item := range f.At("rules").Items() {
		if r, ok := c.readRule(item); ok {
			c.add(item, r)
		}
	}
}

// add adds a rule, unless an earlier one selects its devices.
func (c *compiler) add(v value, r inventory.Rule) {
	if c.everything != "" {
		v.Failf("has no effect: %s selects every device", c.everything)
		return
	}
	names := namedDevices(r.Select)
	for _, name := range names {
		device, _, _ := strings.Cut(name, ":") // the GPU of "0:1"
		if earlier := cmp.Or(c.selectedBy[name], c.selectedBy[device]); earlier != "" {
			v.Failf("selects %s, as does %s, and the first rule that selects a device counts", name, earlier)
			return
		}
	}
	if namesOnly(r.Select) {
		for _, name := range names {
			c.selectedBy[name] = r.Select.At
		}
	}
	if selectsEverything(r.Select) {
		c.everything = r.Select.At
	}
	c.policy.Rules = append(c.policy.Rules, r)
}

// The values of "use".
const (
	useExclusive   = "exclusive"
	useTimeSlicing = "time-slicing"
	useMPS         = "mps"
	useReserved    = "reserved"
)

// readRule reads one rule; false if it has a problem.
func (c *compiler) readRule(v value) (inventory.Rule, bool) {
	before := c.problems()
	f := fieldsOf(v, ruleKeys)
	if !f.At("select").Given() && c.problems() == before {
		f.At("select").Failf(`want a selector such as {index: 0}, or {model: "*"} for every device`)
	}
	r := inventory.Rule{}
	r.Select, _ = c.readSelector(f.At("select"))
	if c.problems() == before && len(f.Given(ruleEffects...)) == 0 {
		v.Failf("does nothing: want %s", document.Choice(ruleEffects))
	}
	r.Pool = c.definePool(f.At("name"))
	r.Sharing = c.readUse(f)
	r.MIG = readMIGStrategy(f.At("migStrategy"), r.Select)
	r.Injection = c.readInjection(f)
	r.NotOffered = c.readReserve(v, f)
	if r.Sharing != nil && r.Sharing.Mode == inventory.MPS {
		// A pool has one MPS control daemon, and a CUDA process sees one MIG instance. NVIDIA's plugin starts no daemon
		// for instances (cmd/mps-control-daemon/mps/manager.go), and refuses MPS under the MIG strategy mixed altogether
		// (cmd/nvidia-device-plugin/main.go), full GPUs included; here full GPUs are shared, and later rules apply to
		// the instances.
		if selectsInstancesOnly(r.Select) {
			f.At("use").Failf("MPS shares full GPUs only, and this rule selects MIG instances: want time-slicing or exclusive")
		}
		r.Select.Full = true
	}
	if r.Sharing != nil && r.Sharing.Limit != inventory.LimitNone {
		if selectsInstancesOnly(r.Select) {
			f.At("limit").Failf("the driver limits no memory of MIG instances, which have their own, and this rule selects only such: remove it")
		}
		r.Select.Full = true // as for MPS
	}
	if r.NotOffered == "" && r.Sharing != nil {
		c.noteMPS(f.At("use"), r.Sharing.Mode)
		c.noteOnePerRequest(f.At("failRequestsGreaterThanOne"), *r.Sharing)
		if suffix := r.Sharing.Mode.Suffix(); r.Pool == "" && len(suffix) > len(c.suffix) {
			c.suffix = suffix
		}
	}
	return r, c.problems() == before
}

// readReserve is the reason why a rule offers nothing to this agent; "" if it does.
func (c *compiler) readReserve(v value, f fields) string {
	if f.At("use").Text() == useReserved {
		for _, w := range f.Given("name", "migStrategy", "for", "injection") {
			w.Failf("a reserved device is not offered: remove it")
		}
		return "reserved" + by + c.line(v)
	}
	if !f.At("for").Given() {
		return ""
	}
	if to, ok := f.At("for").OneOf(orchestrators...); ok && to != string(c.to) {
		return "left to " + to + by + c.line(v)
	}
	return ""
}

// readUse reads how the devices of a rule are shared; nil if it does not specify it, or they are reserved.
func (c *compiler) readUse(f fields) *inventory.Sharing {
	use, text := f.At("use"), ""
	if use.Given() {
		var ok bool
		if text, ok = use.OneOf(uses...); !ok {
			return nil
		}
	}
	switch text {
	case useTimeSlicing:
		s := &inventory.Sharing{
			Mode:          inventory.TimeSlicing,
			Replicas:      readReplicas(f.At("replicas"), inventory.TimeSlicing),
			OnePerRequest: f.At("failRequestsGreaterThanOne").Bool(false),
		}
		c.readLimit(f, s)
		return s
	case useMPS:
		checkOnePerRequest(f.At("failRequestsGreaterThanOne"))
		for _, w := range f.Given("limit") {
			w.Failf("applies to use: time-slicing only: with MPS the key memory is the limit, which CUDA enforces; remove it")
		}
		s := &inventory.Sharing{Mode: inventory.MPS, OnePerRequest: true}
		s.Replicas = readReplicas(f.At("replicas"), inventory.MPS)
		s.Memory = readSize(f.At("memory"))
		if threads := f.At("threads"); threads.Given() {
			s.Threads = threads.Int(1, maxThreads, "the percent of a GPU's threads for one client, 1 to 100")
		}
		return s
	}
	for _, w := range f.Given("replicas", "failRequestsGreaterThanOne", "memory", "threads", "limit") {
		if w == f.At("limit") {
			w.Failf("applies to use: time-slicing only: remove it")
			continue
		}
		w.Failf("applies to shared devices only: want use: time-slicing or use: mps, or remove it")
	}
	if text == useExclusive {
		return &inventory.Sharing{}
	}
	return nil
}

// readMIGStrategy reads the strategy for the GPUs that a selector selects; "" if it is absent or a problem.
func readMIGStrategy(v value, s inventory.Selector) inventory.MIGStrategy {
	if !v.Given() {
		return ""
	}
	text, ok := v.OneOf(strategies...)
	if ok && selectsInstancesOnly(s) {
		v.Failf("applies to GPUs, and this rule selects MIG instances: select their GPU")
	}
	return inventory.MIGStrategy(text)
}
