package policy

import (
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// readSelector reads a selector; false if it is absent or has a problem.
func (c *compiler) readSelector(v value) (inventory.Selector, bool) {
	before := c.problems()
	s := inventory.Selector{At: c.at(v)}
	names := schema.Names(selectorKeys)
	f := v.Fields(names...)
	if v.Given() && c.problems() == before && len(f.Given(names...)) == 0 {
		v.Failf("selects nothing: want %s", document.Choice(names))
	}
	for _, w := range f.At("uuid").Scalars() {
		if id, ok := readUUID(w); ok {
			s.IDs = append(s.IDs, id)
		}
	}
	for _, w := range f.At("pci").Scalars() {
		a, err := gpu.ParsePCIAddress(w.Text())
		if err != nil {
			w.Failf("want an address as under /sys/bus/pci/devices, such as 0000:3b:00.0")
		}
		s.PCI = append(s.PCI, a)
	}
	for _, w := range f.At("index").Scalars() {
		s.Indices = append(s.Indices, readIndices(w)...)
	}
	s.Models = readPatterns(f.At("model"), wantModel)
	s.Profiles = readPatterns(f.At("migProfile"), wantProfile)
	s.Memory = readRange(f.At("memory"))
	return s, c.problems() == before
}

const (
	wantModel   = `a product name, with * for any text: "*H100*"`
	wantProfile = `a MIG profile, with * for any text: "1g.*"`
)

// readUUID reads the UUID of a GPU or a MIG instance from a scalar.
func readUUID(v value) (gpu.DeviceID, bool) {
	text := v.Text()
	rest, ok := strings.CutPrefix(text, "GPU-")
	if !ok {
		rest, ok = strings.CutPrefix(text, "MIG-")
	}
	if !ok || rest == "" || strings.ContainsAny(rest, "*, \t\n") {
		v.Failf("want a UUID as nvidia-smi -L prints it: GPU-... or MIG-...")
		return "", false
	}
	return gpu.DeviceID(text), true
}

// maxIndex limits indices, and with them the length of a range. No node has so many GPUs.
const maxIndex = 255

// readIndices reads "0", "2-4" or "0:1" from a scalar.
func readIndices(v value) []gpu.DeviceIndex {
	const want = `want the number of a GPU, a range or GPU:instance, up to 255: 0, "2-4" or "0:1"`
	if device, instance, ok := strings.Cut(v.Text(), ":"); ok {
		d, ok1 := parseIndex(device)
		i, ok2 := parseIndex(instance)
		if !ok1 || !ok2 {
			v.Failf(want)
			return nil
		}
		return []gpu.DeviceIndex{{GPU: d, Instance: i}}
	}
	from, to, isRange := strings.Cut(v.Text(), "-")
	if !isRange {
		to = from
	}
	first, ok1 := parseIndex(from)
	last, ok2 := parseIndex(to)
	if !ok1 || !ok2 || first > last {
		v.Failf(want)
		return nil
	}
	var all []gpu.DeviceIndex
	for i := first; i <= last; i++ {
		all = append(all, gpu.DeviceIndex{GPU: i, Instance: -1})
	}
	return all
}

// parseIndex parses a decimal number. What YAML 1.1 or 1.2 reads as another number (010, 1_0, 1e1) is refused.
func parseIndex(text string) (int, bool) {
	n, err := strconv.Atoi(text)
	return n, err == nil && strconv.Itoa(n) == text && n >= 0 && n <= maxIndex
}

func readPatterns(v value, want string) []string {
	var all []string
	for _, w := range v.Scalars() {
		if w.Text() == "" {
			w.Failf("want %s", want)
			continue
		}
		all = append(all, w.Text())
	}
	return all
}

// selectsEverything reports whether a selector selects every device.
func selectsEverything(s inventory.Selector) bool {
	all := slices.ContainsFunc(s.Models, func(p string) bool { return strings.Trim(p, "*") == "" })
	s.At, s.Models = "", nil
	return all && reflect.DeepEqual(s, inventory.Selector{})
}

// selectsInstancesOnly reports whether a selector selects no full GPU on any node.
func selectsInstancesOnly(s inventory.Selector) bool {
	return s.Profiles != nil ||
		s.IDs != nil && !slices.ContainsFunc(s.IDs, func(id gpu.DeviceID) bool { return strings.HasPrefix(string(id), "GPU-") }) ||
		s.Indices != nil && !slices.ContainsFunc(s.Indices, func(i gpu.DeviceIndex) bool { return i.Instance < 0 })
}

// namedDevices are the devices that a selector names by UUID, PCI address or index.
func namedDevices(s inventory.Selector) (names []string) {
	for _, id := range s.IDs {
		names = append(names, string(id))
	}
	for _, a := range s.PCI {
		names = append(names, string(a))
	}
	for _, i := range s.Indices {
		names = append(names, i.String())
	}
	return names
}

// namesOnly reports whether a selector selects each device that it names, without a further condition.
func namesOnly(s inventory.Selector) bool {
	kinds := 0
	for _, given := range []bool{s.IDs != nil, s.PCI != nil, s.Indices != nil} {
		if given {
			kinds++
		}
	}
	s.At, s.IDs, s.PCI, s.Indices = "", nil, nil, nil
	return kinds == 1 && reflect.DeepEqual(s, inventory.Selector{})
}
