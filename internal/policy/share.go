package policy

import (
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/configfile"
	"github.com/tandem-gpu/tandem/internal/core"
)

// sharedSuffix is what "renameByDefault" appends.
const sharedSuffix = ".shared"

// sharing reads NVIDIA's section of that name.
func (c *compiler) sharing(v value) {
	f := v.fields("timeSlicing", "mps")
	c.shares(f.at("timeSlicing"), core.TimeSlicing)
	sliced := len(c.policy.Shares)
	c.shares(f.at("mps"), core.MPS)
	if sliced > 0 && len(c.policy.Shares) > sliced {
		c.ignoredBesideMPS(f.at("timeSlicing"))
	}
}

// shares reads which resources are shared in a mode, and how.
func (c *compiler) shares(v value, mode core.SharingMode) {
	f := v.fields("renameByDefault", "failRequestsGreaterThanOne", "resources")
	one := f.at("failRequestsGreaterThanOne")
	if mode == core.MPS {
		onePerRequest(one)
	}
	s := core.Share{Sharing: core.Sharing{Mode: mode, OnePerRequest: one.truth(mode == core.MPS)}}
	rename := f.at("renameByDefault").truth(false)
	for _, item := range f.at("resources").items() {
		before := len(c.errs)
		if parts := c.share(item, s, rename); len(c.errs) == before {
			c.policy.Shares = append(c.policy.Shares, parts...)
			c.uses(item, mode)
		}
	}
}

// share reads how one resource is shared. What is common to all is in s.
func (c *compiler) share(v value, s core.Share, rename bool) []core.Share {
	before := len(c.errs)
	f := v.fields("name", "replicas", "rename", "devices")
	if len(c.errs) > before {
		return nil
	}
	name, some := f.at("name"), f.at("devices")
	s.Pool = c.sharedPool(v, name)
	if s.Sharing.Mode == core.MPS && strings.HasPrefix(s.Pool, "mig-") {
		name.fail("MPS is of full GPUs: want timeSlicing for MIG instances")
	}
	s.Sharing.Replicas = replicas(f.at("replicas"), s.Sharing.Mode)
	if s.Rename = poolName(f.at("rename")); s.Rename == "" && rename && s.Pool != "" {
		s.Rename = s.Pool + sharedSuffix
		if len(domain+s.Rename) > longest {
			name.fail("want %d characters or less: %s%s is too long a name for a resource", longest-len(domain+sharedSuffix), domain, s.Rename)
		}
	}
	s.Select = core.Selector{At: c.place(v), Full: s.Sharing.Mode == core.MPS}
	c.ignoredRename(f.at("rename"), s, rename)
	c.ignoredDevices(some, s.Pool)
	parts := devices(some, s)
	if some.isSome() && (s.Rename == "" || s.Rename == s.Pool) && len(c.errs) == before {
		some.fail("want all, or a rename: a request could not tell the shares from the devices of %s that are not shared", s.Pool)
	}
	return parts
}

// sharedPool reads the name of a resource that is to be shared, which may be once.
func (c *compiler) sharedPool(item, name value) string {
	if !name.given() {
		name.fail("want the name of a resource, such as nvidia.com/gpu")
		return ""
	}
	pool := poolName(name)
	c.named = append(c.named, name)
	if other, twice := c.sharedAt[pool]; twice {
		name.fail("is shared by %s at line %d already: how some of its devices are shared differently is said in policy.rules",
			other.path, other.line)
	} else if pool != "" {
		c.sharedAt[pool] = item
	}
	return pool
}

// strangers finds shared resources that nothing is called.
func (c *compiler) strangers() {
	for _, v := range c.named {
		name := strings.TrimPrefix(v.text(), domain)
		if name != "" && !strings.HasPrefix(name, "mig-") && !slices.Contains(c.pools, name) && nameForm.MatchString(name) {
			v.fail("nothing is called that: did you mean %s%s? (gpu, mig-<profile>, or a name from resources or policy.rules)",
				domain, configfile.Nearest(name, c.pools))
		}
	}
}

// devices reads which devices of a pool are shared: "all", so many, or a list of indices and UUIDs. What is
// selected by either becomes a share each, as all conditions of a selector must hold.
func devices(v value, s core.Share) []core.Share {
	const want = `want all, a number, or a list of indices and UUIDs: [0, "0:1", GPU-...]`
	if !v.given() || v.isPlain() {
		if v.isSome() {
			s.First = v.whole(1, 1000, strings.TrimPrefix(want, "want "))
		}
		return []core.Share{s}
	}
	byID, byIndex := s, s
	for _, w := range v.words() {
		if strings.Contains(w.word(), "-") {
			if id, ok := uuid(w); ok {
				byID.Select.IDs = append(byID.Select.IDs, id)
			}
		} else {
			byIndex.Select.Indices = append(byIndex.Select.Indices, indices(w)...)
		}
	}
	var parts []core.Share
	if byID.Select.IDs != nil {
		parts = append(parts, byID)
	}
	if byIndex.Select.Indices != nil {
		parts = append(parts, byIndex)
	}
	return parts
}

// isSome reports whether not all devices are meant.
func (v value) isSome() bool { return v.given() && v.text() != "all" }
