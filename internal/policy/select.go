package policy

import (
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
)

var selectorKeys = []string{"uuid", "pci", "index", "model", "migProfile", "memory"}

// selector reads what selects devices; false if it is wrong, or nothing.
func (c *compiler) selector(v value) (core.Selector, bool) {
	before := len(c.errs)
	s := core.Selector{At: c.place(v)}
	f := v.fields(selectorKeys...)
	if v.given() && len(c.errs) == before && len(f.given(selectorKeys...)) == 0 {
		v.fail("selects nothing: want %s", list(selectorKeys, "or"))
	}
	for _, w := range f.at("uuid").words() {
		if id, ok := uuid(w); ok {
			s.IDs = append(s.IDs, id)
		}
	}
	for _, w := range f.at("pci").words() {
		a, err := core.ParsePCIAddress(w.word())
		if err != nil {
			w.fail("want an address as under /sys/bus/pci/devices, such as 0000:3b:00.0")
		}
		s.PCI = append(s.PCI, a)
	}
	for _, w := range f.at("index").words() {
		s.Indices = append(s.Indices, indices(w)...)
	}
	s.Models = patterns(f.at("model"), `a product name, with * for any text: "*H100*"`)
	s.Profiles = patterns(f.at("migProfile"), `a MIG profile, with * for any text: "1g.*"`)
	s.Memory = memoryRange(f.at("memory"))
	return s, len(c.errs) == before
}

// uuid reads the UUID of a device.
func uuid(v value) (core.DeviceID, bool) {
	word := v.word()
	rest, ok := strings.CutPrefix(word, "GPU-")
	if !ok {
		rest, ok = strings.CutPrefix(word, "MIG-")
	}
	if !ok || rest == "" || strings.ContainsAny(rest, "*, \t\n") {
		v.fail("want a UUID as nvidia-smi -L prints it: GPU-... or MIG-...")
		return "", false
	}
	return core.DeviceID(word), true
}

// maxIndex is more than any machine has, and keeps a range short.
const maxIndex = 255

// indices reads "0", "2-4" or "0:1".
func indices(v value) []core.DeviceIndex {
	const want = `want the number of a GPU, a range or GPU:instance, up to 255: 0, "2-4" or "0:1"`
	if gpu, instance, ok := strings.Cut(v.word(), ":"); ok {
		g, ok1 := index(gpu)
		i, ok2 := index(instance)
		if ok1 && ok2 {
			return []core.DeviceIndex{{GPU: g, Instance: i}}
		}
		v.fail(want)
		return nil
	}
	from, to, isRange := strings.Cut(v.word(), "-")
	if !isRange {
		to = from
	}
	first, ok1 := index(from)
	last, ok2 := index(to)
	if !ok1 || !ok2 || first > last {
		v.fail(want)
		return nil
	}
	var all []core.DeviceIndex
	for g := first; g <= last; g++ {
		all = append(all, core.DeviceIndex{GPU: g, Instance: -1})
	}
	return all
}

// index is a number without anything that YAML, of one version or another, reads as another one (010, 1_0, 1e1).
func index(text string) (int, bool) {
	n, err := strconv.Atoi(text)
	return n, err == nil && strconv.Itoa(n) == text && n >= 0 && n <= maxIndex
}

func patterns(v value, want string) []string {
	var all []string
	for _, w := range v.words() {
		if w.word() == "" {
			w.fail("want %s", want)
			continue
		}
		all = append(all, w.word())
	}
	return all
}

// memoryRange reads {min: 40GiB, max: 80GiB}.
func memoryRange(v value) core.Range {
	before := len(v.errs)
	f := v.fields("min", "max")
	if v.given() && len(f.values) == 0 && len(v.errs) == before {
		v.fail("want {min: 40GiB}, {max: 80GiB} or both")
	}
	r := core.Range{Min: size(f.at("min")), Max: size(f.at("max"))}
	if r.Max > 0 && r.Min > r.Max {
		f.at("min").fail("want no more than max, which is %s", f.at("max").text())
	}
	return r
}

// most memory is more than any device has (NVIDIA's have up to 288 GiB).
const most = 16 << 40

// size reads an amount of memory in bytes, 0 if nothing is given. The units are those that NVML counts in and
// nvidia-smi prints; "40GB" would be something else to everybody.
func size(v value) uint64 {
	if !v.given() {
		return 0
	}
	word := v.word()
	for i, unit := range []string{"KiB", "MiB", "GiB", "TiB"} {
		number, ok := strings.CutSuffix(word, unit)
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		bytes := math.Ldexp(n, 10*(i+1))
		if err == nil && isDecimal(number) && bytes >= 1<<20 && bytes <= most {
			return uint64(bytes)
		}
	}
	if v.isPlain() {
		v.fail("want a size such as 512MiB or 40GiB (KiB, MiB, GiB, TiB), from 1MiB to 16TiB")
	}
	return 0
}

// isDecimal rules out what else is a number to strconv: 1e3, 0x1p4, Inf.
func isDecimal(number string) bool {
	return !strings.ContainsFunc(strings.TrimSpace(number), func(r rune) bool { return (r < '0' || r > '9') && r != '.' })
}

// everything reports whether a selector selects every device.
func everything(s core.Selector) bool {
	all := slices.ContainsFunc(s.Models, func(p string) bool { return strings.Trim(p, "*") == "" })
	s.At, s.Models = "", nil
	return all && reflect.DeepEqual(s, core.Selector{})
}

// onlyInstances reports whether a selector can't select a full GPU.
func onlyInstances(s core.Selector) bool {
	return s.Profiles != nil ||
		s.IDs != nil && !slices.ContainsFunc(s.IDs, func(id core.DeviceID) bool { return strings.HasPrefix(string(id), "GPU-") }) ||
		s.Indices != nil && !slices.ContainsFunc(s.Indices, func(i core.DeviceIndex) bool { return i.Instance < 0 })
}

// named are the single devices that a selector names.
func named(s core.Selector) []string {
	var all []string
	for _, id := range s.IDs {
		all = append(all, string(id))
	}
	for _, a := range s.PCI {
		all = append(all, string(a))
	}
	for _, i := range s.Indices {
		name := strconv.Itoa(i.GPU)
		if i.Instance >= 0 {
			name += ":" + strconv.Itoa(i.Instance)
		}
		all = append(all, name)
	}
	return all
}

// onlyNames reports whether a selector selects each device that it names, whatever else is true of it.
func onlyNames(s core.Selector) bool {
	conditions := 0
	for _, given := range []bool{s.IDs != nil, s.PCI != nil, s.Indices != nil} {
		if given {
			conditions++
		}
	}
	s.At, s.IDs, s.PCI, s.Indices = "", nil, nil, nil
	return conditions == 1 && reflect.DeepEqual(s, core.Selector{})
}
