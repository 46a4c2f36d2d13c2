package record

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// order are the keys of a GPU in the order of a machine file.
func order() (names []string) {
	for _, k := range keys {
		names = append(names, k.name)
	}
	return append(names, "numa", "max_mig", "mig_slices", "links_down", "fabric_state", "fabric_version", "fabric_status",
		"fabric_clique", "fabric_cluster", "fabric_health_mask", "fabric_health_summary")
}

// own are the keys that each GPU has for itself, whatever the others have.
var own = []string{"uuid", "pci", "serial", "minor", "numa", "board_id", "module_id"}

// text is the machine file: what all GPUs have in common is in the section defaults.
func (m *machine) text(links []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Recorded through NVML.\n[machine]\ndriver = %s\n", m.driver["driver"])
	if m.driver["cuda"] != "" {
		fmt.Fprintf(&b, "cuda = %s\n", m.driver["cuda"])
	}
	for _, p := range m.profiles {
		b.WriteString(p.text())
	}
	common := m.common()
	fmt.Fprintf(&b, "\n[defaults]\n")
	for _, name := range order() {
		if v, ok := common[name]; ok {
			fmt.Fprintf(&b, "%s = %s\n", name, v)
		}
	}
	for _, g := range m.gpus {
		fmt.Fprintf(&b, "\n[gpu %d]\n", g.Index)
		for _, name := range order() {
			if v, ok := g.Values[name]; ok && common[name] == "" {
				fmt.Fprintf(&b, "%s = %s\n", name, v)
			}
		}
		for _, line := range g.Instances {
			fmt.Fprintf(&b, "instance = %s\n", line)
		}
	}
	fmt.Fprintf(&b, "\n[links]\n")
	for _, line := range links {
		fmt.Fprintln(&b, line)
	}
	return b.String()
}

// common are the values that all GPUs share.
func (m *machine) common() map[string]string {
	if len(m.gpus) == 0 {
		return nil
	}
	common := maps.Clone(m.gpus[0].Values)
	maps.DeleteFunc(common, func(name, v string) bool {
		return slices.Contains(own, name) || slices.ContainsFunc(m.gpus, func(g GPU) bool { return g.Values[name] != v })
	})
	return common
}

func (p profile) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n[profile %s]\n", p.name)
	comment := func(guessed bool) string {
		if guessed {
			return "   # not read: by the number of slices"
		}
		return ""
	}
	fmt.Fprintf(&b, "gi_profile = %d\ngi_profile_id = %d\n", p.giProfile, p.giID)
	fmt.Fprintf(&b, "ci_profile = %d%s\nci_profile_id = %d\n", p.ciProfile, comment(p.ciGuessed), p.ciID)
	fmt.Fprintf(&b, "slices = %d\n", p.slices)
	if p.compute > 0 {
		fmt.Fprintf(&b, "compute_slices = %d\n", p.compute)
	}
	sizeComment := ""
	if p.sizeGuess {
		sizeComment = "   # not read: by its part of the memory"
	}
	fmt.Fprintf(&b, "size = %d%s\nmax = %d\nmemory = %s\nmultiprocessors = %d\n", p.size, sizeComment, p.max, mebibytes(p.memory), p.multiprocessors)
	for _, engine := range []struct {
		name string
		n    int
	}{{"copy_engines", p.copies}, {"decoders", p.dec}, {"encoders", p.enc}, {"jpegs", p.jpegs}, {"ofas", p.ofas}} {
		if engine.n > 0 {
			fmt.Fprintf(&b, "%s = %d\n", engine.name, engine.n)
		}
	}
	return b.String()
}

var (
	uuidPattern   = regexp.MustCompile(`\b(GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b`)
	serialPattern = regexp.MustCompile(`(?m)^serial = .*$`)
)

// Anonymous replaces the UUIDs and serial numbers of a machine file by others, the same by the same.
func Anonymous(text string) string {
	text = uuidPattern.ReplaceAllStringFunc(text, func(id string) string {
		sum := sha256.Sum256([]byte(id))
		h := hex.EncodeToString(sum[:16])
		return fmt.Sprintf("%s-%s-%s-%s-%s-%s", id[:3], h[:8], h[8:12], h[12:16], h[16:20], h[20:])
	})
	return serialPattern.ReplaceAllStringFunc(text, func(line string) string {
		sum := sha256.Sum256([]byte(line))
		return fmt.Sprintf("serial = 1%012d", int64(sum[0])<<24|int64(sum[1])<<16|int64(sum[2])<<8|int64(sum[3]))
	})
}
