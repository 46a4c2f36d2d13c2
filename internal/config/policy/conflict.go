package policy

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// effectivePool is the pool of some devices after they are shared, and how they are shared.
type effectivePool struct {
	name    string
	sharing inventory.Sharing
	at      string // "tandem.yaml:12: policy.rules[0]"
}

// findConflicts finds pools whose devices are shared in different ways: a request can't distinguish them. It finds only
// conflicts that every node with such devices has; those that depend on the models of a node are found by core
// (PolicyWarnings). The devices that no rule selects are considered only if the sections have no other problem.
func (c *compiler) findConflicts(complete bool) {
	for _, s := range c.policy.Shares {
		c.sharesOf[s.Pool] = append(c.sharesOf[s.Pool], s)
	}
	first := map[string]effectivePool{}
	reported := map[string]bool{}
	for _, p := range c.effectivePools(complete) {
		f, ok := first[p.name]
		switch {
		case !ok:
			first[p.name] = p
		case f.sharing != p.sharing && !reported[p.name]:
			reported[p.name] = true
			c.doc.AddProblem(math.MaxInt, &setting.Error{
				Key: strings.TrimSuffix(c.doc.Path, filepath.Base(c.doc.Path)) + p.at, Value: domain + p.name,
				Remedy: fmt.Sprintf("would be %s, but by %s it is %s: want another name for one of them", p.sharing.Description(), f.at, f.sharing.Description()),
			})
		}
	}
}

// effectivePools are those of any node, in the order of the file.
func (c *compiler) effectivePools(complete bool) (pools []effectivePool) {
	rest := complete // are there devices that no rule selects?
	for _, r := range c.policy.Rules {
		rest = rest && !selectsEverything(r.Select)
		if r.NotOffered != "" {
			continue
		}
		for _, name := range c.poolsOf(r) {
			if r.Sharing == nil {
				pools = append(pools, c.shared(name, r.Select.At)...)
				continue
			}
			if r.Pool == "" {
				name += r.Sharing.Mode.Suffix()
			}
			pools = append(pools, effectivePool{name, *r.Sharing, r.Select.At})
		}
	}
	if !rest {
		return pools
	}
	if !c.renamesGPUs {
		pools = append(pools, c.shared(inventory.DefaultPool, filepath.Base(c.doc.Path)+": devices that no rule selects")...)
	}
	for _, n := range c.policy.Names {
		pools = append(pools, c.shared(n.Pool, n.Select.At)...)
	}
	for _, s := range c.policy.Shares {
		pools = append(pools, c.shared(s.Pool, s.Select.At)...)
	}
	return pools
}

// poolsOf are the pools of a rule's devices before they are shared, unless they depend on the node.
func (c *compiler) poolsOf(r inventory.Rule) []string {
	switch {
	case r.Pool != "":
		return []string{r.Pool}
	case !selectsInstancesOnly(r.Select) && !c.renamesGPUs:
		return []string{inventory.DefaultPool}
	}
	var pools []string
	for _, p := range r.Select.Profiles {
		pools = append(pools, inventory.MIGPool(p))
	}
	return pools
}

// shared are the pools of a pool's devices after the section "sharing".
func (c *compiler) shared(pool, at string) (pools []effectivePool) {
	for _, s := range c.sharesOf[pool] {
		p := effectivePool{pool, s.Sharing, s.Select.At}
		if s.Rename != "" {
			p.name = s.Rename
		}
		pools = append(pools, p)
		if s.First == 0 && s.Select.IDs == nil && s.Select.Indices == nil {
			return pools
		}
	}
	return append(pools, effectivePool{pool, inventory.Sharing{}, at})
}
