package simdriver

import (
	"crypto/rand"
	"errors"
	"fmt"
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

// Set gives a GPU's key another value; "none" makes its call NOT_SUPPORTED.
func (m *Machine) Set(slot int, key, value string) error {
	return m.Change(slot, key+" = "+value)
}

// Change sets several keys of a GPU at once, as lines like "recovery_action = 1".
func (m *Machine) Change(slot int, lines ...string) error {
	if err := checkLines(lines); err != nil {
		return err
	}
	return m.edit(func(c *conf) error {
		for _, line := range lines {
			key, value, _ := pair(line)
			if err := c.set(gpuHead(slot), key, value); err != nil {
				return err
			}
		}
		return nil
	})
}

// checkLines refuses what is not "key = value" with a key that GPUs have.
func checkLines(lines []string) error {
	for _, line := range lines {
		key, _, ok := pair(line)
		if !ok || strings.ContainsAny(line, "\n#") {
			return fmt.Errorf("%q is not key = value", line)
		}
		if err := checkKey(key); err != nil {
			return err
		}
	}
	return nil
}

// Lose takes the GPU off the bus: every call on it answers GPU_IS_LOST, the
// count stays.
func (m *Machine) Lose(slot int) error { return m.Set(slot, "lost", "yes") }

// Restore brings a lost GPU back with the identity that it had.
func (m *Machine) Restore(slot int) error { return m.Set(slot, "lost", "no") }

// Reset does what a reset of the GPU does to its state: it answers again, the
// recovery action is None, nothing is pending, and what counts since the last
// reset counts from zero. Handles stay as they are.
func (m *Machine) Reset(slot int) error {
	lines := []string{"lost = no"}
	for _, key := range []string{"recovery_action", "pcie_replays", "energy", "ecc_corrected_volatile", "ecc_uncorrected_volatile"} {
		lines = append(lines, key+" = 0")
	}
	for _, key := range []string{"remapped_pending", "retired_pending", "channel_repair_pending", "tpc_repair_pending"} {
		lines = append(lines, key+" = no")
	}
	has := lines[:0]
	err := m.read(func(c *conf) { // a reset adds no value that the GPU does not report
		for _, line := range lines {
			key, _, _ := pair(line)
			if v := c.gpuGet(slot, key); key == "lost" || (v != "" && v != "none") {
				has = append(has, line)
			}
		}
	})
	if err != nil {
		return err
	}
	return m.Change(slot, append(has, m.initialised()...)...)
}

// Invalidate makes the handles of a GPU that were given out so far answer
// INVALID_ARGUMENT, as those from before a reset may.
func (m *Machine) Invalidate(slot int) error {
	resets, err := m.Get(slot, "resets")
	if err != nil {
		return err
	}
	return m.Set(slot, "resets", strconv.FormatUint(number(resets)+1, 10))
}

// Unbind takes the kernel driver from one GPU, which is lost to NVML then;
// system event sets get the unbinding.
func (m *Machine) Unbind(slot int) error {
	return errors.Join(m.Lose(slot), m.systemEvent(slot, systemUnbind))
}

// Bind gives a GPU its driver back, which initialises it.
func (m *Machine) Bind(slot int) error {
	return errors.Join(m.Reset(slot), m.systemEvent(slot, systemBind))
}

func (m *Machine) systemEvent(slot, event int) error {
	pci, err := m.Get(slot, "pci")
	if err != nil {
		return err
	}
	return m.bindingOf(pci, event)
}

// Add plugs a GPU in; keys are lines like "pci = 0000:5e:00.0". A uuid and a
// free PCI address are made up unless given; the rest comes from [defaults].
func (m *Machine) Add(slot int, keys ...string) error {
	if err := checkLines(keys); err != nil {
		return fmt.Errorf("add GPU: %w", err)
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
		c.addGPU(slot, append(keys, initialised(c)...))
		if c.gpuGet(slot, "name") == "" {
			return fmt.Errorf("add GPU: name is needed, this machine has no [defaults]")
		}
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
