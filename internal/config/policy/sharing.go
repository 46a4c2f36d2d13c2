package policy

import (
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// sharedSuffix is what "renameByDefault" appends.
const sharedSuffix = ".shared"

// readSharing reads the section "sharing" of NVIDIA's plugin.
func (c *compiler) readSharing(v value) {
	f := fieldsOf(v, sharingKeys)
	c.readMode(f.At("timeSlicing"), inventory.TimeSlicing)
	sliced := len(c.policy.Shares)
	c.readMode(f.At("mps"), inventory.MPS)
	if sliced > 0 && len(c.policy.Shares) > sliced {
		c.warnBesideMPS(f.At("timeSlicing"))
	}
}

// readMode reads which resources are shared in a mode, and how.
func (c *compiler) readMode(v value, mode inventory.SharingMode) {
	f := fieldsOf(v, modeKeys(mode))
	one := f.At("failRequestsGreaterThanOne")
	if mode == inventory.MPS {
		checkOnePerRequest(one)
	}
	s := inventory.Share{Sharing: inventory.Sharing{Mode: mode, OnePerRequest: one.Bool(mode == inventory.MPS)}}
	rename := f.At("renameByDefault").Bool(false)
	for _, item := range f.At("resources").Items() {
		before := c.problems()
		if parts := c.readShare(item, s, rename); c.problems() == before {
			c.policy.Shares = append(c.policy.Shares, parts...)
			c.noteMPS(item, mode)
			c.noteOnePerRequest(one, s.Sharing)
		}
	}
}

// readShare reads how one resource is shared. s has what all resources of the mode have in common.
func (c *compiler) readShare(v value, s inventory.Share, rename bool) []inventory.Share {
	before := c.problems()
	f := fieldsOf(v, shareKeys(s.Sharing.Mode))
	if c.problems() > before {
		return nil
	}
	name, devices := f.At("name"), f.At("devices")
	s.Pool = c.readSharedPool(v, name)
	if s.Sharing.Mode == inventory.MPS && strings.HasPrefix(s.Pool, "mig-") {
		name.Failf("MPS shares full GPUs only: want timeSlicing for MIG instances")
	}
	s.Sharing.Replicas = readReplicas(f.At("replicas"), s.Sharing.Mode)
	if s.Rename = readPool(f.At("rename")); s.Rename == "" && rename && s.Pool != "" {
		s.Rename = s.Pool + sharedSuffix
		if len(domain+s.Rename) > maxName {
			name.Failf("want %d characters or less: %s%s is too long a name for a resource", maxName-len(domain+sharedSuffix), domain, s.Rename)
		}
	}
	s.Select = inventory.Selector{At: c.at(v), Full: s.Sharing.Mode == inventory.MPS}
	c.warnRename(f.At("rename"), s, rename)
	c.warnDevices(devices, s.Pool)
	parts := readDevices(devices, s)
	if isSubset(devices) && (s.Rename == "" || s.Rename == s.Pool) && c.problems() == before {
		devices.Failf("want all, or a rename: a request can't distinguish the shares from the devices of %s that are not shared", s.Pool)
	}
	return parts
}

// readSharedPool reads the name of a resource that is shared; each may be shared once.
func (c *compiler) readSharedPool(item, name value) string {
	if !name.Given() {
		name.Failf("want the name of a resource, such as nvidia.com/gpu")
		return ""
	}
	pool := readPool(name)
	c.named = append(c.named, name)
	if other, twice := c.sharedBy[pool]; twice {
		name.Failf("already shared by %s at line %d: to share some of its devices differently, use policy.rules", other.Path(), other.Line())
	} else if pool != "" {
		c.sharedBy[pool] = item
	}
	return pool
}

// readDevices reads which devices of a pool are shared: "all", a number of them, or a list of indices and UUIDs. A list of
// both gives two shares, because a device must fulfil all conditions of a selector.
func readDevices(v value, s inventory.Share) []inventory.Share {
	const want = `all, a number, or a list of indices and UUIDs: [0, "0:1", GPU-...]`
	if !v.Given() || v.IsScalar() {
		if isSubset(v) {
			s.First = v.Int(1, maxReplicas, want)
		}
		return []inventory.Share{s}
	}
	byID, byIndex := s, s
	for _, w := range v.Scalars() {
		if strings.Contains(w.Text(), "-") {
			if id, ok := readUUID(w); ok {
				byID.Select.IDs = append(byID.Select.IDs, id)
			}
		} else {
			byIndex.Select.Indices = append(byIndex.Select.Indices, readIndices(w)...)
		}
	}
	var parts []inventory.Share
	if byID.Select.IDs != nil {
		parts = append(parts, byID)
	}
	if byIndex.Select.Indices != nil {
		parts = append(parts, byIndex)
	}
	return parts
}

// isSubset reports whether "devices" may be less than all devices of the pool.
func isSubset(v value) bool { return v.Given() && v.Text() != "all" }
