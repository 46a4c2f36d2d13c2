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
		lines, err := layOut(c, profiles)
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

// layOut places profiles in the eight memory slices of a GPU as the driver
// does: each at the first free place that its size allows, 3g from the far end.
func layOut(c *conf, profiles []string) ([]string, error) {
	places := map[int][]int{1: {0, 1, 2, 3, 4, 5, 6}, 2: {0, 2, 4, 6}, 4: {4, 0}, 8: {0}}
	firstGI := map[int]int{1: 7, 2: 3, 4: 1, 8: 0} // GPU instance ids follow the place
	var used [8]bool
	var lines []string
	for _, name := range profiles {
		head := "profile " + name
		text, ok := c.get(head, "size")
		if !ok {
			return nil, fmt.Errorf("no [%s]", head)
		}
		size, err := strconv.Atoi(text)
		if err != nil || places[size] == nil {
			return nil, fmt.Errorf("[%s]: size %q", head, text)
		}
		options := places[size]
		if strings.HasPrefix(name, "4g") {
			options = []int{0}
		}
		at := slices.IndexFunc(options, func(start int) bool { return !slices.Contains(used[start:start+size], true) })
		if at < 0 {
			return nil, fmt.Errorf("no room for %s", name)
		}
		start := options[at]
		for i := start; i < start+size; i++ {
			used[i] = true
		}
		lines = append(lines, fmt.Sprintf("%s gi=%d ci=0 start=%d uuid=MIG-%s", name, firstGI[size]+start/size, start, newUUID()))
	}
	return lines, nil
}
