package policy

import (
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// domain is that of all resource names.
const domain = inventory.ResourceDomain

// maxName limits a resource name with its domain, as NVIDIA's k8s-device-plugin does (api/config/v1,
// MaxResourceNameLength).
const maxName = 63

// nameFormat is that of a Kubernetes qualified name without its domain.
var nameFormat = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)

// readPool reads the name of a pool, with the domain or without; "" if it is absent or a problem.
func readPool(v value) string {
	text, ok := v.Scalar()
	if !ok || !v.Given() {
		return ""
	}
	name := strings.TrimPrefix(text, domain)
	other, _, hasDomain := strings.Cut(name, "/")
	switch {
	case hasDomain:
		v.Failf("want a name without a domain, or with nvidia.com/; %s/ is another domain", other)
	case !nameFormat.MatchString(name):
		v.Failf("want letters and digits, with - _ . between them")
	case len(domain+name) > maxName:
		v.Failf("want %d characters or less: %s%s has %d, and %d are allowed", maxName-len(domain), domain, name, len(domain+name), maxName)
	default:
		return name
	}
	return ""
}

// definePool is readPool for a name that creates the pool.
func (c *compiler) definePool(v value) string {
	name := readPool(v)
	if name != "" {
		c.pools = append(c.pools, name)
	}
	return name
}

// unknownPools finds names in "sharing" of pools that do not exist.
func (c *compiler) unknownPools() {
	for _, v := range c.named {
		name := strings.TrimPrefix(v.Text(), domain)
		if name != "" && !strings.HasPrefix(name, "mig-") && !slices.Contains(c.pools, name) && nameFormat.MatchString(name) {
			v.Failf("unknown resource: did you mean %s%s? (gpu, mig-<profile>, or a name from resources or policy.rules)",
				domain, document.Nearest(name, c.pools))
		}
	}
}

// readResources reads the section "resources" of NVIDIA's plugin: pools by product name and by MIG profile.
func (c *compiler) readResources(v value) {
	f := fieldsOf(v, resourceKeys)
	c.readNames(f.At("gpus"), wantModel, func(pattern string) inventory.Selector {
		return inventory.Selector{Full: true, Models: []string{pattern}}
	})
	c.readNames(f.At("mig"), wantProfile, func(pattern string) inventory.Selector {
		return inventory.Selector{Profiles: []string{pattern}}
	})
	c.warnNames(f)
}

func (c *compiler) readNames(v value, want string, selector func(pattern string) inventory.Selector) {
	earlier := map[string]value{}
	for _, item := range v.Items() {
		before := c.problems()
		f := fieldsOf(item, namingKeys)
		if c.problems() > before {
			continue
		}
		pattern := f.At("pattern")
		text, ok := pattern.Scalar()
		if ok && text == "" {
			pattern.Failf("want %s", want)
		}
		for _, p := range []string{"*", pattern.Text()} {
			if same, ok := earlier[p]; ok && pattern.Text() != "" {
				pattern.Failf("has no effect: %s at line %d selects the same, and the first counts", same.Path(), same.Line())
				break
			}
		}
		earlier[pattern.Text()] = pattern
		if !f.At("name").Given() {
			f.At("name").Failf("want the name of a resource, such as nvidia.com/gpu")
		}
		name := c.definePool(f.At("name"))
		if long := domain + name + c.suffix; len(long) > maxName {
			f.At("name").Failf("a rule that shares without a name makes it %s, which has %d characters, and %d are allowed", long, len(long), maxName)
		}
		if c.problems() == before {
			s := selector(text)
			s.At = c.at(item)
			c.renamesGPUs = c.renamesGPUs || s.Full && name != inventory.DefaultPool
			c.policy.Names = append(c.policy.Names, inventory.Naming{Select: s, Pool: name})
		}
	}
}
