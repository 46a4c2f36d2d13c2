package nodelabels

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// node is what the labels of a node's resources depend on.
type node struct {
	strategy  inventory.MIGStrategy
	gpus      []gpu.Device // full GPUs, in canonical order
	instances []gpu.Device // MIG instances, in canonical order
	units     map[gpu.DeviceID]inventory.Unit
}

// newNode selects the devices of a state. Without a strategy for the node, the instances that a rule of the policy offers are labelled
// as under "mixed".
func newNode(s core.State, strategy inventory.MIGStrategy) node {
	n := node{strategy: strategy, units: map[gpu.DeviceID]inventory.Unit{}}
	for u := range s.Allocatable.Devices() {
		if u.Health.Reason != health.ReasonWithdrawn {
			n.units[u.Device.ID] = u
		}
	}
	for _, d := range s.Snapshot.Devices {
		_, offered := n.units[d.ID]
		switch {
		case d.Profile == "":
			n.gpus = append(n.gpus, d)
		case strategy != inventory.MIGNone || offered:
			n.instances = append(n.instances, d)
		}
	}
	if strategy == inventory.MIGNone && len(n.instances) > 0 {
		n.strategy = inventory.MIGMixed
	}
	return n
}

// sharesByMPS reports whether a device is shared by MPS.
func (n node) sharesByMPS() bool {
	for _, u := range n.units {
		if u.Sharing.Mode == inventory.MPS {
			return true
		}
	}
	return false
}

// labelled is what the labels of a resource show.
type labelled struct {
	product  string // without a suffix for sharing
	count    int
	replicas int // 0 = the resource is not offered
	sharing  inventory.Sharing
	renamed  bool // the shares have a resource name of their own
}

func (l Labels) addResource(resource string, r labelled) {
	product, strategy := r.product, "none"
	if r.replicas > 1 {
		strategy = r.sharing.Mode.String()
		if !r.renamed {
			product += "-SHARED"
		}
	}
	l[resource+".product"], l[resource+".count"] = product, strconv.Itoa(r.count)
	l[resource+".replicas"], l[resource+".sharing-strategy"] = strconv.Itoa(r.replicas), strategy
}

// sharing sets how devices are shared: those in the pool with the default name, else the first that are offered. Devices that are not
// offered are not shared.
func (n node) sharing(r *labelled, devices []gpu.Device, pool string) {
	r.replicas = 1
	found := false
	for _, d := range devices {
		u, offered := n.units[d.ID]
		if !offered || found && u.Pool != pool {
			continue
		}
		r.sharing, r.replicas, r.renamed, found = u.Sharing, max(u.Sharing.Replicas, 1), u.Pool != pool, true
		if u.Pool == pool {
			return
		}
	}
}

const gpuResource = prefix + inventory.DefaultPool

// addGPUs adds the labels of the full GPUs. Of several models it is the one with the most GPUs (NVIDIA's program writes any of them).
func (n node) addGPUs(l Labels) {
	if len(n.gpus) == 0 {
		return
	}
	counts := map[string]int{}
	for _, d := range n.gpus {
		counts[d.Model]++
	}
	first := n.gpus[0]
	for _, d := range n.gpus {
		if counts[d.Model] > counts[first.Model] {
			first = d
		}
	}
	whole := slices.DeleteFunc(slices.Clone(n.gpus), func(d gpu.Device) bool { return d.Model != first.Model || d.MIG })
	r := labelled{product: sanitised(first.Model), count: counts[first.Model]}
	if len(whole) > 0 { // otherwise there is none to share
		n.sharing(&r, whole, inventory.DefaultPool)
		first = whole[0]
	}
	l.addResource(gpuResource, r)
	if first.Memory>>20 != 0 {
		l[gpuResource+".memory"] = strconv.FormatUint(first.Memory>>20, 10)
	}
	if first.Compute.Major != 0 {
		l[gpuResource+".family"] = family(first.Compute)
		l[gpuResource+".compute.major"], l[gpuResource+".compute.minor"] = strconv.Itoa(first.Compute.Major), strconv.Itoa(first.Compute.Minor)
	}
}

