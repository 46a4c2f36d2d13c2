package simdriver

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Instances are the UUIDs of a GPU's MIG devices, in index order.
func (m *Machine) Instances(slot int) ([]string, error) {
	var ids []string
	err := m.read(func(c *conf) {
		for _, line := range c.all(gpuHead(slot), "instance") {
			for _, word := range strings.Fields(line) {
				if id, ok := strings.CutPrefix(word, "uuid="); ok {
					ids = append(ids, id)
				}
			}
		}
	})
	return ids, err
}

// SetMIG turns MIG on and makes the layout anew: profiles as "1g.10gb", none
// for an empty GPU. Every instance gets a new UUID. Processes that registered
// for it get a MIG-config-change event.
func (m *Machine) SetMIG(slot int, profiles ...string) error {
	err := m.edit(func(c *conf) error {
		lines, err := layOut(c, slot, profiles)
		if err != nil {
			return fmt.Errorf("MIG layout of GPU %d: %w", slot, err)
		}
		if err := c.setAll(gpuHead(slot), "instance", lines); err != nil {
			return err
		}
		return c.set(gpuHead(slot), "mig", "yes")
	})
	if err != nil {
		return err
	}
	return m.Event(slot, EventMIGConfigChange, 0)
}

// MIGOff turns MIG off; the instances are gone.
func (m *Machine) MIGOff(slot int) error {
	err := m.edit(func(c *conf) error {
		if err := c.setAll(gpuHead(slot), "instance", nil); err != nil {
			return err
		}
		return c.set(gpuHead(slot), "mig", "no")
	})
	if err != nil {
		return err
	}
	return m.Event(slot, EventMIGConfigChange, 0)
}

// SetInstance gives a MIG device words of its line anew: "used=4096MiB", "bar1_used=12MiB", "index=5" or
// "ecc_uncorrected=1". Of index it is the one that nvmlDeviceGetMigDeviceHandleByIndex takes.
func (m *Machine) SetInstance(uuid string, words ...string) error {
	return m.edit(func(c *conf) error {
		for _, slot := range c.slots() {
			lines := c.all(gpuHead(slot), "instance")
			i := slices.IndexFunc(lines, func(line string) bool { return slices.Contains(strings.Fields(line), "uuid="+uuid) })
			if i < 0 {
				continue
			}
			for _, word := range words {
				key, value, _ := strings.Cut(word, "=")
				if value == "" || !slices.Contains([]string{"used", "bar1_used", "index", "ecc_uncorrected"}, key) || strings.ContainsAny(word, " #\n") {
					return fmt.Errorf("instance %s: %q is no word of its line that can be set", uuid, word)
				}
				fields := slices.DeleteFunc(strings.Fields(lines[i]), func(f string) bool { return strings.HasPrefix(f, key+"=") })
				lines[i] = strings.Join(append(fields, word), " ")
			}
			return c.setAll(gpuHead(slot), "instance", lines)
		}
		return fmt.Errorf("no instance %s", uuid)
	})
}

// layOut places profiles in the slices of a GPU's memory as the driver does: each at the first free place that its
// size allows, 3g from the far end.
func layOut(c *conf, slot int, profiles []string) ([]string, error) {
	slots := 8
	if n, err := strconv.Atoi(c.gpuGet(slot, "mig_slices")); err == nil {
		slots = n
	}
	used, left := make([]bool, slots), min(slots, 7)
	var lines []string
	for _, name := range profiles {
		head := "profile " + name
		size, most, compute, err := ofProfile(c, head)
		if err != nil {
			return nil, err
		}
		if most--; most < countPrefix(lines, name+" ") {
			return nil, fmt.Errorf("no room for %s: there are %d already", name, most+1)
		}
		at := slices.IndexFunc(places(slots, size, compute), func(start int) bool {
			return compute <= left && !slices.Contains(used[start:start+size], true)
		})
		if at < 0 {
			return nil, fmt.Errorf("no room for %s", name)
		}
		start := places(slots, size, compute)[at]
		for i := start; i < start+size; i++ {
			used[i] = true
		}
		left -= compute
		gi := slots/size - 1 + start/size // ids follow the place
		lines = append(lines, fmt.Sprintf("%s gi=%d ci=0 start=%d uuid=MIG-%s", name, gi, start, newUUID()))
	}
	return lines, nil
}

// places are where a profile may begin, in the order in which they are tried. Compute slices lie beside those of
// memory, but for the eighth.
func places(slots, size, compute int) (starts []int) {
	for start := 0; start+size <= slots && start+compute <= 7; start += size {
		starts = append(starts, start)
	}
	if size < slots && compute < size && size > 2 {
		slices.Reverse(starts)
	}
	return starts
}

// ofProfile reads how many slices of memory a profile takes, how often it fits, and its compute slices.
func ofProfile(c *conf, head string) (size, most, compute int, err error) {
	if _, ok := c.section(head); !ok {
		return 0, 0, 0, fmt.Errorf("no [%s]", head)
	}
	for key, n := range map[string]*int{"size": &size, "max": &most, "slices": &compute} {
		text, _ := c.get(head, key)
		if *n, err = strconv.Atoi(text); err != nil || *n < 1 {
			return 0, 0, 0, fmt.Errorf("[%s]: %s %q", head, key, text)
		}
	}
	return size, most, compute, nil
}

func countPrefix(lines []string, prefix string) (n int) {
	for _, line := range lines {
		if strings.HasPrefix(line, prefix) {
			n++
		}
	}
	return n
}
