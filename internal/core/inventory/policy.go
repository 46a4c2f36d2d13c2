package inventory

import (
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// MIGStrategy is which devices of a GPU in MIG mode are offered.
type MIGStrategy string

// The MIG strategies. Names and meanings are those of NVIDIA's k8s-device-plugin.
const (
	MIGNone   MIGStrategy = "none"   // full GPUs only; MIG mode is ignored
	MIGSingle MIGStrategy = "single" // all GPUs have instances of one profile, which are offered as GPUs
	MIGMixed  MIGStrategy = "mixed"  // full GPUs and MIG instances, in a pool for each profile
)

// Config configures what a node offers.
type Config struct {
	MIG       MIGStrategy
	Exclude   []gpu.DeviceID // not offered; the UUID of a full GPU does not exclude its MIG instances
	Policy    Policy
	Packed    bool        // prefer the shared devices that are used most; default: those used least
	Overlap   OverlapMode // for devices that another agent on this node offers too
	Injection Injection   // of devices whose rule sets none
	IndexIDs  bool        // plans identify devices by index, "0" or "0:1", but for claims; default: by UUID

	API API // through which devices are offered

	IMEXChannel  bool // containers get IMEX channel 0 if the node has its device node: gpu.IMEXChannelNode
	IMEXRequired bool // units take no new work while that node is missing; without effect unless IMEXChannel
}

// Policy configures which devices are offered, in which pools, and how they are shared. The zero value offers every
// device once, in its default pool.
type Policy struct {
	Include []Selector // only devices that one of them selects are offered; none = all
	Rules   []Rule
	Names   []Naming
	Shares  []Share
	Limits  LimitPolicy
}

// Rule configures the devices that it selects. Of the rules that select a device, the first one applies. What it does
// not set is as for devices without a rule.
type Rule struct {
	Select     Selector
	NotOffered string      // reason for which the devices are not offered; "" = they are
	MIG        MIGStrategy // of the selected GPUs; "" = Config.MIG
	Pool       string      // "" = the default pool, with a suffix if the devices are shared
	Sharing    *Sharing    // nil = as in Policy.Shares
	Injection  *Injection  // nil = Config.Injection
}

// Naming assigns a pool to the devices that it selects. Of those that select a device, the first one applies.
type Naming struct {
	Select Selector
	Pool   string
}

// Share configures how the devices of a pool are shared. Of those that select a device, the first one applies.
type Share struct {
	Pool    string
	Select  Selector
	First   int    // number of devices to share, the first in canonical order; 0 = all
	Rename  string // pool of the shared units; "" = Pool
	Sharing Sharing
}

// ResourceDomain is NVIDIA's, with the slash: of the resources of the kubelet, of labels, and the folder of MPS control daemons.
const ResourceDomain = "nvidia.com/"

// DefaultPool is the pool of full GPUs, and of all units under the MIG strategy "single".
const DefaultPool = "gpu"

// MIGPool returns the pool of the instances of a profile under the MIG strategy "mixed": "mig-1g.10gb.me" for
// "1g.10gb+me", because a resource name has no '+'.
func MIGPool(profile string) string { return "mig-" + strings.ReplaceAll(profile, "+", ".") }

// NamedByPolicy reports whether the unit's pool has a name of the policy's own: not a default one, with or without
// the suffix of a shared pool.
func (u Unit) NamedByPolicy() bool {
	pool := strings.TrimSuffix(strings.TrimSuffix(u.Pool, TimeSlicing.Suffix()), MPS.Suffix())
	return pool != DefaultPool && (u.Device.Profile == "" || pool != MIGPool(u.Device.Profile))
}

// policySelector is a selector of a policy.
type policySelector struct {
	*Selector
	first     int    // of a Share
	unmatched string // the warning if it applies to no device
}

// selectors returns the selectors of a policy in its order.
func (p Policy) selectors() (all []policySelector) {
	for i := range p.Include {
		all = append(all, policySelector{&p.Include[i], 0, "selects no device of this node"})
	}
	for i := range p.Rules {
		all = append(all, policySelector{&p.Rules[i].Select, 0, "selects no device of this node, or only such as earlier rules select"})
	}
	for i := range p.Names {
		all = append(all, policySelector{&p.Names[i].Select, 0, "selects no device of this node, or only such as have a name already"})
	}
	for i := range p.Shares {
		s := &p.Shares[i]
		all = append(all, policySelector{&s.Select, s.First, "there is no " + s.Pool + " on this node to share"})
	}
	return all
}