// addSingle replaces the labels of the full GPUs by those of the MIG instances, if there are GPUs in MIG mode. If not every GPU has
// instances, all of one profile, the node is labelled as invalid: under the strategy "single" that is a mistake, and the instances of
// another profile are not offered.
func (n node) addSingle(l Labels) {
	inMIGMode := slices.DeleteFunc(slices.Clone(n.gpus), func(d gpu.Device) bool { return !d.MIG })
	if len(inMIGMode) == 0 {
		return
	}
	empty := func(d gpu.Device) bool {
		return !slices.ContainsFunc(n.instances, func(i gpu.Device) bool { return i.At.GPU == d.ID })
	}
	profiles := n.profiles()
	if len(inMIGMode) < len(n.gpus) || slices.ContainsFunc(inMIGMode, empty) || len(profiles) != 1 {
		l[gpuResource+".product"] = sanitised(inMIGMode[0].Model) + "-MIG-INVALID"
		l[gpuResource+".count"], l[gpuResource+".replicas"], l[gpuResource+".memory"], l[gpuResource+".sharing-strategy"] = "0", "0", "0", ""
		return
	}
	n.addInstances(l, gpuResource, n.instances, inventory.DefaultPool)
}

// addMixed adds the labels of a resource for each profile.
func (n node) addMixed(l Labels) {
	for profile, instances := range n.profiles() {
		pool := inventory.MIGPool(profile)
		n.addInstances(l, prefix+pool, instances, pool)
	}
}

// profiles returns the instances by profile.
func (n node) profiles() map[string][]gpu.Device {
	all := map[string][]gpu.Device{}
	for _, d := range n.instances {
		all[d.Profile] = append(all[d.Profile], d)
	}
	return all
}

// addInstances adds the labels of a resource with instances of one profile.
func (n node) addInstances(l Labels, resource string, instances []gpu.Device, pool string) {
	d := instances[0]
	r := labelled{product: sanitised(d.Product()) + "-MIG-" + strings.TrimPrefix(inventory.MIGPool(d.Profile), "mig-"), count: len(instances)}
	n.sharing(&r, instances, pool)
	l.addResource(resource, r)
	maps.Copy(l, Labels{
		resource + ".memory":          strconv.FormatUint(d.Memory>>20, 10),
		resource + ".multiprocessors": strconv.Itoa(d.Slices.Multiprocessors),
		resource + ".slices.gi":       strconv.Itoa(d.Slices.GPU),
		resource + ".slices.ci":       strconv.Itoa(d.Slices.Compute),
		resource + ".engines.copy":    strconv.Itoa(d.Slices.CopyEngines),
		resource + ".engines.decoder": strconv.Itoa(d.Slices.Decoders),
		resource + ".engines.encoder": strconv.Itoa(d.Slices.Encoders),
		resource + ".engines.jpeg":    strconv.Itoa(d.Slices.JPEGDecoders),
		resource + ".engines.ofa":     strconv.Itoa(d.Slices.OFAs),
	})
}

// family returns the name of the architecture of a compute capability; "undefined" for one that NVIDIA's program has no name for.
func family(c gpu.Compute) string {
	switch c.Major {
	case 7:
		if c.Minor >= 5 {
			return "turing"
		}
		return "volta"
	case 8:
		if c.Minor >= 9 {
			return "ada-lovelace"
		}
		return "ampere"
	}
	if name, ok := families[c.Major]; ok {
		return name
	}
	return "undefined"
}

var families = map[int]string{1: "tesla", 2: "fermi", 3: "kepler", 5: "maxwell", 6: "pascal", 9: "hopper", 10: "blackwell", 12: "blackwell"}
