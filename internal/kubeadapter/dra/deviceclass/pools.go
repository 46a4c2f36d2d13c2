package deviceclass

import (
	"cmp"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// pools are those that configurations result in, whatever devices the nodes have.
type pools struct {
	at           map[string]pool
	mixedDefault bool // the default pool may have other devices than whole GPUs
}

type pool struct {
	where     string // in a configuration; "" = a default pool
	exclusive bool   // it may have devices that are not shared
}

func (p *pools) note(name, where string, mode inventory.SharingMode) {
	old := p.at[name]
	p.at[name] = pool{where: cmp.Or(old.where, strings.TrimSuffix(where, ".select")), exclusive: old.exclusive || mode == inventory.Exclusive}
	if name == inventory.DefaultPool && mode != inventory.Exclusive {
		p.mixedDefault = true
	}
}

// base is a pool of devices before they are shared.
type base struct {
	name    string
	mig     bool
	profile string // of the instances of a default pool
}

// selectedBy reports whether a rule may select devices of the pool.
func (b base) selectedBy(s inventory.Selector) bool {
	switch {
	case !b.mig:
		return len(s.Profiles) == 0
	case b.profile == "":
		return !s.Full
	}
	s = inventory.Selector{Profiles: s.Profiles, Full: s.Full} // the other conditions depend on the node
	return s.Selects(&gpu.Device{Profile: b.profile}, gpu.DeviceIndex{})
}

// add adds the pools of a configuration.
func (p *pools) add(c Configuration, profiles []string) {
	bases := basesOf(c, profiles)
	for _, b := range bases {
		p.note(b.name, "", inventory.Exclusive)
	}
	for _, n := range c.Policy.Names {
		p.note(n.Pool, n.Select.At, inventory.Exclusive)
	}
	p.mixedDefault = p.mixedDefault || c.MIG == inventory.MIGSingle
	for i := range c.Policy.Rules {
		p.addRule(&c.Policy.Rules[i], bases)
	}
	for _, s := range c.Policy.Shares {
		p.note(cmp.Or(s.Rename, s.Pool), s.Select.At, s.Sharing.Mode)
	}
}

// addRule adds the pools of a rule: the one that it names, or the pools of the devices that it selects with the suffix of its sharing.
func (p *pools) addRule(r *inventory.Rule, bases []base) {
	p.mixedDefault = p.mixedDefault || r.MIG == inventory.MIGSingle
	mode := inventory.Exclusive
	if r.Sharing != nil {
		mode = r.Sharing.Mode
	}
	switch {
	case r.NotOffered != "":
	case r.Pool != "":
		p.note(r.Pool, r.Select.At, mode)
		p.mixedDefault = p.mixedDefault || r.Pool == inventory.DefaultPool && len(r.Select.Profiles) > 0
	case mode != inventory.Exclusive:
		for _, b := range bases {
			if b.selectedBy(r.Select) {
				p.note(b.name+mode.Suffix(), r.Select.At, mode)
			}
		}
	}
}

// basesOf returns the pools that devices have before they are shared, as far as they follow from the configuration: the default pool, those
// of names, and those of MIG profiles that are known or that the policy names exactly.
func basesOf(c Configuration, profiles []string) []base {
	all := []base{{name: inventory.DefaultPool}}
	profiles = slices.Clone(profiles)
	for _, r := range c.Policy.Rules {
		profiles = append(profiles, exact(r.Select.Profiles)...)
	}
	for _, n := range c.Policy.Names {
		all = append(all, base{name: n.Pool, mig: len(n.Select.Profiles) > 0})
		profiles = append(profiles, exact(n.Select.Profiles)...)
	}
	mixed := c.MIG == inventory.MIGMixed || slices.ContainsFunc(c.Policy.Rules, func(r inventory.Rule) bool { return r.MIG == inventory.MIGMixed })
	if !mixed {
		return all
	}
	slices.Sort(profiles)
	for _, profile := range slices.Compact(profiles) {
		all = append(all, base{inventory.MIGPool(profile), true, profile})
	}
	return all
}

// exact returns the profiles that are no patterns.
func exact(profiles []string) []string {
	return slices.DeleteFunc(slices.Clone(profiles), func(p string) bool { return strings.Contains(p, "*") })
}
