// Package deviceclass makes the DeviceClasses (resource.k8s.io/v1) for the pools of policies: cluster-scoped objects, which an operator
// applies and no agent writes. It is pure.
package deviceclass

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Configuration is what decides the pools of a group of nodes.
type Configuration struct {
	MIG    inventory.MIGStrategy
	Policy inventory.Policy
}

// Options are those of all classes.
type Options struct {
	// Profiles are the MIG profiles of the nodes' instances, such as "1g.10gb": under the strategy "mixed" each has a pool, and a policy
	// need not name them.
	Profiles []string

	// ExtendedResources maps the extended resource nvidia.com/<pool> to each class, so that pods which request it need no claim.
	ExtendedResources bool
}

// Class is a DeviceClass.
type Class struct {
	Name             string
	About            string // one line
	Expression       string // CEL
	ExtendedResource string // "" = none
}

// The classes of NVIDIA's driver for the devices that this agent has. Its third, vfio.gpu.nvidia.com, selects devices for passthrough to
// virtual machines, of which this agent has none: a claim of that class would wait for ever.
const (
	gpuClass  = "gpu.nvidia.com"
	migClass  = "mig.nvidia.com"
	vfioClass = "vfio.gpu.nvidia.com"

	// defaultPoolClass is the class of nvidia.com/gpu where that pool has other devices than whole GPUs.
	defaultPoolClass = "gpu-pool.nvidia.com"
)

const (
	domain     = inventory.ResourceDomain
	attributes = "device.attributes['" + resourceslice.Driver + "']"
	ofDriver   = "device.driver == '" + resourceslice.Driver + "'"

	// maxName limits an extended resource's name without its domain (a label's name).
	maxName = 63
)

// Of returns the classes for all nodes that have one of the configurations: those of NVIDIA's driver, then one for each other pool, by
// name. It returns all problems at once, each a *setting.Error.
func Of(all []Configuration, o Options) ([]Class, error) {
	p := pools{at: map[string]pool{}}
	for _, c := range all {
		p.add(c, o.Profiles)
	}
	classes := p.ofNVIDIA()
	taken := map[string]string{vfioClass: "a class of NVIDIA's driver", defaultPoolClass: "pool gpu"}
	for _, c := range classes[:2] {
		taken[c.Name] = "a class of NVIDIA's driver"
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(p.at)) {
		if name == inventory.DefaultPool {
			continue
		}
		c := classOf(name)
		key := cmp.Or(p.at[name].where, "pool")
		switch other, ok := taken[c.Name]; {
		case ok:
			errs = append(errs, &setting.Error{Key: key, Value: name, Remedy: "the name of its class would be " + c.Name + ", as that of " + other + ": give the pool another name"})
		case len(name) > maxName:
			errs = append(errs, &setting.Error{Key: key, Value: name, Remedy: fmt.Sprintf("want %d characters or less for an extended resource: %d are too many", maxName, len(name))})
		default:
			taken[c.Name] = "pool " + name
			classes = append(classes, c)
		}
	}
	if !o.ExtendedResources {
		for i := range classes {
			classes[i].ExtendedResource = ""
		}
	}
	return classes, errors.Join(errs...)
}

// classOf returns the class of a pool. A device of NVIDIA's driver has no attribute "pool", and must not be an error.
func classOf(name string) Class {
	return Class{
		Name: classNameReplacer.Replace(strings.ToLower(name)) + ".nvidia.com", About: "pool " + name, ExtendedResource: domain + name,
		Expression: fmt.Sprintf("%s && %s.?pool.orValue('') == '%s'", ofDriver, attributes, name),
	}
}

// classNameReplacer makes one label of a DNS subdomain of a pool's name.
var classNameReplacer = strings.NewReplacer(".", "-", "_", "-")

// ofNVIDIA returns the classes that NVIDIA's driver has. They select as there, except that pools which a policy names are left to their
// own classes: a request for nvidia.com/gpu does not get a GPU of another pool.
func (p pools) ofNVIDIA() []Class {
	var named []string
	for _, name := range slices.Sorted(maps.Keys(p.at)) {
		if p.at[name].exclusive && name != inventory.DefaultPool && !strings.HasPrefix(name, inventory.MIGPool("")) {
			named = append(named, "'"+name+"'")
		}
	}
	others := ""
	if named != nil {
		others = fmt.Sprintf(" && !(%s.?pool.orValue('') in [%s])", attributes, strings.Join(named, ", "))
	}
	byType := func(name, kind, about string) Class {
		return Class{Name: name, About: about, Expression: ofDriver + " && " + attributes + ".type == '" + kind + "'" + others}
	}
	classes := []Class{
		byType(gpuClass, "gpu", "whole GPUs, never a share"),
		byType(migClass, "mig", "MIG instances, never a share"),
	}
	if !p.mixedDefault {
		classes[0].ExtendedResource = kubeadapter.GPUResource
		return classes
	}
	return append(classes, Class{
		Name: defaultPoolClass, About: "pool gpu, which has shares or MIG instances: what nvidia.com/gpu is on a device plugin's nodes",
		ExtendedResource: kubeadapter.GPUResource,
		Expression:       fmt.Sprintf("%s && %s.?pool.orValue(%s.type) == '%s'", ofDriver, attributes, attributes, inventory.DefaultPool),
	})
}

// NameOf returns the name of the class whose devices are those of a pool; of the default pool, that of NVIDIA's driver for whole GPUs.
func NameOf(pool string) string {
	if pool == inventory.DefaultPool {
		return gpuClass
	}
	return classOf(pool).Name
}
