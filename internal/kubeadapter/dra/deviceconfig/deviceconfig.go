// Package deviceconfig reads the opaque configuration of resource claims and DeviceClasses: GpuConfig and MigDeviceConfig of
// resource.nvidia.com/v1beta1, as NVIDIA's DRA driver has them. How a device is shared is decided by the policy of the node, not by a
// claim. So a configuration that asks for what the node does is accepted, and any other is refused by name. It is pure.
package deviceconfig

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// APIVersion is the API version of the kinds.
const APIVersion = "resource.nvidia.com/v1beta1"

// Kind is the kind of a configuration.
type Kind string

// The kinds that are supported.
const (
	GPU Kind = "GpuConfig"       // for GPUs
	MIG Kind = "MigDeviceConfig" // for MIG instances
)

// Strategy is how a claim wants its devices to be shared.
type Strategy string

// The strategies. The default is TimeSlicing: it is what a GPU does without configuration.
const (
	TimeSlicing Strategy = "TimeSlicing"
	MPS         Strategy = "MPS"
)

// Config is one configuration.
type Config struct {
	Source   string   // "class" or "claim"
	Number   int      // among the configurations of the allocation, from 0
	Kind     Kind     //
	Requests []string // to which it applies: "request" or "request/subrequest"; empty = all
	Strategy Strategy // "" = not given
	Threads  int      // percent of a GPU's threads for each MPS client; 0 = not given
	Memory   uint64   // bytes of device memory for each MPS client; 0 = not given
}

// Configs are the configurations of an allocation, by precedence: a later one replaces an earlier one.
type Configs []Config

// Error has all problems of the configurations of an allocation.
type Error struct{ Problems []string }

// Error lists the problems in one line.
func (e *Error) Error() string { return "opaque configuration: " + strings.Join(e.Problems, "; ") }

// Parse reads the configurations for a driver; those for other drivers are ignored. Those of classes come before those of the claim. It
// fails with *Error, which has every problem of all of them.
func Parse(all []kubeapi.DeviceAllocationConfiguration, driver string) (Configs, error) {
	var configs Configs
	p := &parser{}
	for i, c := range all {
		if c.Opaque == nil || c.Opaque.Driver != driver {
			continue
		}
		one := Config{Source: "claim", Number: i, Requests: c.Requests}
		if c.Source == "FromClass" {
			one.Source = "class"
		}
		p.at = fmt.Sprintf("%s, config %d", one.Source, i)
		p.config(&one, c.Opaque.Parameters)
		configs = append(configs, one)
	}
	slices.SortStableFunc(configs, func(a, b Config) int { return strings.Compare(b.Source, a.Source) }) // "class" before "claim"
	if len(p.problems) > 0 {
		return nil, &Error{p.problems}
	}
	return configs, nil
}

// For returns what applies to a device, or why the node can't do it. request is that of the allocation's result, with its subrequest.
// A configuration for all requests applies to devices of its kind; one that names the request must be of the kind of the device.
func (c Configs) For(request string, u inventory.Unit) (inventory.Sharing, error) {
	kind := GPU
	if u.Device.Profile != "" {
		kind = MIG
	}
	for _, one := range slices.Backward(c) {
		named := one.names(request)
		switch {
		case len(one.Requests) > 0 && !named, len(one.Requests) == 0 && one.Kind != kind:
			continue
		case one.Kind != kind:
			return u.Sharing, one.errorf("%s can't apply to request %q, whose device %s needs %s", one.Kind, request, u.Device.ID, kind)
		}
		return one.apply(u)
	}
	return u.Sharing, nil
}

// names reports whether the configuration names a request, or the request of a subrequest.
func (c Config) names(request string) bool {
	main, _, _ := strings.Cut(request, "/")
	return slices.Contains(c.Requests, request) || slices.Contains(c.Requests, main)
}

// apply returns the sharing of a device under the configuration.
func (c Config) apply(u inventory.Unit) (inventory.Sharing, error) {
	s := u.Sharing
	switch {
	case c.Strategy == MPS && s.Mode != inventory.MPS:
		return s, c.errorf("sharing.strategy MPS: device %s is %s on this node; ask for a class whose devices have the attribute sharing=mps, or leave the strategy out", u.Device.ID, s)
	case c.Strategy == TimeSlicing && s.Mode == inventory.MPS:
		return s, c.errorf("sharing.strategy TimeSlicing: device %s is shared by MPS on this node; ask for a class whose devices have the attribute sharing=time-slicing, or leave the strategy out", u.Device.ID)
	}
	var err error
	if c.Threads > 0 {
		if s.Threads > 0 && c.Threads > s.Threads {
			err = c.errorf("sharing.mpsConfig.defaultActiveThreadPercentage %d: a client of pool %s has at most %d", c.Threads, u.Pool, s.Threads)
		}
		s.Threads = c.Threads
	}
	if c.Memory > 0 {
		if s.Memory > 0 && c.Memory > s.Memory {
			return s, c.errorf("sharing.mpsConfig.defaultPinnedDeviceMemoryLimit %dMi: a client of pool %s has at most %dMi", c.Memory>>20, u.Pool, s.Memory>>20)
		}
		s.Memory = c.Memory
	}
	return s, err
}

func (c Config) errorf(format string, args ...any) error {
	return &Error{[]string{fmt.Sprintf("%s, config %d: ", c.Source, c.Number) + fmt.Sprintf(format, args...)}}
}

// parser collects problems.
type parser struct {
	at       string // of the configuration
	problems []string
}

func (p *parser) errorf(format string, args ...any) {
	p.problems = append(p.problems, p.at+": "+fmt.Sprintf(format, args...))
}

// config reads one configuration.
func (p *parser) config(c *Config, text json.RawMessage) {
	var head struct{ APIVersion, Kind string }
	if err := json.Unmarshal(text, &head); err != nil {
		p.errorf("parameters are not an object with apiVersion and kind")
		return
	}
	if head.APIVersion != APIVersion {
		p.errorf("%s of apiVersion %q is not supported; this agent reads %s of %s", cmp.Or(head.Kind, `""`), head.APIVersion, "GpuConfig and MigDeviceConfig", APIVersion)
		return
	}
	switch c.Kind = Kind(head.Kind); c.Kind {
	case GPU, MIG:
	case "VfioDeviceConfig":
		p.errorf("VfioDeviceConfig is not supported: this agent does not pass GPUs to virtual machines; remove it")
		return
	case "ComputeDomainChannelConfig", "ComputeDomainDaemonConfig":
		p.errorf("%s is not supported: compute domains need NVIDIA's driver compute-domain.nvidia.com; remove it", c.Kind)
		return
	default:
		p.errorf("kind %s is not supported; this agent reads GpuConfig and MigDeviceConfig", cmp.Or(head.Kind, `""`))
		return
	}
	f := p.object(text, "", "apiVersion", "kind", "sharing")
	if sharing, ok := f["sharing"]; ok {
		p.sharing(c, sharing)
	}
}
