package policy

import (
	"cmp"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
)

// rules reads the section "policy".
func (c *compiler) rules(v value) {
	f := v.fields("include", "exclude", "rules")
	if include := f.at("include"); include.given() {
		c.policy.Include = c.selectors(include)
	}
	for _, item := range f.at("exclude").items() {
		if s, ok := c.selector(item); ok {
			c.add(item, core.Rule{Select: s, Reserve: "excluded by " + c.at(item)})
		}
	}
	for _, item := range f.at("rules").items() {
		if r, ok := c.rule(item); ok {
			c.add(item, r)
		}
	}
}

// selectors reads a list of them.
func (c *compiler) selectors(v value) (all []core.Selector) {
	items := v.items()
	if v.isList() && len(items) == 0 {
		v.fail("an empty list offers nothing: leave the key out to offer everything")
	}
	for _, item := range items {
		if s, ok := c.selector(item); ok {
			all = append(all, s)
		}
	}
	return all
}

// add adds a rule, if there is a device left for it.
func (c *compiler) add(v value, r core.Rule) {
	if c.rest != "" {
		v.fail("has no effect: %s selects every device", c.rest)
		return
	}
	names := named(r.Select)
	for _, name := range names {
		gpu, _, _ := strings.Cut(name, ":") // of an instance by its index
		if earlier := cmp.Or(c.taken[name], c.taken[gpu]); earlier != "" {
			v.fail("selects %s, as does %s, and the first rule that selects a device counts", name, earlier)
			return
		}
	}
	if onlyNames(r.Select) {
		for _, name := range names {
			c.taken[name] = r.Select.At
		}
	}
	if everything(r.Select) {
		c.rest = r.Select.At
	}
	c.policy.Rules = append(c.policy.Rules, r)
}

// The words after "use".
const (
	exclusive   = "exclusive"
	timeSlicing = "time-slicing"
	mps         = "mps"
	reserved    = "reserved"
)

// rule reads one rule; false if it is wrong.
func (c *compiler) rule(v value) (core.Rule, bool) {
	before := len(c.errs)
	f := v.fields("select", "for", "use", "replicas", "failRequestsGreaterThanOne", "memory", "threads", "migStrategy", "name")
	if !f.at("select").given() && len(c.errs) == before {
		f.at("select").fail(`want a selector such as {index: 0}, or {model: "*"} for every device`)
	}
	r := core.Rule{}
	r.Select, _ = c.selector(f.at("select"))
	if len(c.errs) == before && len(f.given("for", "use", "migStrategy", "name")) == 0 {
		v.fail("does nothing: want use, for, name or migStrategy")
	}
	r.Pool = c.newPool(f.at("name"))
	r.Sharing = c.use(f)
	r.MIG = c.migStrategy(f.at("migStrategy"), r.Select)
	r.Reserve = c.reserve(v, f)
	if r.Sharing != nil && r.Sharing.Mode == core.MPS {
		// A pool has one MPS control daemon, and a CUDA process sees one MIG instance. NVIDIA's plugin starts no daemon
		// for instances (cmd/mps-control-daemon/mps/manager.go), and refuses MPS under the MIG strategy mixed altogether
		// (cmd/nvidia-device-plugin/main.go), full GPUs included; here those are shared, and the instances beside them
		// are what later rules make of them.
		if onlyInstances(r.Select) {
			f.at("use").fail("MPS is of full GPUs, and this selects MIG instances: want time-slicing or exclusive")
		}
		r.Select.Full = true
	}
	if r.Reserve == "" && r.Sharing != nil {
		c.uses(f.at("use"), r.Sharing.Mode)
		if suffix := r.Sharing.Mode.Suffix(); r.Pool == "" && len(suffix) > len(c.suffix) {
			c.suffix = suffix
		}
	}
	return r, len(c.errs) == before
}

// reserve is why a rule offers nothing to this agent; "" if it does.
func (c *compiler) reserve(v value, f fields) string {
	if f.at("use").isPlain() && f.at("use").text() == reserved {
		for _, w := range f.given("name", "migStrategy", "for") {
			w.fail("a reserved device is not offered to anybody: remove it")
		}
		return "reserved by " + c.at(v)
	}
	if !f.at("for").given() {
		return ""
	}
	if who, ok := f.at("for").among(string(Nomad), string(Kubernetes)); ok && who != string(c.to) {
		return "left to " + who + " by " + c.at(v)
	}
	return ""
}

// use reads how the devices of a rule are used; nil if it does not say, or they are not.
func (c *compiler) use(f fields) *core.Sharing {
	use := f.at("use")
	word := ""
	if use.given() {
		word, _ = use.among(exclusive, timeSlicing, mps, reserved)
	}
	shared := []string{"replicas", "failRequestsGreaterThanOne", "memory", "threads"}
	switch {
	case word == timeSlicing:
		for _, w := range f.given("memory", "threads") {
			w.fail("time-slicing limits nothing: want use: mps, or remove it")
		}
		return &core.Sharing{
			Mode:          core.TimeSlicing,
			Replicas:      replicas(f.at("replicas"), core.TimeSlicing),
			OnePerRequest: f.at("failRequestsGreaterThanOne").truth(false),
		}
	case word == mps:
		onePerRequest(f.at("failRequestsGreaterThanOne"))
		s := &core.Sharing{Mode: core.MPS, OnePerRequest: true}
		s.Replicas = replicas(f.at("replicas"), core.MPS)
		s.Memory = size(f.at("memory"))
		if threads := f.at("threads"); threads.given() {
			s.Threads = threads.whole(1, 100, "the percent of a GPU's threads for one client, 1 to 100")
		}
		return s
	case use.given() && word == "": // a wrong word was said
		return nil
	}
	for _, w := range f.given(shared...) {
		w.fail("is of shared devices: want use: time-slicing or use: mps, or remove it")
	}
	if word == exclusive {
		return &core.Sharing{}
	}
	return nil
}

// migStrategy reads the strategy for the GPUs that a selector selects.
func (c *compiler) migStrategy(v value, s core.Selector) core.MIGStrategy {
	if !v.given() {
		return ""
	}
	word, ok := v.among(string(core.MIGNone), string(core.MIGSingle), string(core.MIGMixed))
	if ok && onlyInstances(s) {
		v.fail("is of GPUs, and this selects MIG instances: select their GPU")
	}
	return core.MIGStrategy(word)
}

const (
	// manyReplicas keeps the list of the units of 16 GPUs, some 100 bytes each, within one message of gRPC (4 MiB).
	manyReplicas = 1000

	// manyClients is how many an MPS server takes on a GPU (nvidia-cuda-mps-control(1), from compute capability 7.0).
	manyClients = 48
)

// replicas reads into how many units a device is divided.
func replicas(v value, mode core.SharingMode) int {
	most, want := manyReplicas, "2 or more, up to 1000 (so many units of 16 GPUs fit one message to the orchestrator)"
	if mode == core.MPS {
		most, want = manyClients, "2 or more, up to 48 (so many clients fit an MPS server)"
	}
	return v.whole(2, most, want)
}

// onePerRequest refuses what MPS can't do.
func onePerRequest(v value) {
	if v.given() && !v.truth(true) && v.text() == "false" {
		v.fail("want true, or leave it out: two shares by MPS are not more of a GPU than one")
	}
}
