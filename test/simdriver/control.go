package simdriver

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// GPUs are named by slot: the N of [gpu N]. A slot stays when others are
// removed; the NVML index is the position among the slots that are left.

// Slots are the GPUs of the machine, in index order.
func (m *Machine) Slots() ([]int, error) {
	var slots []int
	err := m.read(func(c *conf) { slots = c.slots() })
	return slots, err
}

// Get is a key of a GPU, its own or the default; "" when the file gives none.
func (m *Machine) Get(slot int, key string) (string, error) {
	var v string
	err := m.read(func(c *conf) { v = c.gpuGet(slot, key) })
	return v, err
}

// UUID is the GPU's, "" when there is no such slot.
func (m *Machine) UUID(slot int) string {
	v, err := m.Get(slot, "uuid")
	if err != nil {
		return ""
	}
	return v
}

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

// Set gives a GPU's key another value; "none" makes its call NOT_SUPPORTED.
func (m *Machine) Set(slot int, key, value string) error {
	if err := checkKey(key); err != nil {
		return err
	}
	if strings.ContainsAny(value, "\n#") {
		return fmt.Errorf("value %q: no line breaks or #", value)
	}
	return m.edit(func(c *conf) error { return c.set(gpuHead(slot), key, value) })
}

// Lose takes the GPU off the bus: every call on it answers GPU_IS_LOST, the
// count stays.
func (m *Machine) Lose(slot int) error { return m.Set(slot, "lost", "yes") }

// Restore brings a lost GPU back with the identity that it had.
func (m *Machine) Restore(slot int) error { return m.Set(slot, "lost", "no") }

// Add plugs a GPU in; keys are lines like "pci = 0000:5e:00.0". A uuid and a
// free PCI address are made up unless given; the rest comes from [defaults].
func (m *Machine) Add(slot int, keys ...string) error {
	for _, line := range keys {
		key, _, ok := pair(line)
		if !ok {
			return fmt.Errorf("add GPU: %q is not key = value", line)
		}
		if err := checkKey(key); err != nil {
			return fmt.Errorf("add GPU: %w", err)
		}
	}
	return m.edit(func(c *conf) error {
		if slices.Contains(c.slots(), slot) {
			return fmt.Errorf("add GPU: slot %d is taken", slot)
		}
		given := func(key string) bool {
			return slices.ContainsFunc(keys, func(line string) bool { k, _, _ := pair(line); return k == key })
		}
		if !given("uuid") {
			keys = append(keys, "uuid = GPU-"+newUUID())
		}
		if !given("pci") {
			keys = append(keys, "pci = "+freePCI(c))
		}
		c.addGPU(slot, keys)
		return nil
	})
}

// newUUID is a random UUID (RFC 9562, version 4).
func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

func freePCI(c *conf) string {
	var taken []string
	for _, s := range c.slots() {
		taken = append(taken, c.gpuGet(s, "pci"))
	}
	for bus := 0x20; ; bus++ {
		if pci := fmt.Sprintf("0000:%02x:00.0", bus); !slices.Contains(taken, pci) {
			return pci
		}
	}
}

// Remove unplugs a GPU: it is no longer enumerated, and the indices behind it move up.
func (m *Machine) Remove(slot int) error {
	return m.edit(func(c *conf) error {
		if !c.removeGPU(slot) {
			return fmt.Errorf("remove GPU: no slot %d", slot)
		}
		return nil
	})
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

// SetDriver replaces the kernel driver by another version: sessions of the old
// one are over, and a process that has the old library mapped gets
// LIB_RM_VERSION_MISMATCH when it initialises again.
func (m *Machine) SetDriver(version string) error {
	return m.edit(func(c *conf) error {
		if err := c.set("machine", "driver", version); err != nil {
			return err
		}
		return bump(c)
	})
}

// SetLibrary replaces the library on disk by another version without touching
// the kernel driver, as a package upgrade does: sessions go on, new processes
// get LIB_RM_VERSION_MISMATCH until SetDriver says the same version.
func (m *Machine) SetLibrary(version string) error {
	return m.edit(func(c *conf) error { return c.set("machine", "library", version) })
}

// Unload takes the kernel driver away: sessions end with DRIVER_NOT_LOADED,
// the driver's files under /proc and /dev go, system event sets hear of the unbinding.
func (m *Machine) Unload() error { return m.load("no", systemUnbind) }

// Load brings the kernel driver back; handles from before stay invalid.
func (m *Machine) Load() error { return m.load("yes", systemBind) }

func (m *Machine) load(loaded string, event int) error {
	var addresses []string
	err := m.edit(func(c *conf) error {
		for _, s := range c.slots() {
			addresses = append(addresses, c.gpuGet(s, "pci"))
		}
		if err := c.set("machine", "loaded", loaded); err != nil {
			return err
		}
		return bump(c)
	})
	if err != nil {
		return err
	}
	for _, pci := range addresses {
		var domain, bus, dev uint32
		if _, err := fmt.Sscanf(pci, "%x:%x:%x", &domain, &bus, &dev); err != nil {
			return fmt.Errorf("pci %q: %w", pci, err)
		}
		if err := m.appendEvent(fmt.Sprintf("system %#x %d", event, domain<<16|bus<<8|dev)); err != nil {
			return err
		}
	}
	return nil
}

// bump starts another incarnation of the kernel driver.
func bump(c *conf) error {
	old, _ := c.get("machine", "incarnation")
	return c.set("machine", "incarnation", strconv.FormatUint(number(old)+1, 10))
}

// Hide takes the library file away, Unhide brings it back. A process that has
// loaded the library keeps it, as with any library.
func (m *Machine) Hide() error { return os.Rename(m.libraryPath(), m.libraryPath()+".hidden") }

// Unhide is Hide undone.
func (m *Machine) Unhide() error { return os.Rename(m.libraryPath()+".hidden", m.libraryPath()) }

func (m *Machine) libraryPath() string { return m.path(libraryDir, LibraryName) }

// Violations are the recorded misuses of the library, oldest first.
func (m *Machine) Violations() ([]string, error) {
	text, err := os.ReadFile(m.path("violations"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return slices.DeleteFunc(strings.Split(string(text), "\n"), func(s string) bool { return s == "" }), err
}

// ForgiveViolations empties the record: for tests that misuse on purpose.
func (m *Machine) ForgiveViolations() error { return os.WriteFile(m.path("violations"), nil, 0o666) }

// Calls counts NVML calls by name, of every process that has used the machine so far.
func (m *Machine) Calls() (map[string]uint64, error) {
	total := map[string]uint64{}
	entries, err := os.ReadDir(m.path("calls"))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		calls, err := m.callsOf(e.Name())
		if err != nil {
			return nil, err
		}
		for name, n := range calls {
			total[name] += n
		}
	}
	return total, nil
}

// CallsOf counts the NVML calls of one process.
func (m *Machine) CallsOf(pid int) (map[string]uint64, error) { return m.callsOf(strconv.Itoa(pid)) }

// callsOf reads what lib/state.c maps: an array of {name[56], count}.
func (m *Machine) callsOf(pid string) (map[string]uint64, error) {
	raw, err := os.ReadFile(m.path("calls", pid))
	if err != nil {
		return nil, err
	}
	const nameSize, size = 56, 64
	calls := map[string]uint64{}
	for ; len(raw) >= size; raw = raw[size:] {
		name, _, _ := bytes.Cut(raw[:nameSize], []byte{0})
		if n := binary.NativeEndian.Uint64(raw[nameSize:size]); len(name) > 0 && n > 0 {
			calls[string(name)] = n
		}
	}
	return calls, nil
}
