package policy

import (
	"regexp"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
)

// domain is that of all resource names.
const domain = "nvidia.com/"

// longest is how long a resource name may be, with its domain: NVIDIA's k8s-device-plugin has the same limit
// (api/config/v1, MaxResourceNameLength).
const longest = 63

// nameForm is what Kubernetes takes as the name of a resource (a qualified name, without its domain).
var nameForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)

// poolName reads the name of a pool, with the domain or without; "" if none is given, or a wrong one.
func poolName(v value) string {
	name := strings.TrimPrefix(v.word(), domain)
	switch other, _, ok := strings.Cut(name, "/"); {
	case !v.given() || !v.isPlain():
	case ok:
		v.fail("want a name without a domain, or in nvidia.com/; %s/ is somebody else's", other)
	case !nameForm.MatchString(name):
		v.fail("want letters and digits, with - _ . between them")
	case len(domain+name) > longest:
		v.fail("want %d characters or less: %s%s has %d, and %d are allowed", longest-len(domain), domain, name, len(domain+name), longest)
	default:
		return name
	}
	return ""
}

// newPool is poolName of a pool that exists by being named.
func (c *compiler) newPool(v value) string {
	name := poolName(v)
	if name != "" {
		c.pools = append(c.pools, name)
	}
	return name
}

// resources reads NVIDIA's section "resources": names of pools by model and by profile.
func (c *compiler) resources(v value) {
	f := v.fields("gpus", "mig")
	c.namings(f.at("gpus"), `a product name, with * for any text: "*H100*"`, func(pattern string) core.Selector {
		return core.Selector{Full: true, Models: []string{pattern}}
	})
	c.namings(f.at("mig"), `a MIG profile, with * for any text: "1g.*"`, func(pattern string) core.Selector {
		return core.Selector{Profiles: []string{pattern}}
	})
	c.ignoredNames(f)
}

func (c *compiler) namings(v value, want string, of func(pattern string) core.Selector) {
	earlier := map[string]value{}
	for _, item := range v.items() {
		before := len(c.errs)
		f := item.fields("pattern", "name")
		if len(c.errs) > before {
			continue
		}
		pattern := f.at("pattern")
		if pattern.word() == "" && pattern.isPlain() {
			pattern.fail("want %s", want)
		}
		for _, p := range []string{"*", pattern.text()} {
			if same, ok := earlier[p]; ok && pattern.text() != "" {
				pattern.fail("has no effect: %s at line %d selects the same, and the first counts", same.path, same.line)
				break
			}
		}
		earlier[pattern.text()] = pattern
		if !f.at("name").given() {
			f.at("name").fail("want the name of a resource, such as nvidia.com/gpu")
		}
		name := c.newPool(f.at("name"))
		if long := domain + name + c.suffix; len(long) > longest {
			f.at("name").fail("a rule that shares without a name makes it %s, which has %d characters, and %d are allowed", long, len(long), longest)
		}
		if len(c.errs) == before {
			s := of(pattern.word())
			s.At = c.place(item)
			c.renamesGPUs = c.renamesGPUs || s.Full && name != core.DefaultPool
			c.policy.Names = append(c.policy.Names, core.Naming{Select: s, Pool: name})
		}
	}
}
