package kube

import (
	"regexp"
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// dra is what the objects of Dynamic Resource Allocation show.
type dra struct {
	objects *objects
	onNode  map[string][]*draDevice
	byName  map[draName]*draDevice
	taken   map[draName]bool
	kinds   map[string][]condition // what pods ask for
}

// draName names a device in claims.
type draName struct{ driver, pool, device string }

type draDevice struct {
	*sliceDevice
	draName
	id     gpu.DeviceID
	parent gpu.DeviceID // of a MIG instance: its GPU
}

// ask is how many devices of a kind a claim is for.
type ask struct {
	kind  string
	count int
}

func newDRA(o *objects) dra {
	d := dra{objects: o, onNode: map[string][]*draDevice{}, byName: map[draName]*draDevice{}, taken: map[draName]bool{}, kinds: map[string][]condition{}}
	for _, s := range latest(o.slices) {
		for i := range s.devices {
			d.addDevice(s, &s.devices[i])
		}
	}
	for _, c := range o.claims {
		for i := range c.results {
			if r := &c.results[i]; r.AdminAccess == nil || !*r.AdminAccess {
				d.taken[draName{r.Driver, r.Pool, r.Device}] = true
			}
		}
	}
	for _, p := range o.pods {
		for _, ref := range p.claims {
			d.asks(o.claims[named{p.namespace, ref.name}], ref)
		}
	}
	d.addResources()
	return d
}

// latest are the slices that the scheduler uses: of the latest generation of each pool, if all of that are there.
func latest(all []*slice) (kept []*slice) {
	type pool struct{ driver, name string }
	newest, count := map[pool]int64{}, map[pool]int64{}
	for _, s := range all {
		k := pool{s.driver, s.pool}
		newest[k] = max(newest[k], s.generation)
	}
	for _, s := range all {
		if k := (pool{s.driver, s.pool}); s.generation == newest[k] {
			count[k]++
		}
	}
	for _, s := range all {
		if k := (pool{s.driver, s.pool}); s.node != "" && s.generation == newest[k] && count[k] == s.count {
			kept = append(kept, s)
		}
	}
	return kept
}

func (d *dra) addDevice(s *slice, one *sliceDevice) {
	id := gpu.DeviceID(one.values[s.driver+"/uuid"])
	if id == "" {
		return
	}
	dev := &draDevice{sliceDevice: one, draName: draName{s.driver, s.pool, one.name}, id: id, parent: gpu.DeviceID(one.values[s.driver+"/parentUUID"])}
	d.onNode[s.node] = append(d.onNode[s.node], dev)
	d.byName[dev.draName] = dev
}

// addResources adds the extended resources that classes serve.
func (d *dra) addResources() {
	twice := map[string]bool{}
	for _, c := range d.objects.classes {
		if !strings.HasPrefix(c.resource, domain) {
			continue
		}
		if _, ok := d.kinds[c.resource]; ok {
			twice[c.resource] = true
		}
		if all, ok := conditions(c.selectors); ok {
			d.kinds[c.resource] = all
		}
	}
	for resource := range twice {
		delete(d.kinds, resource)
	}
}

// asks are what the claim of a replacement asks for. A claim that is not of one pod alone keeps its devices for the replacement. It is false if
// the devices that would do are not known for certain.
func (d *dra) asks(c *claim, ref podClaim) (all []ask, ok bool) {
	if c == nil || !ref.own || ref.resources != nil || c.unknown != "" || c.reservedFor > 1 {
		return nil, false
	}
	for _, r := range c.requests {
		kind, ok := d.kind(r)
		if !ok {
			return nil, false
		}
		all = append(all, ask{kind, r.count})
	}
	return all, len(all) > 0
}

// kind names the devices that a request is for: its class, and its own selectors.
func (d *dra) kind(r claimRequest) (string, bool) {
	c := d.objects.classes[named{name: r.class}]
	if c == nil {
		return "", false
	}
	name := strings.Join(append([]string{r.class}, r.selectors...), " with ")
	if _, ok := d.kinds[name]; ok {
		return name, true
	}
	all, ok := conditions(slices.Concat(c.selectors, r.selectors))
	if ok {
		d.kinds[name] = all
	}
	return name, ok
}

// free are the free devices of a node, by what is asked for. A device that is of several kinds is free for each of them: replacements under way of
// any kind count against all.
func (d *dra) free(n *node, r report) map[string]int {
	all := map[string]int{}
	for kind, conditions := range d.kinds {
		if _, plugin := n.allocatable.gpus[kind]; plugin {
			continue
		}
		count := 0
		for _, dev := range d.onNode[n.name] {
			yes, known := dev.matches(conditions)
			if !known {
				count = 0 // the scheduler takes an expression that fails for no device of the node
				break
			}
			if yes && dev.usable(r) && !d.taken[dev.draName] {
				count++
			}
		}
		if count > 0 {
			all[kind] = count
		}
	}
	return all
}

// at is where a device is, that a pod has. A slice shows of which GPU an instance is, and not which of its instances: so one with a taint is where the agent reports
// that its pod has faulty hardware.
func (dev *draDevice) at(r report, uid string) gpu.Placement {
	for i := range r.faults {
		f := &r.faults[i]
		if dev.parent != "" && f.At.GPU == dev.parent && (f.At.GI == gpu.Whole || dev.tainted && slices.Contains(f.Holders, uid)) {
			return f.At
		}
	}
	return gpu.WholeGPU(dev.id)
}

// usable reports whether a device takes new work, if no claim has it.
func (dev *draDevice) usable(r report) bool {
	return dev.simple && !dev.tainted && r.healthy(dev.at(r, ""))
}

// healthy reports whether no fault takes hardware from new work.
func (r report) healthy(at gpu.Placement) bool {
	return !slices.ContainsFunc(r.faults, func(f rescue.Fault) bool {
		return f.State >= health.Unhealthy && !f.Advisory && f.At.Overlaps(at)
	})
}

// counted are the usable devices that a pod has by its claims, by kind.
func (d *dra) counted(p *pod, r report) map[string]int {
	all := map[string]int{}
	for _, ref := range p.claims {
		c := d.objects.claims[named{p.namespace, ref.name}]
		if c == nil || !ref.own {
			continue
		}
		for i := range c.results {
			dev := d.byName[nameOf(&c.results[i])]
			if kind, ok := d.kindOfResult(c, ref, c.results[i].Request); ok && dev != nil && dev.usable(r) {
				all[kind]++
			}
		}
	}
	return all
}

func (d *dra) kindOfResult(c *claim, ref podClaim, request string) (string, bool) {
	if ref.resources != nil {
		kind, ok := ref.resources[request]
		return kind, ok
	}
	for _, r := range c.requests {
		if r.name == request {
			return d.kind(r)
		}
	}
	return "", false
}

// holds are the devices that a pod has by its claims, and where they are. One that no slice has is none of the node's devices, which permits no act.
func (d *dra) holds(p *pod, r report) (all []rescue.Hold, devices []rescue.Device) {
	for _, ref := range p.claims {
		c := d.objects.claims[named{p.namespace, ref.name}]
		if c == nil {
			continue
		}
		for i := range c.results {
			name := nameOf(&c.results[i])
			if !strings.HasSuffix(name.driver, strings.TrimSuffix(domain, "/")) {
				continue
			}
			h := rescue.Hold{Device: gpu.DeviceID(name.driver + "/" + name.pool + "/" + name.device)}
			if dev := d.byName[name]; dev != nil {
				h = rescue.Hold{Device: dev.id, Shown: rescue.ShownHealthy}
				if dev.tainted {
					h.Shown = rescue.ShownUnhealthy
				}
				devices = append(devices, rescue.Device{ID: dev.id, At: dev.at(r, p.uid)})
			}
			all = append(all, h)
		}
	}
	return all, devices
}

func nameOf(r *resourcev1.DeviceRequestAllocationResult) draName {
	return draName{r.Driver, r.Pool, r.Device}
}

// condition is an equation of a selector.
type condition struct{ attribute, value string } // the attribute "" is the driver

// equation is the part of CEL that is understood: what the classes of GPUs and most selectors are made of.
var equation = regexp.MustCompile(`^device\.(?:driver|attributes\[(?:"([^"\\]+)"|'([^'\\]+)')\]\.([A-Za-z0-9_]+)) == (?:"([^"\\]*)"|'([^'\\]*)')$`)

// conditions parses selectors that are equations, all of which must hold. It is false for others.
func conditions(selectors []string) (all []condition, ok bool) {
	for _, s := range selectors {
		for part := range strings.SplitSeq(s, "&&") {
			m := equation.FindStringSubmatch(strings.TrimSpace(part))
			if m == nil {
				return nil, false
			}
			c := condition{value: m[4] + m[5]}
			if m[3] != "" {
				c.attribute = m[1] + m[2] + "/" + m[3]
			}
			all = append(all, c)
		}
	}
	return all, true
}

// matches reports whether a device is one that a request is for. It is not known if an expression reads an attribute that the device does not have.
func (dev *draDevice) matches(all []condition) (yes, known bool) {
	for _, c := range all {
		value, ok := dev.values[c.attribute]
		if c.attribute == "" {
			value, ok = dev.driver, true
		}
		if !ok {
			return false, false
		}
		if value != c.value {
			return false, true
		}
	}
	return true, true
}
