package policy

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
)

// end is a pool in which devices end up, and how they are shared there.
type end struct {
	pool    string
	sharing core.Sharing
	at      string // "tandem.yaml:12: policy.rules[0]"
}

// clashes finds pools in which devices end up that are shared in different ways: a request could not tell them
// apart. Only what is so on any machine that has the devices is found here; what depends on the machine, such as
// which models there are, is for core's findings. What no rule selects is looked at if the rules are all there.
func (c *compiler) clashes(complete bool) {
	for _, s := range c.policy.Shares {
		c.sharesOf[s.Pool] = append(c.sharesOf[s.Pool], s)
	}
	first := map[string]end{}
	said := map[string]bool{}
	for _, e := range c.ends(complete) {
		f, ok := first[e.pool]
		switch {
		case !ok:
			first[e.pool] = e
		case f.sharing != e.sharing && !said[e.pool]:
			said[e.pool] = true
			c.errs = append(c.errs, problem{math.MaxInt, &core.ConfigError{
				Key: strings.TrimSuffix(c.file, filepath.Base(c.file)) + e.at, Value: domain + e.pool,
				Remedy: fmt.Sprintf("would be %s, but by %s it is %s: want another name for one of them", e.sharing.Terms(), f.at, f.sharing.Terms()),
			}})
		}
	}
}

// ends are the pools in which devices end up whatever the machine is, in the order of the file.
func (c *compiler) ends(complete bool) (ends []end) {
	rest := complete // are there devices that no rule selects?
	for _, r := range c.policy.Rules {
		rest = rest && !everything(r.Select)
		if r.Reserve != "" {
			continue
		}
		for _, pool := range c.poolsOf(r) {
			if r.Sharing == nil {
				ends = append(ends, c.shared(pool, r.Select.At)...)
				continue
			}
			if r.Pool == "" {
				pool += r.Sharing.Mode.Suffix()
			}
			ends = append(ends, end{pool, *r.Sharing, r.Select.At})
		}
	}
	if !rest {
		return ends
	}
	if !c.renamesGPUs {
		ends = append(ends, c.shared(core.DefaultPool, filepath.Base(c.file)+": whatever no rule selects")...)
	}
	for _, n := range c.policy.Names {
		ends = append(ends, c.shared(n.Pool, n.Select.At)...)
	}
	for _, s := range c.policy.Shares {
		ends = append(ends, c.shared(s.Pool, s.Select.At)...)
	}
	return ends
}

// poolsOf are those of a rule before its devices are shared, as far as they do not depend on the machine.
func (c *compiler) poolsOf(r core.Rule) []string {
	switch {
	case r.Pool != "":
		return []string{r.Pool}
	case !onlyInstances(r.Select) && !c.renamesGPUs:
		return []string{core.DefaultPool}
	}
	var pools []string
	for _, p := range r.Select.Profiles {
		pools = append(pools, core.MIGPool(p))
	}
	return pools
}

// shared is where devices of a pool end up by the section "sharing".
func (c *compiler) shared(pool, at string) (ends []end) {
	for _, s := range c.sharesOf[pool] {
		e := end{pool, s.Sharing, s.Select.At}
		if s.Rename != "" {
			e.pool = s.Rename
		}
		ends = append(ends, e)
		if s.First == 0 && s.Select.IDs == nil && s.Select.Indices == nil {
			return ends
		}
	}
	return append(ends, end{pool, core.Sharing{}, at})
}
